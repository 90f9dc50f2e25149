"""Pins of calls with several operators, with none, and without tensors; layouts inside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

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


class Applied(nn.Module):
    """A function of one tensor, as the module `op`, between two operators."""

    def __init__(self, function: Any, *shape: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.op = sw.Op(function)
        self.weight = nn.Parameter(torch.randn(*shape))
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        # Conversions of a result contain an assertion with the tags of what computed it.
        y: Tensor = self.op(x * self.weight).to(self.dtype).tanh()
        return y.mean()


@pytest.mark.parametrize(
    ("function", "shape", "strategy"),
    [
        (lambda x: x.squeeze(1), (8, 1, 4, 1), (2, 1, 4, 1)),
        (lambda x: x.reshape(-1), (8, 8), (8, 1)),
        (lambda x: x.reshape(32, 4), (8, 4, 4), (4, 1, 2)),
        (lambda x: x[:, 0:8], (8, 8), (2, 4)),
        (lambda x: x.expand(8, 8), (8, 8), (4, 2)),
        (lambda x: x.permute(0, 1), (8, 8), (4, 2)),
        (lambda x: x.permute(1, 0), (8, 8), (4, 2)),
    ],
)
def test_a_pinned_view_stays_in_the_graph(
    function: Any, shape: tuple[int, ...], strategy: tuple[int, ...]
) -> None:
    """Previously merged with neighboring views or removed, so that its pin was an error."""
    net, x = Applied(function, *shape), torch.randn(shape)
    sw.shard(net.op, (strategy,))
    plan = sw.plan(net, (x,), devices=8, mode="semi_auto")
    assert plan.strategies["op"] == (strategy,)
    assert sw.check(net, (x,), {}, plan).passes()


def test_an_assertion_about_a_dtype_is_no_operator_of_a_call() -> None:
    net, x = Applied(lambda x: x.cumsum(0), 8, 8), torch.randn(8, 8)
    sw.shard(net.op, ((1, 4),))
    assert not any("alias" in op.name for op in sw.capture(net, (x,)).ops)


def by_segment(x: Tensor, segments: Tensor) -> Tensor:
    return torch.zeros(4, 8).index_add(0, segments, x)


@pytest.mark.parametrize(
    ("function", "args", "strategy"),
    [
        (by_segment, (torch.randn(8, 8), torch.arange(8) % 4), ((4, 2), (4,))),
        (lambda x: x.diagonal(0, -2, -1).sum(-1), (torch.randn(4, 3, 3),), ((2, 1, 1),)),
        (lambda x: x.flatten(1).softmax(1), (torch.randn(4, 4, 4),), ((2, 2, 2),)),
        (lambda x, y: x + y[:, None], (torch.randn(4, 8, 4), torch.ones(8)), ((2, 4, 1), (4,))),
        (F.triplet_margin_loss, (torch.randn(8, 4),) * 3, ((2, 1),) * 3),
        (lambda x, i: x[i], (torch.randn(16, 8), torch.tensor(-3)), ((2, 4), ())),
        (lambda x, y: x @ y.t(), (torch.randn(8, 8), torch.randn(8, 8)), ((1, 4), (1, 4))),
        (lambda x, y: x @ y.mT, (torch.randn(2, 8, 4), torch.randn(2, 8, 4)), ((2, 2, 1),) * 2),
        (lambda x, w, b: torch.addmm(b, x, w), (torch.ones(8, 8),) * 3, ((2, 2), (2, 1), (1, 2))),
        (F.linear, (torch.randn(8, 4), torch.randn(8, 4), torch.randn(8)), ((2, 1), (4, 1), (4,))),
    ],
)
def test_an_operator_that_reads_other_tensors_is_pinned_at_the_boundary(
    function: Any, args: tuple[Tensor, ...], strategy: tuple[tuple[int, ...], ...]
) -> None:
    """Previously "has 2 operators, but a pin is for a single one"."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.op, self.weight = sw.Op(function), nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor, *others: Tensor) -> Tensor:
            y: Tensor = self.op(x * self.weight, *others)
            return y.square().mean()

    net = Net()
    sw.shard(net.op, strategy)
    plan = sw.plan(net, args, devices=8, mode="semi_auto")
    assert plan.strategies["op.alias"] == (strategy[0],)
    assert sw.check(net, args, {}, plan).passes()


@pytest.mark.parametrize("index", [5, -3])
def test_a_tensor_without_dimensions_selects_a_row_of_a_sharded_tensor(index: int) -> None:
    """Previously refused: Python indexing makes a number of the value of the tensor."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(16, 8))

        def forward(self, x: Tensor, i: Tensor) -> Tensor:
            return (x * self.weight)[i].square().sum() + self.weight[:, i].sum()

    net, args = Net(), (torch.randn(16, 8), torch.tensor(index))
    plan = sw.plan(net, args, devices=4, mode="semi_auto")
    assert sw.check(net, args, {}, plan).passes()


def test_the_empty_entry_of_a_buffer_that_selects_a_row_constrains_nothing() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.row = nn.Parameter(torch.randn(16, 8)), nn.Buffer(torch.tensor(3))
            self.select = sw.Op(lambda x, i: x[i])

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.select(x * self.weight, self.row)
            return y.square().sum()

    net, args = Net(), (torch.randn(16, 8),)
    sw.shard(net.select, ((1, 8), ()))
    plan = sw.plan(net, args, devices=8, mode="semi_auto")
    assert plan.strategies["select"] == ((1, 8),)
    assert sw.check(net, args, {}, plan).passes()


def test_a_least_squares_solution_names_the_operator_that_capture_lacks() -> None:
    """Previously "the model itself raises an error for these arguments"."""

    class Net(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return torch.linalg.lstsq(a, b).solution.sum()

    with pytest.raises(sw.CaptureError, match=r"linalg_lstsq\.default\nuse operators"):
        sw.plan(Net(), (torch.randn(2, 6, 3), torch.randn(2, 6, 2)), devices=2)
