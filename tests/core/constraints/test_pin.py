"""Modules with others inside: what they are called with and return is pinned."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright as sw
from random_cases import random_cases
from random_plans import random_plan
from shardwright.core.capture.capture import capture
from shardwright.errors import StrategyError

PINNING_MODES = ("semi_auto", "recursive_programming", "sharding_propagation")


class Block(nn.Module):
    """Two layers; its input is scaled in place if asked for."""

    def __init__(self, in_place: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.in_place = nn.Linear(32, 64), nn.Linear(64, 32), in_place

    def forward(
        self, x: Tensor, scale: Tensor | None = None, *, shift: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if self.in_place:
            x.mul_(2)
        y = self.down(torch.relu(self.up(x)))
        y = y if scale is None else y * scale
        y = y if shift is None else y + shift
        return y, {"size": y.square().mean()}


class Net(nn.Module):
    """Calls a block twice, with keywords in another order than the signature's."""

    def __init__(self, in_place: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.block, self.last = nn.Linear(32, 32), Block(in_place), nn.Linear(32, 8)
        self.scale = nn.Parameter(torch.rand(32))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = self.first(x)
        y, penalty = self.block(shift=x + 1, x=x, scale=self.scale)
        z, other = self.block(x=x + y, scale=self.scale, shift=y)
        return F.cross_entropy(self.last(z), labels) + penalty["size"] + other["size"]


BATCH = (torch.randn(16, 32), torch.randint(8, (16,)))
PINNED = ((4, 2), None, (1, 8)), ((1, 8), None)


@pytest.mark.parametrize("mode", PINNING_MODES)
@pytest.mark.parametrize("in_place", [False, True])
def test_inputs_and_outputs_of_each_call_lie_as_pinned(mode: str, in_place: bool) -> None:
    net = Net(in_place)
    assert sw.shard(net.block, *PINNED) is net.block
    plan = sw.plan(net, BATCH, devices=8, mode=mode)
    for call in ("block", "block@2"):
        given, shift, returned = (plan.strategies[f"{call}.alias{n}"] for n in ("", "_1", "_2"))
        assert (given, shift, returned) == (((4, 2),), ((1, 8),), ((1, 8),))
    assert sw.check(net, BATCH, {}, plan).passes()


@random_cases(4)
def test_a_random_plan_with_pinned_modules_equals_the_eager_module(seed: int) -> None:
    net = Net(in_place=seed % 2 == 1)
    sw.shard(net.block, *PINNED)
    plan = random_plan(capture(net, BATCH), 8, seed)
    assert sw.check(net, BATCH, {}, plan).passes()


def test_the_module_itself_computes_and_copies_as_before() -> None:
    net = Net()
    before, state = net(*BATCH), list(net.state_dict())
    sw.shard(net.block, *PINNED)
    sw.plan(net, BATCH, devices=8)
    assert torch.equal(net(*BATCH), before)
    assert list(net.state_dict()) == state


def test_the_model_itself_is_pinned_so() -> None:
    net = sw.shard(nn.Sequential(nn.Linear(32, 64), nn.ReLU()), ((2, 1),), ((1, 4),))
    plan = sw.plan(net, (BATCH[0],), devices=8)
    assert plan.strategies["alias"] == ((2, 1),)
    assert plan.strategies["alias_1"] == ((1, 4),)
    assert prod(plan.mesh.device_matrix) == 8


def test_layers_inside_have_pins_of_their_own() -> None:
    net = Net()
    sw.shard(net.block, *PINNED)
    sw.shard(net.block.up, ((2, 1), (4, 1)))
    plan = sw.plan(net, BATCH, devices=8, mode="sharding_propagation")
    assert plan.strategies["block.up"] == ((2, 1), (4, 1))
    assert plan.strategies["block.alias"] == ((4, 2),)
    assert sw.check(net, BATCH, {}, plan).passes()


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ((((4, 2),), None), r"block \(Block\) is called with tensors of shapes \[16, 32\], \[32\]"),
        (
            (((4, 2), None, None), ((1, 8),)),
            r"block \(Block\) returns tensors of shapes \[16, 32\], \[\]",
        ),
        ((((3, 1), None, None), None), "16, which is not divisible into 3 shards"),
        ((((2, 1, 1), None, None), None), r"block\.alias"),
    ],
)
def test_entries_that_do_not_fit_are_refused(entries: Any, message: str) -> None:
    net = Net()
    sw.shard(net.block, *entries)
    with pytest.raises(StrategyError, match=message):
        sw.plan(net, BATCH, devices=8)


class Swish(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)


def test_several_operators_without_a_module_inside_take_an_entry_for_each_tensor() -> None:
    net = nn.Sequential(nn.Linear(32, 32), Swish())
    sw.shard(net[1], ((2, 4),))
    plan = sw.plan(net, BATCH[:1], devices=8, mode="sharding_propagation")
    assert plan.strategies["1.alias"] == ((2, 4),)
    sw.shard(net[1], ((2, 4), None))
    with pytest.raises(StrategyError, match=r"(?s)module '1' has 2 operators.*a module around it"):
        sw.plan(net, BATCH[:1], devices=8)
    net = nn.Sequential(net[0], nn.Sequential(Swish()))
    sw.shard(net[1], ((2, 4),))
    plan = sw.plan(net, BATCH[:1], devices=8, mode="sharding_propagation")
    assert plan.strategies["1.0.sigmoid"] == ((2, 4),)


def weighted(x: Tensor, weight: Tensor) -> Tensor:
    return torch.relu(x) * torch.tanh(weight)


class Weighted(nn.Module):
    """A loss of a function that is called with keywords."""

    def __init__(self, function: Any, names: tuple[str, str]) -> None:
        super().__init__()
        self.function, self.names = function, names
        self.first, self.weight = nn.Linear(32, 32), nn.Parameter(torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        arguments = {"x": self.first(x), "weight": self.weight}
        result: Tensor = self.function(**{name: arguments[name] for name in self.names})
        return result.square().mean()


@pytest.mark.parametrize("as_module", [False, True])
def test_entries_are_in_the_order_of_the_signature_however_a_function_is_called(
    as_module: bool,
) -> None:
    target = sw.Op(weighted) if as_module else weighted
    plans = []
    for names in (("x", "weight"), ("weight", "x")):
        pinned = sw.shard(target, ((4, 2), (2,)))
        net = Weighted(target if as_module else pinned, names)
        plans.append(sw.plan(net, (torch.randn(16, 32),), devices=8, mode="semi_auto"))
    assert plans[0].cuts == plans[1].cuts
