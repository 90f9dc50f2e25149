"""The device matrix of several strategies, biases that follow, and how parameters are stored."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.core.constraints import Entry, OperatorStrategy, resolve
from shardwright.core.constraints.device_matrix import common_device_matrix
from shardwright.core.constraints.resolve import axes_for_entry
from shardwright.core.graph.graph import Origin, Value
from shardwright.core.layout.layout import Layout
from shardwright.core.layout.prime_mesh import prime_mesh
from shardwright.errors import LayoutError, StrategyError

LAYOUT = Layout((2, 2, 2), ("dp", "sp", "mp"))


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x)).square().sum()


GRAPH = sw.capture(Two(), (torch.randn(8, 8),))


@pytest.mark.parametrize(
    ("devices", "matrices", "expected"),
    [
        (8, [], (2, 2, 2)),
        (12, [], (2, 2, 3)),
        (8, [(8,), (2, 4)], (2, 2, 2)),
        (12, [(3, 4)], (3, 2, 2)),
        (12, [(6, 2)], (2, 3, 2)),
    ],
)
def test_the_device_matrix_expresses_all_layouts(
    devices: int, matrices: list[tuple[int, ...]], expected: tuple[int, ...]
) -> None:
    layouts = [Layout(m, tuple("wxyz"[: len(m)]))("w", "None") for m in matrices]
    assert (
        common_device_matrix(devices, [("fc", layout) for layout in layouts]).device_matrix
        == expected
    )


@pytest.mark.parametrize(
    ("devices", "nodes", "expected"),
    [
        (24, (8,), (3, 2, 2, 2)),
        (24, (6,), (2, 2, 2, 3)),
        (24, (4,), (2, 3, 2, 2)),
        (144, (72,), (2, 2, 2, 2, 3, 3)),
        (48, (8, 32), (3, 2, 2, 2, 2)),
        # What half a node and a whole one have in common.
        (12, (8,), (3, 2, 2)),
        (9, (8,), (3, 3)),
    ],
)
def test_the_innermost_axes_fit_into_a_node(
    devices: int, nodes: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert common_device_matrix(devices, [], nodes).device_matrix == expected


def test_layouts_matter_more_than_nodes() -> None:
    layout = Layout((8, 3), ("dp", "tp"))("dp", "None")
    assert common_device_matrix(24, [("up", layout)], (4, 8)).device_matrix == (2, 2, 2, 3)


def test_a_layout_of_another_number_of_devices_is_refused() -> None:
    message = (
        r"up: the device matrix \(2, 2, 2\) .* has 8 devices .*, but the plan is for 4 .*\nuse"
    )
    with pytest.raises(LayoutError, match=message):
        common_device_matrix(4, [("up", LAYOUT("dp", "None"))])


def test_a_layout_of_other_ranks_is_refused() -> None:
    stage = Layout((2,), ("dp",), rank_list=(2, 3))
    with pytest.raises(
        LayoutError, match=r"has 2 devices \(ranks 2 to 3\), but the plan is for 2 \(ranks"
    ):
        common_device_matrix(2, [("up", stage("dp"))])


def test_layouts_that_have_no_common_axes_are_refused_with_where_they_stand() -> None:
    wide, tall = Layout((2, 3), ("a", "b")), Layout((3, 2), ("a", "b"))
    with pytest.raises(LayoutError, match=r"do not nest; used by up \(2, 3\), down \(3, 2\)"):
        common_device_matrix(6, [("up", wide("a")), ("down", tall("a"))])


def test_a_bias_is_cut_like_the_output_that_it_is_added_to() -> None:
    column = resolve(GRAPH, 8, {"up": OperatorStrategy(((2, 1), (4, 1)))}, {})
    assert column.cuts["up.bias"] == {"b": (0,), "s": (1, 2)}
    row = resolve(GRAPH, 8, {"up": OperatorStrategy(((2, 4), (1, 4)))}, {})
    assert row.cuts["up.bias"] == {"b": (0,)}
    scattered = resolve(GRAPH, 8, {"up": OperatorStrategy(((2, 4), (1, 4)), ((2, 4),))}, {})
    assert scattered.cuts["up.bias"] == {"b": (0,), "s": (1, 2)}
    assert scattered.outputs == {"up": (((0,), (1, 2)),)}


def test_an_operator_pinned_whole_is_fixed_too() -> None:
    assert resolve(GRAPH, 8, {"up": OperatorStrategy(((1, 1), (1, 1)))}, {}).cuts["up"] == {}


WEIGHT = Value("fc.weight", (16, 8), torch.float32, Origin.PARAMETER)


def stored(entry: Entry, used: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    return axes_for_entry(
        "parameter fc.weight", "parameter_plan", WEIGHT, entry, prime_mesh(8), used
    )


@pytest.mark.parametrize(
    ("entry", "used", "expected"),
    [
        ((8, 1), ((), ()), ((0, 1, 2), ())),
        ((2, 4), ((), (1, 2)), ((0,), (1, 2))),
        ((1, 2), ((), (1, 2)), ((), (1,))),
        ((4, 1), ((2,), ()), ((2, 0), ())),
        ((1, 1), ((0,), (1,)), ((), ())),
        (LAYOUT("mp", "dp"), ((0,), ()), ((2,), (0,))),
        (None, ((0,), ()), ((0,), ())),
    ],
)
def test_counts_of_a_parameter_keep_the_axes_of_its_use(
    entry: Entry, used: tuple[tuple[int, ...], ...], expected: tuple[tuple[int, ...], ...]
) -> None:
    assert stored(entry, used) == expected


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (
            (2,),
            r"fc.weight \[16, 8\] has 2 dimensions, but its entry in parameter_plan, \(2,\), has 1",
        ),
        (
            (3, 1),
            r"dimension 0 has size 16, which is not divisible into 3 shards\n"
            r"valid numbers of shards are 1, 2, 4, 8",
        ),
        (
            (4, 4),
            r"\(4,4\) cannot be distributed over 8 devices\nuse shard counts whose product divides",
        ),
    ],
)
def test_a_parameter_that_cannot_be_stored_so_is_refused(entry: Entry, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        stored(entry, ((), ()))
