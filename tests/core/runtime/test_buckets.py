"""Buckets: any level, size and number of micro-batches gives what one device gives."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import shardwright as sw
from random_cases import random_cases
from random_plans import random_cuts
from sample_models import Model, llama, mlp
from shardwright.core.cost.memory import memory
from shardwright.core.graph.graph import Graph
from shardwright.core.layout.layout import Layout
from shardwright.core.layout.prime_mesh import prime_mesh
from shardwright.core.lower.emit_program import lower
from shardwright.core.lower.program import Program
from shardwright.core.micro_batches.whole_batch import with_whole_batch
from shardwright.core.partition.chunk import Chunk
from shardwright.core.partition.communication import default_storage
from shardwright.core.partition.decisions import ZERO_LEVELS, Decisions, OptimizerParallel
from shardwright.core.partition.partitioned import Partitioned
from shardwright.core.partition.pipeline_spec import PipelineSpec
from shardwright.core.plan import Plan, make_plan
from shardwright.core.runtime.buckets import BoundBucket
from shardwright.core.runtime.devices import Devices
from shardwright.core.search.baselines import data_parallel
from shardwright.core.search.optimizer_sharding import sharded_storage
from shardwright.errors import StrategyError

SIZES = (16, 64, 64, 64, 64, 16)
"""Layers of one size each but the ends, so that each is a bucket."""


@cache
def captured(name: str, micro_batches: int) -> tuple[Model, Graph]:
    net, args, kwargs = {"mlp": mlp, "llama": lambda: llama(batch=8)}[name]()
    if name == "llama":
        labels = kwargs["labels"].clone()
        labels[0, 2:] = labels[5] = -100
        kwargs = {**kwargs, "labels": labels}

    def graph(count: int) -> Graph:
        def pieces(t: Tensor) -> Tensor:
            return t[: len(t) * count // micro_batches]

        return sw.capture(net, *pytree.tree_map_only(Tensor, pieces, (args, kwargs)))

    return (net, args, kwargs), with_whole_batch(graph(1), micro_batches, graph)


def planned(graph: Graph, devices: int, seed: int, micro_batches: int = 1) -> Plan:
    """Random cuts, level, shard size and size of buckets; or none of them."""
    draw, mesh = random.Random(seed), prime_mesh(devices)
    cuts = random_cuts(graph, mesh, seed)
    sizes = [-1, *(mesh.size(range(n, len(mesh.device_matrix))) for n in range(3))]
    sharding = OptimizerParallel(draw.choice(ZERO_LEVELS), draw.choice(sizes), draw.choice([0, 1]))
    used = default_storage(graph, mesh, cuts)
    try:
        storage = sharded_storage(graph, mesh, cuts, used, sharding)
    except StrategyError as error:  # These cuts leave fewer replicas.
        assert "no parameter is replicated" in str(error)
        sharding = replace(sharding, shard_size=-1)
        storage = sharded_storage(graph, mesh, cuts, used, sharding)
    decisions = Decisions(
        cuts,
        storage,
        sharding=sharding,
        bucket_bytes=draw.choice([1, 2000, 10_000, 2**20]),
    )
    if draw.random() < 0.2:
        decisions = replace(decisions, sharding=None)
    return make_plan(
        Partitioned(graph, mesh, decisions, PipelineSpec(micro_batches=micro_batches)),
        mode="random",
        options={"seed": seed},
        search_seconds=0.0,
        training=True,
    )


def check(name: str, devices: int, micro_batches: int, seed: int) -> None:
    (net, args, kwargs), graph = captured(name, micro_batches)
    plan = planned(graph, devices, seed, micro_batches)
    result = sw.check(net, args, kwargs, replace(plan, graph=graph))
    assert result.passes(1e-9), f"{plan.sharding} {plan.bucket_bytes}: {result}"


@pytest.mark.parametrize("micro_batches", [1, 2])
@random_cases(5, slow=15)
def test_a_random_plan_gives_what_one_device_gives(seed: int, micro_batches: int) -> None:
    check("mlp", (2, 4, 3, 6, 8)[seed % 5], micro_batches, seed)


@random_cases(2, slow=4)
def test_a_random_plan_of_a_language_model_gives_what_one_device_gives(seed: int) -> None:
    check("llama", (4, 2, 3, 6, 8)[seed % 5], (1, 2, 4)[seed % 3], seed)


# What one rank keeps, and in which order it works: on a process group that sends nothing.


@contextmanager
def one_of(layout: Layout) -> Iterator[Devices]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=layout.num_devices)
    try:
        yield Devices.of_process(layout, torch.device("cpu"))
    finally:
        dist.destroy_process_group()


def decisions(graph: Graph, mesh: Layout, level: str) -> Decisions:
    cuts = data_parallel(graph, mesh)
    sharding = OptimizerParallel(level, threshold=0)
    storage = sharded_storage(graph, mesh, cuts, default_storage(graph, mesh, cuts), sharding)
    return Decisions(cuts, storage, sharding=sharding, bucket_bytes=4 * 64 * 65)


def arguments(program: Program, args: tuple[Tensor, ...]) -> tuple[dict[str, Tensor], list[Tensor]]:
    made = program.communication.initial_layouts
    shards = {
        value.name: torch.zeros(made[value].shard_shape(value.shape), requires_grad=True)
        for value in program.parameters
    }
    return shards, list(args)


class Live(TorchDispatchMode):
    """The most bytes of gathered buckets that are alive at once, while the mode is on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.known: dict[int, tuple[StorageWeakRef, int]] = {}
        self.most = 0
        self.gathers = 0
        original = BoundBucket.finish_gather

        def finish_gather(bound: BoundBucket, pending: Tensor) -> list[Tensor]:
            tensors = original(bound, pending)
            self.gathers += 1
            for tensor in tensors:
                weak = StorageWeakRef(tensor.untyped_storage())
                self.known[weak.cdata] = (weak, tensor.untyped_storage().nbytes())
            return tensors

        monkeypatch.setattr(BoundBucket, "finish_gather", finish_gather)

    @property
    def bytes(self) -> int:
        return sum(size for weak, size in self.known.values() if not weak.expired())

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.most = max(self.most, self.bytes)
        return result


