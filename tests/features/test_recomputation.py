"""What is computed again in the backward pass: equal to one device, with less kept."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import shardwright as sw
from random_cases import random_cases
from random_graphs import random_net
from random_plans import check_random_plan, random_plan, random_recompute
from sample_models import Model, bert, encoder, gpt2, llama, mlp, resnet
from shardwright.core.api.save_graphs import program_text
from shardwright.core.constraints.recompute import recompute_of
from shardwright.core.lower.emit import Line, nest_segments, write_body
from shardwright.core.partition.decisions import ZERO_LEVELS, OptimizerParallel

MODELS: tuple[Callable[[], Model], ...] = (
    mlp,
    partial(resnet, blocks=(1, 1)),
    llama,
    partial(gpt2, layers=1),
    partial(bert, layers=1),
    encoder,
)


def some_model(seed: int) -> Model:
    """One of `MODELS`, and at every eighth seed and the one before a random one."""
    number = seed % 8
    return MODELS[number]() if number < len(MODELS) else (*random_net(seed), {})


@random_cases(8, slow=32)
def test_a_random_plan_with_random_segments_equals_one_device(seed: int) -> None:
    net, args, kwargs = some_model(seed)
    graph, draw = sw.capture(net, args, kwargs), random.Random(seed)
    level = draw.choice((None, *ZERO_LEVELS))
    plan = replace(
        random_plan(graph, draw.choice((1, 2, 4, 6, 8)), seed),
        recompute=random_recompute(graph, seed),
        sharding=OptimizerParallel(level, threshold=0) if level else None,
    )
    check_random_plan(net, args, kwargs, graph, plan)


class Storages(TorchDispatchMode):
    """Every storage that operators make."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.made[storage._cdata] = (weakref.ref(storage), storage.nbytes())
        return out

    def alive(self) -> dict[int, int]:
        """Bytes of those that still exist."""
        return {key: size for key, (ref, size) in self.made.items() if ref() is not None}


def kept_bytes(model: Model, plan: sw.Plan) -> tuple[int, Tensor]:
    """Bytes that lie between forward and backward, and the gradient of the first parameter."""
    net, args, kwargs = model
    parallel = sw.parallelize(net, plan, copy=True)
    weights = {p.untyped_storage()._cdata for p in parallel.parameters()}
    torch.manual_seed(1)
    with Storages() as storages:
        loss = parallel(*args, **kwargs)
        loss = loss if isinstance(loss, Tensor) else loss.loss
    alive = sum(size for key, size in storages.alive().items() if key not in weights)
    loss.backward()
    gradient = next(parallel.parameters()).grad
    assert gradient is not None
    return alive, gradient


class Stack(nn.Module):
    def __init__(self, count: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, 16))
            for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return F.mse_loss(x, torch.zeros_like(x))


BATCH = torch.randn(32, 16)


def test_only_what_segments_are_given_is_kept() -> None:
    plain, wanted = kept_bytes((Stack(), (BATCH,), {}), sw.plan(Stack(), (BATCH,), devices=1))
    net = Stack()
    sw.recompute(net.layers)
    less, got = kept_bytes((net, (BATCH,), {}), sw.plan(net, (BATCH,), devices=1))
    torch.testing.assert_close(got, wanted)
    row = 32 * 4
    assert plain > 4 * row * (64 + 64 + 16), "of each layer GELU's input, its result and the sum"
    assert less <= 6 * row * 16, "the sums between layers"


def test_kinds_free_what_only_they_and_their_readers_keep() -> None:
    plain, wanted = kept_bytes((Stack(), (BATCH,), {}), sw.plan(Stack(), (BATCH,), devices=1))
    net = Stack()
    sw.recompute(net, operators=("gelu", "aten.dropout"))
    less, got = kept_bytes((net, (BATCH,), {}), sw.plan(net, (BATCH,), devices=1))
    torch.testing.assert_close(got, wanted)
    row = 32 * 4
    assert plain - less == 4 * 2 * row * 64, "dropout's result and its mask, a float32 on the CPU"


def test_several_micro_batches_may_be_on_their_way() -> None:
    torch.manual_seed(0)
    plain, marked = Stack().eval(), Stack().eval()
    sw.recompute(marked.layers)
    parallel = sw.parallelize(marked, sw.plan(marked, (BATCH,), devices=1), copy=True)
    for net in (plain, parallel):
        losses = [net(BATCH * scale) for scale in (1.0, 2.0, 0.5)]
        for loss in losses:
            loss.backward()
    for (name, one), other in zip(plain.named_parameters(), parallel.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name)


def test_without_gradients_nothing_is_kept() -> None:
    net = Stack().eval()
    sw.recompute(net.layers)
    parallel = sw.parallelize(net, sw.plan(net, (BATCH,), devices=1), copy=True)
    with torch.no_grad():
        torch.testing.assert_close(parallel(BATCH), net(BATCH))


