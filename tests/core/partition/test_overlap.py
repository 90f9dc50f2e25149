"""What a program computes beside redistributions: as listed, as it runs, and as it is counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import shardwright as sw
from shardwright.core.cost.clusters import load_cluster
from shardwright.core.cost.predict import predict
from shardwright.core.layout.prime_mesh import prime_mesh
from shardwright.core.lower.emit_program import lower
from shardwright.core.parallel.simulate_ranks import simulated_ranks
from shardwright.core.partition.chunk import Chunk
from shardwright.core.partition.communication import default_storage
from shardwright.core.partition.decisions import Decisions, Recompute
from shardwright.core.partition.partitioned import Partitioned
from shardwright.core.plan import make_plan
from shardwright.core.rules.rule import Cuts

Listed = dict[tuple[str, str], tuple[list[str], list[str]]]


class Branches(nn.Module):
    """The sum of the first branch is read behind the second."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.other = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.up, self.down = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.enter(x))
        first = self.down(self.up(x))
        return (first + F.tanh(self.other(x))).square().mean()


X = torch.arange(32.0).reshape(4, 8) / 32


def branches(*recomputed: str) -> tuple[nn.Module, sw.Plan]:
    """The first branch tensor parallel on two devices, all else whole."""
    torch.manual_seed(0)
    net = Branches()
    graph, mesh = sw.capture(net, (X,)), prime_mesh(2)
    cuts: dict[str, Cuts] = {"up": {"j": (0,)}, "down": {"k": (0,)}}
    recompute = {name: Recompute("again") for name in recomputed}
    storage = default_storage(graph, mesh, cuts)
    partitioned = Partitioned(graph, mesh, Decisions(cuts, storage, recompute=recompute))
    return net, make_plan(partitioned, mode="test", options={}, search_seconds=0.0, training=True)


def listed(plan: sw.Plan) -> Listed:
    (chunk,) = plan.partitioned.chunks
    return {
        (t.step.operation, t.value.name): (
            [o.name for o in v.overlapping_ops],
            [o.name for o in v.delayed_linears],
        )
        for t, v in chunk.overlaps.items()
    }


def test_what_lies_between_maker_and_reader_and_the_weights_of_the_readers_are_listed() -> None:
    net, plan = branches()
    assert listed(plan) == {
        ("vary", "silu"): ([], ["up"]),
        ("all_reduce", "down"): (["other", "tanh"], []),
    }
    assert sw.check(net, (X,), {}, plan).passes(1e-9)


def test_segments_that_are_computed_again_overlap_within_themselves_only() -> None:
    net, plan = branches("up", "down")
    assert plan.partitioned.chunks[0].communication.segments
    assert listed(plan) == {("vary", "silu"): ([], ["up"])}
    assert sw.check(net, (X,), {}, plan).passes(1e-9)


class Record(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Names of collectives, matrix products and tanh, in the order in which they run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.__name__.split(".")[0]
        if name in ("mm", "tanh", "tanh_backward", "all_reduce", "wait_tensor"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def order_of(plan: sw.Plan, net: nn.Module) -> tuple[list[str], list[str]]:
    """What one step runs, forward and backward."""
    with simulated_ranks(plan.partitioned) as ranks:
        program = lower(plan.partitioned.chunks[0], ranks.devices)
        placed = ranks.shard_inputs(dict(net.named_parameters()), {}, [X])
        for shard in placed[0].values():
            shard.requires_grad_()
        with Record() as forward:
            (loss,), _ = program(*placed)
        with Record() as backward:
            loss.backward()
    return forward.names, backward.names


def test_what_is_listed_runs_between_the_start_of_a_collective_and_its_end() -> None:
    net, plan = branches()
    forward, backward = order_of(plan, net)
    assert forward == ["mm", "mm", "mm", "all_reduce", "mm", "tanh", "wait_tensor"]
    other, down, up_input, up_weight, enter = 2, 2, 1, 1, 1
    head = ["tanh_backward", *["mm"] * (other + down + up_input)]
    assert backward == [*head, "all_reduce", *["mm"] * up_weight, "wait_tensor", *["mm"] * enter]


def test_without_overlaps_every_collective_is_waited_for_at_once() -> None:
    net, plan = branches()
    with mock.patch.object(Chunk, "overlaps", {}):
        forward, backward = order_of(plan, net)
    for names in (forward, backward):
        assert names[names.index("all_reduce") + 1] == "wait_tensor"


def test_only_what_goes_on_beside_computation_counts_as_hidden() -> None:
    _, plan = branches()
    cluster = load_cluster("h100")
    cluster = replace(cluster, device=replace(cluster.device, overhead=1e-3))
    with mock.patch.object(Chunk, "overlaps", {}):
        (before,) = predict(plan.partitioned, cluster).chunks
    (step,) = predict(plan.partitioned, cluster).chunks
    assert (before.forward_hidden, before.backward_hidden) == (0.0, 0.0)
    assert step.forward_hidden == pytest.approx(step.forward_redistributions)
    assert step.backward_hidden == pytest.approx(step.backward_redistributions)
    hidden = step.forward_hidden + step.backward_hidden
    gained = (1 - cluster.device.overlap_slowdown) * hidden
    assert step.seconds == pytest.approx(before.seconds - gained)
    slow = replace(cluster, device=replace(cluster.device, overhead=0.0, memory_bandwidth=1e30))
    (nothing,) = predict(plan.partitioned, slow).chunks
    assert nothing.forward_hidden < nothing.forward_redistributions
