"""Rules of operators that join, split and pick, cut in every way."""

from __future__ import annotations

import pytest
import torch
from torch import randint, randn, tensor

from core.rules.oracle import check, op_of
from shardwright.core.rules import rule_of

aten = torch.ops.aten

pytestmark = pytest.mark.usefixtures("float64")


def test_stacked_dimensions_stay_whole() -> None:
    assert str(check(aten.stack.default, [randn(4), randn(4)], -1)) == "b, b -> b _"


@pytest.mark.parametrize(
    ("target", "arguments", "text"),
    [
        (aten.unbind.int, (), "_ s -> s, s, s, s"),
        (aten.narrow.default, (0, 1, 2), "_ s -> _ s"),
        (aten.slice.Tensor, (1, 1, 3), "b _ -> b _"),
        (aten.slice.Tensor, (0, 0, 9223372036854775807), "b s -> b s"),
        (aten.slice.Tensor, (1, -6, 6), "b s -> b s"),
        (aten.slice.Tensor, (0, 0, 3, 2), "b s -> b s"),
        (aten.slice.Tensor, (1, -2, 9, 3), "b _ -> b _"),
        (aten.slice.Tensor, (1, 1, 9223372036854775807, 2), "b s -> b s"),
        (aten.slice.Tensor, (1, 1, 5, 2), "b _ -> b _"),
    ],
)
def test_rows_that_are_picked_stay_whole_unless_every_nth_is(target, arguments, text) -> None:
    assert str(check(target, randn(4, 6), *arguments)) == text


@pytest.mark.parametrize("index", [0, 3, -1])
def test_the_shard_with_a_selected_row_is_the_only_term_of_a_sum(index: int) -> None:
    found = check(aten.select.int, randn(4, 6), 1, index)
    assert str(found) == "b s -> b"
    assert found.reduced == {"s"}
    assert str(check(aten.select.int, randn(4, 6) > 0, 1, index)) == "b _ -> b"


def test_slices_that_are_written_stay_whole() -> None:
    found = check(aten.select_scatter.default, randn(4, 6), randn(4), 1, 0)
    assert str(found) == "b _, b -> b _"
    found = check(aten.slice_scatter.default, randn(4, 6), randn(2, 6), 0, 1, 3)
    assert str(found) == "_ s, _ s -> _ s"


def test_classes_of_one_hot_are_cut() -> None:
    assert str(check(aten.one_hot.default, randint(0, 5, (4, 6)), 5)) == "b s -> b s v"
    assert rule_of(op_of(aten.one_hot.default, randint(0, 5, (4,)))) is None


@pytest.mark.parametrize(
    ("indices", "text"),
    [
        ([tensor([0, 2, 1, 1])], "b s t, u -> u s t"),
        ([None, randint(0, 4, (2, 2))], "b s t, u v -> b u v t"),
        ([randint(0, 6, (4, 1)), randint(0, 4, (2,))], "b s t, u _, v -> u v t"),
        ([randint(0, 6, (2,)), None, randint(0, 2, (2,))], "b s t, u, u -> u s"),
        ([None, None, tensor(1)], "b s t, () -> b s"),
    ],
)
def test_dimensions_of_index_tensors_become_those_of_the_result(indices, text) -> None:
    assert str(check(aten.index.Tensor, randn(6, 4, 2), indices)) == text


def test_masks_have_no_rule() -> None:
    mask = tensor([True, False, True, False])
    assert rule_of(op_of(aten.index.Tensor, randn(4, 6), [mask])) is None
    assert rule_of(op_of(aten.masked_select.default, randn(4), mask)) is None


def test_values_are_written_where_nothing_is_indexed() -> None:
    x, rows = randn(6, 4), tensor([0, 2])
    assert str(check(aten.index_put.default, x, [rows], randn(2, 4))) == "b s, _, _ s -> b s"
    assert str(check(aten.index_put.default, x, [rows], randn(()), True)) == "b s, t, () -> b s"
    assert str(check(aten.index_put.default, x, [None, rows], randn(6, 2))) == "b s, _, b _ -> b s"


def test_gathered_indices_are_cut_with_the_result() -> None:
    found = check(aten.gather.default, randn(4, 6), 1, randint(0, 6, (4, 2)))
    assert str(found) == "b v, b s -> b s"
    smaller = check(aten.gather.default, randn(4, 6), 1, randint(0, 6, (2, 6)))
    assert str(smaller) == "_ v, _ s -> _ s"
    assert rule_of(op_of(aten.take_along_dim.default, randn(4), tensor([0]))) is None


def test_scattered_dimensions_are_cut() -> None:
    x, index, source = randn(4, 6), randint(0, 6, (4, 6)), randn(4, 6)
    for target, row in ((aten.scatter.src, "_"), (aten.scatter_add.default, "e")):
        found = check(target, x, 0, index % 4, source)
        assert str(found) == f"v s, {row} s, {row} s -> v s"
    assert str(check(aten.scatter.value, x, 1, index[:, :2], 1.0)) == "b v, b _ -> b v"
    assert str(check(aten.scatter.value, x, 1, index[:2], 1.0)) == "_ v, _ _ -> _ v"
    found = check(aten.scatter_reduce.two, x, 1, index, source, "sum")
    assert str(found) == "b v, b e, b e -> b v"


def test_rows_are_selected_and_written() -> None:
    x, rows = randn(4, 6), tensor([0, 2])
    assert str(check(aten.index_select.default, x, 0, rows)) == "v s, b -> b s"
    assert str(check(aten.index_select.default, x, 1, tensor(3))) == "b v, () -> b _"
    assert str(check(aten.index_add.default, x, 0, rows, randn(2, 6))) == "v s, e, e s -> v s"
    assert str(check(aten.index_fill.int_Scalar, x, 1, rows, 0.0)) == "b v, _ -> b v"


def test_positions_that_are_taken_may_be_cut() -> None:
    found = check(aten.take.default, randn(4, 6), randint(24, (6, 2)))
    assert found.inputs == ((None, None), ("b", "s"))
