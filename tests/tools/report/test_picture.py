"""Pictures of layouts: borders where the blocks end, in the order of the axes."""

import pytest

from shardwright.core.layout.layout import Layout, TensorLayout
from shardwright.tools.report.picture import MAX_SHEETS, picture

MESH = Layout((2, 2, 4), ("dp", "sp", "tp"))


def test_borders_are_those_of_the_axes_that_make_them() -> None:
    shown = picture(MESH("dp", ("sp", "tp")))
    assert shown.rows == ((1 / 2, 0),)
    assert shown.columns == (
        (1 / 2, 1),
        *((place / 8, 2) for place in (1, 2, 3, 5, 6, 7)),
    )
    assert shown.block == (1 / 8, 1 / 2)
    assert shown.lines == ("dim 0: 2 shards over dp", "dim 1: 8 shards over sp·tp")


def test_dimensions_before_the_last_two_are_sheets_behind() -> None:
    assert picture(MESH("dp", "None", "sp")).sheets == (0,)
    assert picture(MESH("tp", "dp", "None", "None")).sheets == (2, 2, 2, 0)
    assert len(picture(MESH("tp", "dp", "sp", "None", "None")).sheets) == MAX_SHEETS


def test_vectors_and_numbers_have_pictures_too() -> None:
    assert picture(MESH("tp")).columns == ((1 / 4, 2), (1 / 2, 2), (3 / 4, 2))
    assert picture(MESH("tp")).rows == ()
    assert picture(MESH()).lines == ()


def test_sums_are_marked_and_said() -> None:
    shown = picture(TensorLayout(MESH, ((), ()), frozenset({2}), frozenset({0})))
    assert shown.summed
    assert shown.lines[2:] == (
        "one term of a sum over tp",
        "its gradient is a term of a sum over dp",
    )


@pytest.mark.parametrize("size", [32, 2**20])
def test_borders_that_could_not_be_told_apart_are_left_out(size: int) -> None:
    shown = picture(Layout((2, size // 2), ("a", "b"))(("a", "b")))
    assert shown.columns == ((1 / 2, 0),)
    assert shown.lines == (f"dim 0: {size} shards over a·b",)
