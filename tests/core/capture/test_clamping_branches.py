"""Branches that only clamp a tensor are captured with both sides."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn, randn

import shardwright as sw

pytestmark = pytest.mark.usefixtures("untried_suggestions")


class Branching(nn.Module):
    def __init__(self, branch: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.branch = nn.Linear(4, 4), branch

    def forward(self, x: Tensor) -> Tensor:
        return self.branch(self, self.linear(x))


def guards_overflow(net: nn.Module, x: Tensor) -> Tensor:
    if not torch.isfinite(x).all():
        limit = torch.finfo(x.dtype).max - 1000
        x = torch.clamp(x, min=-limit, max=limit)
    return x / 2


def clamps_large(net: nn.Module, x: Tensor) -> Tensor:
    if (x.abs() > 1).any():
        x = x.clamp(-0.5, 0.5)
    return x.square()


def clamps_unless_small(net: nn.Module, x: Tensor) -> Tensor:
    if net.training and not x.abs().mean() < 1:
        x = x.clip(max=0.1)
    return x.square()


@pytest.mark.parametrize("branch", [guards_overflow, clamps_large, clamps_unless_small])
@pytest.mark.parametrize("scale", [0.01, 9.0])
def test_either_side_is_that_of_the_module(branch, scale: float) -> None:
    net, x = Branching(branch), scale * randn(8, 4)
    with torch.no_grad():
        net.linear.bias.zero_()
    check = sw.check(net, (x,), None, sw.plan(net, (x,), devices=4))
    assert check.passes(), check


def test_limits_of_the_dtype_need_no_condition() -> None:
    graph = sw.capture(Branching(guards_overflow), (randn(8, 4),))
    assert "where" not in str([op.target for op in graph.ops])
    net, x = Branching(guards_overflow), torch.full((8, 4), 3e38)
    nn.init.constant_(net.linear.weight, 1)
    expected = net(x)
    assert expected.isfinite().all() and not net.linear(x).isfinite().all()
    program = sw.parallelize(net, sw.plan(graph, devices=1))
    assert torch.equal(program(x), expected)


def reads_limit(net: nn.Module, x: Tensor) -> Tensor:
    limit = 1.0
    if x.sum() > 0:
        limit = 0.5
        x = x.clamp(-limit, limit)
    return x * limit


def has_other_side(net: nn.Module, x: Tensor) -> Tensor:
    if x.sum() > 0:
        x = x.clamp(-1, 1)
    else:
        x = x * 2
        x = x + 1
    return x


def reads_two_tensors(net: nn.Module, x: Tensor) -> Tensor:
    if x.sum() > 0 or x.mean() < -1:
        x = x.clamp(-1, 1)
    return x


def clamps_another(net: nn.Module, x: Tensor) -> Tensor:
    y = x
    if x.sum() > 0:
        y = x.clamp(-1, 1)
    return y


class Boxed:
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def clamp(self, low: float, high: float) -> Boxed:
        return Boxed(self.x * high)


def clamps_an_object(net: nn.Module, x: Tensor) -> Tensor:
    y = Boxed(x)
    if x.sum() > 0:
        y = y.clamp(-1, 2)
    return y.x


OTHERS = [reads_limit, has_other_side, reads_two_tensors, clamps_another, clamps_an_object]


@pytest.mark.parametrize("branch", OTHERS)
def test_other_branches_are_refused(branch) -> None:
    with pytest.raises(sw.CaptureError, match="depends on the value of a tensor"):
        sw.capture(Branching(branch), (randn(8, 4),))
