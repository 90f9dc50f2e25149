"""Axes that some layouts treat alike are one, wherever they stand; every rank keeps its block."""

from __future__ import annotations

import pytest

from shardwright.core.layout.axes import Axes
from shardwright.core.layout.joined_axes import (
    join_axes,
    joined_device_matrix,
    layout_on_joined_axes,
)
from shardwright.core.layout.layout import Layout, TensorLayout
from shardwright.errors import LayoutError

FOUR = Layout((2, 3, 2, 2), ("a", "b", "c", "d"))


@pytest.mark.parametrize(
    ("lists", "expected"),
    [
        ([], [(0, 1, 2, 3)]),
        ([(0, 2)], [(0, 2), (1, 3)]),
        ([(0, 2), (1, 3)], [(0, 2), (1, 3)]),
        ([(0, 2), (0,)], [(0,), (1, 3), (2,)]),
        ([(2, 0)], [(0,), (1, 3), (2,)]),
        ([(0, 2), (0, 1, 2)], [(0,), (1,), (2,), (3,)]),
        ([(0, 1, 2), (3, 0, 1, 2)], [(0, 1, 2), (3,)]),
    ],
)
def test_axes_are_joined_that_always_follow_each_other(
    lists: list[Axes], expected: list[Axes]
) -> None:
    assert list(join_axes(4, lists)) == expected


@pytest.mark.parametrize(
    "where",
    [
        TensorLayout(FOUR, ((0, 2), (1, 3))),
        TensorLayout(FOUR, ((1, 3, 0, 2), ())),
        TensorLayout(FOUR, ((), (0, 2)), frozenset({1, 3})),
        TensorLayout(FOUR, ((), ()), frozenset({0, 2}), frozenset({1, 3})),
    ],
)
def test_a_placement_on_joined_axes_is_the_same_on_every_rank(where: TensorLayout) -> None:
    joined = ((0, 2), (1, 3))
    mesh = joined_device_matrix(FOUR, joined)
    assert (mesh.device_matrix, mesh.alias_names) == ((4, 6), ("a_c", "b_d"))
    coarse = layout_on_joined_axes(where, joined, mesh)
    assert [coarse.block(rank) for rank in FOUR.ranks] == [where.block(r) for r in FOUR.ranks]
    assert coarse.on(FOUR) == where


def test_a_placement_that_parts_joined_axes_is_refused() -> None:
    joined = ((0, 2), (1, 3))
    for dims in (((0,), ()), ((2, 0), ()), ((2,), ()), ((0, 1, 2, 3), ())):
        with pytest.raises(LayoutError, match="uses only some of the axes"):
            layout_on_joined_axes(
                TensorLayout(FOUR, dims), joined, joined_device_matrix(FOUR, joined)
            )
