"""Pins of calls with several operators, with none, and without tensors; layouts inside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw


def twice(x: Tensor, weight: Tensor) -> Tensor:
    return torch.matmul(torch.matmul(x, weight), weight) + 1


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.linear, self.identity = nn.Linear(8, 8), nn.Identity()
        self.twice: Any = twice
        self.once: Any = torch.matmul
        self.zeros: Any = torch.zeros
        self.layout: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.identity(self.linear(self.twice(x, self.weight)))
        if self.layout is not None:
            x = sw.reshard(x, self.layout)
        return (self.once(x, self.weight) + self.zeros(8, 8)).pow(2).mean()


ARGS = (torch.randn(8, 8),)


def strategies(net: nn.Module) -> dict[str, Any]:
    """The strategy of each operator, of a plan for four devices that equals one device."""
    plan = sw.plan(net, ARGS, devices=4)
    assert sw.check(net, ARGS, None, plan).passes()
    return dict(plan.strategies)


def graph_of(net: nn.Module) -> list[str]:
    return [op.name for op in sw.capture(net, ARGS).ops]


def test_a_function_of_several_operators_is_pinned_at_its_boundary() -> None:
    net = Layers()
    net.twice = sw.shard(twice, ((2, 2), (1, 2)), ((4, 1),))
    assert graph_of(net)[:6] == ["alias", "alias_1", "matmul", "matmul_1", "add", "alias_2"]
    found = strategies(net)
    assert [found[name] for name in ("alias", "alias_1", "alias_2")] == [
        ((2, 2),),
        ((1, 2),),
        ((4, 1),),
    ]


def test_a_function_of_one_operator_has_no_boundary() -> None:
    net = Layers()
    net.once = sw.shard(torch.matmul, ((1, 4), (4, 1)))
    assert not any("alias" in name for name in graph_of(net))


@pytest.mark.parametrize("layout", [(1, 4), (2, 2)])
def test_an_identity_is_pinned(layout: tuple[int, int]) -> None:
    net = Layers()
    sw.shard(net.identity, (layout,))
    assert strategies(net)["identity"] == (layout,)


def test_a_function_without_tensors_is_pinned_by_its_result() -> None:
    net = Layers()
    net.zeros = sw.shard(torch.zeros, (), ((2, 2),))
    plan = sw.plan(net, ARGS, devices=4)
    cuts = plan.partition(sw.capture(net, ARGS)).decisions.cuts["zeros"]
    assert sorted(cuts) == ["b", "s"]
    assert sw.check(net, ARGS, None, plan).passes()


@pytest.mark.parametrize("layout", [(2, 1), sw.Layout((2, 2), ("dp", "tp"))("tp", "dp")])
def test_reshard_lays_a_tensor_out(layout: Any) -> None:
    net = Layers()
    net.layout = layout
    wanted = layout if isinstance(layout, tuple) else layout.shard_counts
    assert strategies(net)["alias"] == (wanted,)


def test_reshard_changes_nothing_in_eager_code() -> None:
    x = torch.ones(4, 4)
    assert sw.reshard(x, (2, 2)) is x
    with pytest.raises(sw.StrategyError, match="layout"):
        sw.reshard(x, (0, 2))


def test_a_boundary_has_an_entry_for_each_result() -> None:
    net = Layers()
    net.twice = sw.shard(twice, ((2, 2), (1, 2)), ((4, 1), (1, 1)))
    with pytest.raises(sw.StrategyError, match=r"twice returns tensors of shapes \[8, 8\]"):
        sw.capture(net, ARGS)


def test_gradients_flow_through_reshard_under_no_grad() -> None:
    """As in eager code, where it is the tensor itself."""

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.same = nn.Linear(4, 4), sw.shard(nn.Identity(), ((2, 1),))

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            with torch.no_grad():
                z, same = sw.reshard(y, (2, 1)), self.same(y)
            return (y * z * same).mean()

    net, args = Product(), (torch.randn(8, 4),)
    assert sw.check(net, args, None, sw.plan(net, args, devices=2)).passes()
