"""Pins that name mesh axes and arguments: the sizes of the axes come with the plan."""

from __future__ import annotations

import random
from collections.abc import Callable
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional as F

import shardwright as sw
from random_cases import random_cases
from random_graphs import random_net
from random_plans import random_layouts_of_layers
from shardwright.core.graph.graph import Origin
from shardwright.core.layout.prime_mesh import prime_mesh
from shardwright.errors import StrategyError

PINNING_MODES = ("semi_auto", "recursive_programming", "sharding_propagation")
DP_TP = {"dp": 2, "tp": 4}


class Swapped(nn.Module):
    """Multiplies its arguments in the other order."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.matmul(y.float(), x)


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(32, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.product = sw.Op(torch.matmul)
        self.weight = nn.Parameter(torch.randn(16, 8))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).view(-1, 16)
        return self.product(self.down(torch.relu(self.up(x))), self.weight).square().mean()


IDS = torch.randint(32, (8, 4))


def named() -> FeedForward:
    """One description for all sizes; the layers see batch and sequence as one dimension."""
    net = FeedForward()
    sw.shard(net.embed, {"input": {"dp": Shard(0)}, "weight": {"tp": 0}})
    sw.shard(net.up, {"input": {"dp": 0}, "weight": {"tp": Shard(0)}})
    sw.shard(net.down, ({"dp": 0, "tp": -1}, {"tp": 1, "dp": Replicate()}), ({"dp": 0},))
    sw.shard(net.product, {"input": {"dp": 0}, "other": {"tp": -1}})
    return net


@pytest.mark.parametrize(
    ("axes", "up", "down"),
    [
        (DP_TP, ((2, 1, 1), (4, 1)), ((2, 1, 4), (1, 4))),
        (sw.Layout((4, 2), ("tp", "dp")), ((2, 1, 1), (4, 1)), ((2, 1, 4), (1, 4))),
        ({"dp": 8}, ((8, 1, 1), (1, 1)), ((8, 1, 1), (1, 1))),
        ({"tp": 2}, ((1, 1, 1), (2, 1)), ((1, 1, 2), (1, 2))),
        ({"cp": 1, "dp": 2, "tp": 2}, ((2, 1, 1), (2, 1)), ((2, 1, 2), (1, 2))),
    ],
)
def test_one_description_serves_all_sizes(axes: Any, up: Any, down: Any) -> None:
    matrix = axes if isinstance(axes, sw.Layout) else sw.Layout(tuple(axes.values()), tuple(axes))
    net = named()
    plan = sw.plan(net, (IDS,), devices=matrix.num_devices, axes=axes, mode="sharding_propagation")
    assert (plan.strategies["up"], plan.strategies["down"]) == (up, down)
    columns = down[1][1]
    assert plan.strategies["product"] == ((up[0][0], 1, 1), (1, columns))
    assert plan.strategies["embed"][0] == (columns, 1)
    assert sw.check(net, (IDS,), {}, plan).passes(1e-9)


def test_of_several_axes_the_first_in_axes_is_the_most_significant() -> None:
    def cuts(axes: dict[str, int]) -> Any:
        net = nn.Sequential(nn.Linear(16, 12))
        sw.shard(net[0], {"weight": {"x": 0, "y": 0}})
        plan = sw.plan(net, (torch.randn(8, 16),), devices=6, axes=axes, mode="semi_auto")
        (layout,) = plan.pins["0"].layouts
        return [layout.block(rank)[0] for rank in range(6)]

    assert cuts({"x": 2, "y": 3}) == [0, 1, 2, 3, 4, 5]
    assert cuts({"y": 3, "x": 2}) == [0, 1, 2, 3, 4, 5]
    assert cuts({"x": 2, "y": 1, "z": 3}) == [0, 0, 0, 1, 1, 1]


def test_arguments_are_found_by_name_whatever_their_order() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.swapped = Swapped()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.swapped(y=y, x=x).square().mean()

    net, args = Net(), (torch.randn(8, 16), torch.randn(4, 8))
    sw.shard(net.swapped, {"x": {"tp": 1}, "y": {"dp": 0}})
    plan = sw.plan(net, args, devices=8, axes=DP_TP, mode="semi_auto")
    assert plan.strategies["swapped"] == ((2, 1), (1, 4))
    assert sw.check(net, args, {}, plan).passes(1e-9)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor, pair: tuple[Tensor, Tensor], mask: Tensor | None = None) -> Tensor:
        return self.inner(x) + pair[0] * pair[1] if mask is None else x


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = Block()
        self.attend = sw.shard(
            F.scaled_dot_product_attention,
            {"query": {"tp": 1, "dp": 0}, "value": {"dp": 0, "tp": 1}},
        )
        self.sum = sw.shard(lambda a, b: torch.relu(a + 2 * b), {"b": {"dp": 0, "tp": -1}})

    def forward(self, x: Tensor) -> Tensor:
        heads = self.block(pair=(x, x + 1), x=x).view(8, 2, 4, 8).transpose(1, 2)
        y = self.attend(heads, heads, value=heads).transpose(1, 2).reshape(8, 2, 32)
        y = sw.reshard(y, {"tp": -1})
        return self.sum(a=y, b=y).square().mean()


@pytest.mark.parametrize("mode", PINNING_MODES)
def test_boundaries_functions_and_reshard_take_names(mode: str) -> None:
    net, x = Blocks(), torch.randn(8, 2, 32)
    net.block.inner = nn.Linear(32, 32)
    sw.shard(net.block, {"x": {"dp": 0}, "pair": {"tp": -1}}, ({"dp": 0},))
    plan = sw.plan(net, (x,), devices=8, axes=DP_TP, mode=mode)
    pinned = [str(pin) for pin in plan.pins.values()]
    attended = [pin for pin in plan.pins.values() if len(pin.inputs) == 3]
    on = "on (dp 2, tp 4)"
    assert sorted(pinned) == sorted(
        [
            *(f"((dp, None, None) {on},)", f"((None, None, tp) {on},)"),
            *(f"((None, None, tp) {on},)", f"((dp, None, None) {on},)"),
            *(f"((None, None, tp) {on},)", f"((dp, None, tp) {on},)"),
            *map(str, attended),
        ]
    )
    assert str(attended[0]) == f"((dp, tp, None, None) {on},None,(dp, tp, None, None) {on})"
    assert sw.check(net, (x,), {}, plan).passes(1e-9)


def test_a_parameter_plan_names_axes() -> None:
    net, x = nn.Sequential(nn.Linear(16, 16, bias=False)), torch.randn(8, 16)
    sw.shard(net[0], ({"dp": 0}, {"tp": 0}), parameter_plan={"weight": {"dp": 1, "tp": 0}})
    plan = sw.plan(net, (x,), devices=8, axes=DP_TP, mode="semi_auto")
    assert plan.storage["0.weight"] == ((1,), (0,))
    assert sw.check(net, (x,), {}, plan).passes(1e-9)


@pytest.mark.parametrize("mode", PINNING_MODES)
@random_cases(4, slow=20)
def test_random_pins_by_name_are_kept_and_change_no_result(mode: str, seed: int) -> None:
    draw, devices = random.Random(seed), (2, 4, 6, 8, 12)[seed % 5]
    net, args = random_net(seed)
    graph, mesh = sw.capture(net, args), prime_mesh(devices)
    pinned: dict[str, tuple[tuple[int, ...], ...]] = {}
    for module, op, layouts in random_layouts_of_layers(net, graph, mesh, seed):
        entries = tuple(
            {mesh.alias_names[axis]: dim for dim, axes in enumerate(layout.axes) for axis in axes}
            for layout in layouts
        )
        parameters = [v.name.rpartition(".")[2] for v in op.inputs if v.origin is Origin.PARAMETER]
        inputs = iter(signature(module.forward).parameters)
        by_name = {
            parameters.pop(0) if v.origin is Origin.PARAMETER else next(inputs): entry
            for v, entry in zip(op.inputs, entries, strict=True)
        }
        is_named = not isinstance(module, sw.Op) and draw.random() < 0.5
        sw.shard(module, by_name if is_named else entries)
        pinned[op.name] = tuple(layout.shard_counts for layout in layouts)
    if not pinned:
        return
    axes = dict(zip(mesh.alias_names, mesh.device_matrix, strict=True))
    try:
        plan = sw.plan(net, args, devices=devices, mode=mode, axes=axes)
    except StrategyError as error:
        assert "no strategy names an axis" in str(error)
        return
    for name, counts in pinned.items():
        assert plan.strategies[name] == counts, f"{name}\n{plan}"
    result = sw.check(net, args, {}, plan)
    assert result.passes(1e-9), f"{result}\n{plan.text(every=True)}"


def linear(entries: Any, **options: Any) -> None:
    net = nn.Sequential(nn.Linear(16, 16))
    sw.shard(net[0], entries)
    sw.plan(net, (torch.randn(8, 16),), devices=8, mode="semi_auto", **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: linear(({"dp": 0}, {"tp": 0})),
            "strategies name the axes 'dp', 'tp', whose sizes are unknown\n"
            "pass the sizes to `plan`: axes={'dp': …, 'tp': …}",
        ),
        (
            lambda: linear(({"dp": 0}, {"tp": 0}), axes={"dp": 2, "tpp": 4}),
            "strategies name the axes 'tp', which are not in axes (dp 2, tpp 4), but no"
            " strategy names 'tpp'\n"
            "correct the names, or add 'tp': 1 to `axes` if there are no such axes",
        ),
        (
            lambda: linear(((8, 1), None), axes={"dp": 8}),
            "`plan` got axes (dp 8), but no strategy names an axis\n"
            "remove `axes`, or pin modules with entries such as {'dp': 0}",
        ),
        (
            lambda: linear(({"dp": 0}, None), axes={"dp": 4}),
            "axes (dp 4) have 4 devices, but the plan is for 8\n"
            "use sizes of axes whose product is 8",
        ),
        (
            lambda: linear(({"dp": 2}, None), axes={"dp": 8}),
            "0: ({dp: 2},None): {dp: 2} shards dimension 2 of a tensor with 2 dimensions\n"
            "valid dimensions are from -2 to 1",
        ),
        (
            lambda: linear({"x": {"dp": 0}}),
            "in_strategy: Linear has no argument 'x'\nuse input, weight, bias",
        ),
        (
            lambda: linear({"input": {"dp": 0}, "bias": {"tp": 0}}, axes=DP_TP),
            "0: in_strategy has an entry for 'bias', but the operator linear does not read 'bias'"
            " directly\npass a tuple with one entry per input of the operator, without a bias that"
            " a separate operator adds",
        ),
        (
            lambda: linear({"dp": 0}),
            "in_strategy {'dp': 0}: 0 is not a valid entry for an argument 'dp'\nuse an entry for"
            " each argument by name, such as {'input': {'dp': 0}}; for a single tensor write"
            " ({'dp': 0},)",
        ),
        (
            lambda: linear(({"dp": "rows"}, None)),
            "in_strategy: {'dp': 'rows'} contains 'dp': 'rows'\nuse names of axes with the"
            " dimension that each shards, such as {'dp': 0, 'tp': -1}, or with Shard(0) or"
            " Replicate()",
        ),
        (
            lambda: sw.shard(torch.einsum, {"input": {"dp": 0}}),
            "in_strategy: the function has no argument 'input'\nuse a tuple with one entry per"
            " tensor argument",
        ),
        (
            lambda: linear(({"dp": 0, "tp": 1}, {"tp": 0}), axes=DP_TP),
            "0: strategy ((dp, tp) on (dp 2, tp 4),(tp, None) on (dp 2, tp 4)) for"
            " aten.linear(input [8, 16], 0.weight [16, 16]): conflicting shard counts for factor"
            " 'k' of `b k, j k -> b j`: dimension 1 of input 0 has 4 shards, dimension 1 of input 1"
            " has 1 shard; the weight of nn.Linear is stored as (out_features, in_features)",
        ),
    ],
)
def test_names_that_do_not_fit_are_one_error(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(StrategyError) as error:
        call()
    assert str(error.value) == message


def test_a_pin_of_a_weight_needs_a_module_with_one_operator() -> None:
    class Two(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(torch.softmax(super().forward(input), -1))

    net = nn.Sequential(Two(16, 16))
    sw.shard(net[0], {"input": {"dp": 0}, "weight": {"dp": 0}})
    with pytest.raises(StrategyError, match="has several operators, but its pin has entries for"):
        sw.plan(net, (torch.randn(8, 16),), devices=8, mode="semi_auto", axes={"dp": 8})