def whole_chunk(graph: Graph, mesh: Layout, decisions: Decisions) -> Chunk:
    """The whole model, as decided."""
    (chunk,) = Partitioned(graph, mesh, decisions).chunks
    return chunk


@pytest.mark.parametrize("level", ZERO_LEVELS)
def test_level3_holds_two_buckets_at_most_and_none_between_the_passes(
    level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, args, _ = mlp(8, SIZES)
    graph, mesh = sw.capture(net, args), prime_mesh(4)
    whole = sum(p.numel() * 4 for p in net.parameters())
    layer = 4 * 64 * 65
    with one_of(mesh) as devices:
        program = lower(whole_chunk(graph, mesh, decisions(graph, mesh, level)), devices)
        shards, inputs = arguments(program, args)
        live = Live(monkeypatch)
        with live:
            (loss,), _ = program(shards, {}, inputs)
            between = live.bytes
            forward, live.most = live.most, 0
            loss.backward()
    count = len(program.buckets)
    if level == "level3":
        assert between == 0
        assert max(forward, live.most) <= 2 * layer
        assert live.gathers == count + sum(b.bucket.regathers for b in program.buckets)
        assert live.gathers > count
    else:
        # Biases are not kept for the backward pass, nor is the weight that no gradient passes.
        first = net.get_parameter("layers.0.weight")
        unkept = [first, *(p for p in net.parameters() if p.ndim == 1)]
        assert whole - between == 4 * sum(p.numel() for p in unkept)
        assert live.gathers == count
    assert live.bytes == 0
    assert all(shard.grad is not None for shard in shards.values())


def test_level3_gathers_again_in_a_second_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    net, args, _ = mlp(8, SIZES)
    graph, mesh = sw.capture(net, args), prime_mesh(4)
    with one_of(mesh) as devices:
        program = lower(whole_chunk(graph, mesh, decisions(graph, mesh, "level3")), devices)
        shards, inputs = arguments(program, args)
        live = Live(monkeypatch)
        (loss,), _ = program(shards, {}, inputs)
        once = live.gathers
        loss.backward(retain_graph=True)
        twice = live.gathers
        assert live.bytes == 0
        loss.backward()
    assert twice - once == live.gathers - twice > 0


class Events(TorchDispatchMode):
    """Collectives that start and end, and products of matrices, in the order in which they run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.__name__.split(".")[0]
        if func.namespace == "_c10d_functional":
            large = args[0].numel() > 16
            self.seen += ["end" if name == "wait_tensor" else "start"] if large else []
        elif name in ("mm", "addmm"):
            self.seen.append("mm")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("level", [None, *ZERO_LEVELS])
def test_products_run_between_start_and_end_of_collectives(level: str | None) -> None:
    net, args, _ = mlp(8, SIZES)
    graph, mesh = sw.capture(net, args), prime_mesh(4)
    said = decisions(graph, mesh, level or "level1")
    if level is None:
        said = replace(said, storage=default_storage(graph, mesh, said.cuts), sharding=None)
    with one_of(mesh) as devices:
        program = lower(whole_chunk(graph, mesh, said), devices)
        shards, inputs = arguments(program, args)
        with Events() as forward:
            (loss,), _ = program(shards, {}, inputs)
        with Events() as backward:
            loss.backward()
    products = len(SIZES) - 1
    if level is not None:
        # The gather of each bucket is under way while the one before it is used.
        assert "".join(event[0] for event in forward.seen).startswith("ssemsemsem")
    seen = backward.seen
    assert seen.count("start") == seen.count("end") > products - 2
    under_way = [seen[:i].count("start") > seen[:i].count("end") for i in range(len(seen))]
    hidden = sum(busy for busy, event in zip(under_way, seen, strict=True) if event == "mm")
    assert hidden >= products


@pytest.mark.parametrize("level", ["level1", "level3"])
def test_gradients_of_a_local_map_are_reduced_during_its_backward_pass(level: str) -> None:
    net, args, _ = mlp(8, SIZES)
    sw.local_map(net, "b _f, b _f -> ()", partial="mean")
    graph, mesh = sw.capture(net, args), prime_mesh(4)
    with one_of(mesh) as devices:
        program = lower(whole_chunk(graph, mesh, decisions(graph, mesh, level)), devices)
        shards, inputs = arguments(program, args)
        (loss,), _ = program(shards, {}, inputs)
        with Events() as backward:
            loss.backward()
    # The layers before a bucket still have products when its gradients are sent.
    first = backward.seen.index("start")
    assert backward.seen[first:].count("mm") >= len(SIZES) - 2


class EitherFirst(nn.Module):
    """Two layers side by side, in an order that depends on the values of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(16, 16, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        order = [self.a, self.b] if x[0, 0] > 0 else [self.b, self.a]
        return torch.stack([layer(x).square().mean() for layer in order]).sum()


def test_ranks_reduce_buckets_of_a_local_map_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = EitherFirst(), torch.ones(8, 16)
    sw.local_map(net, "b _f -> ()", partial="mean")
    graph, mesh = sw.capture(net, (x,)), prime_mesh(4)
    said = replace(decisions(graph, mesh, "level1"), bucket_bytes=1)
    reduced: list[int] = []
    original = BoundBucket.reduce

    def reduce(bound: BoundBucket, gradients: Any) -> Tensor:
        reduced.append(bound.bucket.number)
        return original(bound, gradients)

    monkeypatch.setattr(BoundBucket, "reduce", reduce)
    with one_of(mesh) as devices:
        program = lower(whole_chunk(graph, mesh, said), devices)
        for batch in (x, -x):
            shards, inputs = arguments(program, (batch,))
            (loss,), _ = program(shards, {}, inputs)
            loss.backward()
    assert reduced == [1, 0, 1, 0]


def test_two_buckets_of_gradients_of_a_local_map_are_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    net = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(4)))
    sw.local_map(net, "b _f -> b _f")
    graph, mesh = (
        sw.capture(sw.WithLoss(net, nn.MSELoss()), (torch.ones(8, 16),) * 2),
        prime_mesh(4),
    )
    said = replace(decisions(graph, mesh, "level1"), bucket_bytes=1)
    seen: list[str] = []
    originals = {"reduce": BoundBucket.reduce, "sum_replicas": BoundBucket.sum_replicas}
    for name, original in originals.items():

        def call(
            bound: BoundBucket, each: Any, name: str = name, original: Any = original
        ) -> Tensor:
            seen.append(f"{name} {bound.bucket.number}")
            return original(bound, each)

        monkeypatch.setattr(BoundBucket, name, call)
    with one_of(mesh) as devices:
        program = lower(whole_chunk(graph, mesh, said), devices)
        shards, inputs = arguments(program, (torch.ones(8, 16),) * 2)
        (loss,), _ = program(shards, {}, inputs)
        loss.backward()
    in_turn = [each for n in (2, 1, 0) for each in (f"reduce {n}", f"sum_replicas {n + 1}")]
    assert seen == ["reduce 3", *in_turn, "sum_replicas 0"]


