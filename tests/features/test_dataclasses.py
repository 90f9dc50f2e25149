"""Dataclasses, which `forward` returns without having told PyTorch of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from random_plans import check_random_plan, random_plan
from shardwright.core.capture.capture import capture
from shardwright.core.graph.interpreter import interpret
from shardwright.core.torch_internals import pytree


@dataclass
class Output:
    loss: Tensor
    hidden: Any = None
    steps: int = 3


@dataclass(frozen=True, slots=True)
class Inner:
    values: Tensor


@dataclass
class Further(Output):
    parts: Any = None


@dataclass
class Doubled:
    loss: Tensor

    def __post_init__(self) -> None:
        self.loss = self.loss * 2


@dataclass
class DoubledInPlace:
    hidden: Tensor

    def __post_init__(self) -> None:
        self.hidden.mul_(2)


@dataclass
class Counted:
    hidden: Tensor
    steps: list[int]

    def __post_init__(self) -> None:
        self.steps.append(len(self.steps))


class Net(nn.Module):
    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(self.linear(x))


@pytest.mark.parametrize(
    "make",
    [
        lambda h: Output(h.square().mean(), h),
        lambda h: (Output(h.square().mean()), [Inner(h.sin())]),
        lambda h: Further(h.square().mean(), parts={"inner": Inner(h.cos())}),
    ],
)
def test_dataclasses_are_returned_as_they_are_made(make: Callable[[Tensor], Any]) -> None:
    net, args = Net(make), (torch.randn(8, 8),)
    graph = capture(net, args)
    check_random_plan(net, args, {}, graph, random_plan(graph, 4, 0))
    result, _ = interpret(graph, dict(net.named_parameters()), {}, args)
    blank, wanted = (pytree.tree_map_only(Tensor, type, each) for each in (result, net(*args)))
    assert blank == wanted


def test_the_loss_of_a_dataclass_is_that_of_its_name() -> None:
    graph = capture(Net(lambda h: Further(h.mean(), parts=h.sum())), (torch.randn(8, 8),))
    assert graph.loss is graph.output_values[0]


@pytest.mark.parametrize(
    "make", [lambda h: Doubled(h.mean()), DoubledInPlace, lambda h: Counted(h, [0])]
)
def test_a_dataclass_that_computes_when_it_is_made_is_made_in_each_call(
    make: Callable[[Tensor], Any],
) -> None:
    eager, x = Net(make), torch.randn(8, 8)
    net = copy.deepcopy(eager)
    sw.parallelize(net, sw.plan(net, (x,), devices=1))
    for _ in range(2):
        result, wanted = net(x), eager(x)
        assert type(result) is type(wanted)
        torch.testing.assert_close(vars(result), vars(wanted))


def test_an_argument_is_not_made_again_by_its_class() -> None:
    class OfDoubled(Net):
        def forward(self, x: Doubled) -> Tensor:
            loss: Tensor = self.linear(x.loss).sum()
            return loss

    eager, x = OfDoubled(print), Doubled(torch.ones(8, 8))
    net = sw.parallelize(eager, sw.plan(eager, (x,), devices=1), copy=True)
    torch.testing.assert_close(net(x), eager(x))
