"""One call of `sw.mixture_of_experts` is what a loop over experts computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

import shardwright as sw
from random_plans import check_random_plan, random_plan
from shardwright.core.graph import custom_ops

HIDDEN, INNER, EXPERTS = 8, 12, 4


class Expert(nn.Module):
    def __init__(self, gated: bool, bias: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, INNER, bias) if gated else None
        self.up = nn.Linear(HIDDEN, INNER, bias)
        self.down = nn.Linear(INNER, HIDDEN, bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(F.gelu(self.up(x)))
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Loop(nn.Module):
    """What people write."""

    def __init__(self, gated: bool = True, bias: bool = False) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert(gated, bias) for _ in range(EXPERTS))

    def routed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, ids = self.router(x).softmax(-1).topk(2)
        return weights / weights.sum(-1, keepdim=True), ids

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, ids = self.routed(rows)
        result = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            tokens, choice = torch.where(ids == number)
            result[tokens] += weights[tokens, choice, None] * expert(rows[tokens])
        return result.view_as(x)


class OneCall(Loop):
    def stacked(self, part: str, tensor: str = "weight") -> Tensor | None:
        every = [getattr(getattr(expert, part), tensor, None) for expert in self.experts]
        return None if every[0] is None else torch.stack(every)

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.routed(x)
        down, down_bias = self.stacked("down"), self.stacked("down", "bias")
        up, up_bias = self.stacked("up"), self.stacked("up", "bias")
        if self.experts[0].gate is None:
            return sw.mixture_of_experts(
                x, ids, weights, up, down, F.gelu, up_bias=up_bias, down_bias=down_bias
            )
        up = torch.stack([self.stacked("gate"), up], 1)
        if up_bias is not None:
            up_bias = torch.stack([self.stacked("gate", "bias"), up_bias], 1)
        return sw.mixture_of_experts(
            x, ids, weights, up, down, up_bias=up_bias, down_bias=down_bias
        )


class Stored(nn.Module):
    """Experts in two parameters."""

    def __init__(self, mixture: Any = sw.mixture_of_experts) -> None:
        super().__init__()
        self.mixture = mixture
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, 2, INNER, HIDDEN))
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER))

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(2)
        return self.mixture(x, ids, weights, self.up, self.down, torch.tanh)


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 6, HIDDEN), torch.randn(4, 6, HIDDEN)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_a_call_is_what_the_loop_is(gated: bool, bias: bool) -> None:
    loop, call = Loop(gated, bias).double(), OneCall(gated, bias).double()
    call.load_state_dict(loop.state_dict())
    x, _ = batch()
    for net in (loop, call):
        net(x.double()).square().sum().backward()
    assert_close(call(x.double()), loop(x.double()))
    for mine, theirs in zip(call.parameters(), loop.parameters(), strict=True):
        assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("build", [Stored, OneCall, lambda: OneCall(False, True)])
def test_random_plans_change_no_result(build: Any) -> None:
    torch.manual_seed(0)
    net = sw.WithLoss(build(), nn.MSELoss())
    graph = sw.capture(net, batch())
    assert sum(op.target is custom_ops.experts for op in graph.ops) == 1
    for seed, devices in enumerate((2, 4, 6)):
        check_random_plan(net, batch(), {}, graph, random_plan(graph, devices, seed))


def test_stored_experts_are_cut_over_devices() -> None:
    pinned = sw.shard(sw.mixture_of_experts, (None, None, None, (4, 1, 1, 1), (4, 1, 1)))
    net = sw.WithLoss(Stored(pinned), nn.MSELoss())
    plan = sw.plan(net, batch(), devices=4)
    assert ((4, 1, 1, 1), (4, 1, 1)) in [strategy[3:] for strategy in plan.strategies.values()]
    assert sw.check(net, batch(), {}, plan).passes()


def test_a_number_that_is_no_experts_adds_nothing() -> None:
    x, ids, weights = torch.randn(3, HIDDEN), torch.tensor([[0, 1]] * 3), torch.ones(3, 2)
    up, down = torch.randn(EXPERTS, INNER, HIDDEN), torch.randn(EXPERTS, HIDDEN, INNER)
    padded = torch.tensor([[0, -1]] * 3), torch.tensor([[EXPERTS, 1]] * 3)
    parts = [sw.mixture_of_experts(x, each, weights, up, down) for each in padded]
    assert_close(sum(parts), sw.mixture_of_experts(x, ids, weights, up, down))


class WholeRows(nn.Module):
    """Experts whose activation reads whole rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Parameter(torch.randn(EXPERTS, INNER, HIDDEN))
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, INNER))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        softmax, weights = nn.Softmax(-1), torch.ones_like(x[:, :1])
        return sw.mixture_of_experts(x, ids, weights, self.up, self.down, softmax)


def test_an_activation_of_whole_rows_is_that_of_a_loop_and_is_planned_as_its_operators() -> None:
    net, call = WholeRows(), (torch.randn(4, HIDDEN), torch.tensor([[0], [1], [1], [0]]))
    x, ids = call[0], call[1].flatten().tolist()
    rows = [(row @ net.up[i].T).softmax(-1) @ net.down[i].T for row, i in zip(x, ids, strict=True)]
    assert_close(net(*call), torch.stack(rows))
    plan = sw.plan(net, call, devices=2)
    assert all(op.target is not custom_ops.experts for op in plan.graph.ops)
    assert sw.check(net, call, {}, plan).passes()


def test_it_compiles_on_one_device() -> None:
    net, (x, _) = Stored(), batch()
    assert_close(torch.compile(net, backend="aot_eager", fullgraph=True)(x), net(x))


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"up": torch.zeros(4, 3, INNER, HIDDEN)}, r"`up` has shape .*\npass \[experts"),
        ({"down": torch.zeros(4, INNER, HIDDEN)}, r"`down` has .*, expected \[4, 8, 12\]"),
        ({"ids": torch.zeros(3, 2)}, "`ids` must be integers, not torch.float32"),
        ({"weights": torch.zeros(3)}, r"`weights` has shape \[3\], expected \[3, 2\]"),
        ({"x": torch.zeros(3, 9)}, r"`x` has shape \[3, 9\], expected \[3, 8\]"),
        ({"up_bias": torch.zeros(4, 9)}, r"`up_bias` has shape \[4, 9\], expected \[4, 12\]"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(changed: dict[str, Tensor], problem: str) -> None:
    given: dict[str, Any] = {
        "x": torch.zeros(3, HIDDEN),
        "ids": torch.zeros(3, 2, dtype=torch.long),
        "weights": torch.zeros(3, 2),
        "up": torch.zeros(4, INNER, HIDDEN),
        "down": torch.zeros(4, HIDDEN, INNER),
    }
    with pytest.raises(ValueError, match=problem):
        sw.mixture_of_experts(**{**given, **changed})