def test_a_compiled_program_computes_again_too() -> None:
    net = Stack().eval()
    sw.recompute(net.layers, communication=False)
    parallel = sw.parallelize(net, sw.plan(net, (BATCH,), devices=1), copy=True)
    parallel.compile(fullgraph=True, backend="aot_eager")
    parallel(BATCH).backward()
    net(BATCH).backward()
    for (name, one), other in zip(net.named_parameters(), parallel.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name)


def test_the_printed_program_shows_the_function_that_is_run_again() -> None:
    net = nn.Sequential(nn.Linear(8, 16, bias=False), nn.GELU(), nn.Linear(16, 8, bias=False))
    sw.recompute(net[1])
    plan = sw.plan(net, (torch.randn(4, 8),), devices=2, mode="data_parallel")
    assert """
    # 1: recomputed in the backward pass
    def compute_1(_0, _2_weight):
        # 1: b over dp
        _1 = aten.gelu.default(_0)
        # 2: b over dp
        _2 = aten.linear.default(_1, _2_weight); del _1
        return _2
    _2 = recompute_segment(compute_1, _0, _2_weight); del _0, _2_weight
""" in program_text(plan)


def line(name: str, reads: str, segment: str | None = None) -> Line:
    return Line((name,), f"f({', '.join(reads)})", tuple(reads), segment=segment)


def test_lines_between_go_before_a_segment_or_after_it() -> None:
    lines = [
        line("a", "x", "s"),
        line("w", ""),
        line("b", "a"),
        line("c", "aw", "s"),
        line("d", "bc"),
    ]
    arranged = nest_segments(lines, ["d"], lambda wanted: wanted, "again")
    assert [made.names for made in arranged] == [("w",), ("a", "c"), ("b",), ("d",)]
    assert list(write_body(arranged, ["d"])) == [
        "    w = f()",
        "    # s: recomputed in the backward pass",
        "    def compute_s(x, w):",
        "        a = f(x)",
        "        c = f(a, w)",
        "        return a, c",
        "    a, c = again(compute_s, x, w); del w",
        "    b = f(a); del a",
        "    d = f(b, c); del b, c",
    ]


class Checkpointed(Stack):
    """A stack that checkpoints its layers by itself."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=self.reentrant)
        return F.mse_loss(x, torch.zeros_like(x))


class CheckpointedSequence(Stack):
    def forward(self, x: Tensor) -> Tensor:
        layers = nn.Sequential(*self.layers)
        x = checkpoint_sequential(layers, 2, x, use_reentrant=False)
        return F.mse_loss(x, torch.zeros_like(x))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_inside_the_model_is_recomputation_in_the_plan(reentrant: bool) -> None:
    net = Checkpointed(reentrant).eval()
    plan = sw.plan(net, (BATCH,), devices=1)
    marked = Checkpointed(reentrant).eval()
    marked.load_state_dict(net.state_dict())
    for layer in marked.layers:
        sw.recompute(layer)
    wanted = sw.plan(marked, (BATCH,), devices=1)
    assert set(plan.recompute) == set(wanted.recompute) != set()
    assert len({each.segment for each in plan.recompute.values()}) == len(net.layers)
    assert plan.memory.peak == wanted.memory.peak
    parallel = sw.parallelize(net, plan, copy=True)
    assert str(parallel.program).count("recomputed in the backward pass") == len(net.layers)
    for each in (net, parallel):
        each(BATCH).backward()
    for (name, one), other in zip(net.named_parameters(), parallel.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name)


def test_a_random_plan_of_checkpointed_calls_equals_one_device() -> None:
    for net in (Checkpointed(True).eval(), CheckpointedSequence().eval()):
        graph = sw.capture(net, (BATCH,))
        plan = replace(random_plan(graph, 6, seed=3), recompute=recompute_of(graph))
        assert plan.recompute
        check_random_plan(net, (BATCH,), {}, graph, plan)


def test_reentrant_checkpoint_of_inputs_without_gradient_is_refused() -> None:
    net = Checkpointed(True)
    net.first.requires_grad_(False)
    with pytest.raises(sw.CaptureError, match="gives no gradients to the parameters"):
        sw.plan(net, (BATCH,), devices=1)


def test_recomputed_buffers_are_read_as_they_were() -> None:
    net = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 16))
    sw.recompute(net)
    parallel = sw.parallelize(net, sw.plan(net, (BATCH,), devices=1), copy=True)
    for each in (net, parallel):
        for scale in (1.0, 2.0):
            each(BATCH * scale).square().mean().backward()
    for (name, one), other in zip(net.named_parameters(), parallel.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name)
    for (name, one), other in zip(net.named_buffers(), parallel.buffers(), strict=True):
        torch.testing.assert_close(one, other, msg=name)