def test_the_gathers_stand_one_bucket_ahead_in_the_text() -> None:
    net, args, _ = mlp(8, SIZES)
    graph, mesh = sw.capture(net, args), prime_mesh(4)
    program = lower(
        whole_chunk(graph, mesh, decisions(graph, mesh, "level3")), Devices.of_rank(mesh, 0)
    )
    lines = [line.strip() for line in str(program).splitlines()]
    place = {
        f"{word}_{n}": next(i for i, line in enumerate(lines) if f" = {word}_{n}(" in line)
        for word in ("enter", "start", "finish")
        for n in range(len(program.buckets))
    }
    for number in range(len(program.buckets) - 1):
        assert place[f"enter_{number + 1}"] == place[f"start_{number + 1}"] - 1
        assert place[f"start_{number + 1}"] < place[f"finish_{number}"]
        assert place[f"finish_{number}"] < place[f"finish_{number + 1}"]
    assert "gathered again in the backward pass" in str(program)


def test_gradients_of_shards_are_added_up_before_the_backward_pass_ends() -> None:
    net, args, _ = mlp(8, (32,) * 33)
    graph, mesh = sw.capture(net, args), prime_mesh(4)
    said = replace(decisions(graph, mesh, "level3"), bucket_bytes=1)
    (stage,) = memory(Partitioned(graph, mesh, said, PipelineSpec(1, 4)), "sgd").stages
    assert stage.gradients == stage.parameters
    assert stage.temporary < stage.gradients / 2


def test_a_parameter_alone_on_its_first_dimension_is_gathered_without_a_copy() -> None:
    net, args, _ = mlp(8, SIZES)
    graph, mesh = sw.capture(net, args), prime_mesh(4)
    said = replace(decisions(graph, mesh, "level1"), bucket_bytes=1)
    with one_of(mesh) as devices:
        program = lower(whole_chunk(graph, mesh, said), devices)
        for bound in program.buckets:
            pending = bound.start_gather([torch.zeros(shape) for shape in bound.shapes])
            (member,) = bound.finish_gather(pending)
            assert member.data_ptr() == pending.data_ptr()
