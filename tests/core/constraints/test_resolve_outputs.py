"""How a pinned operator may leave its outputs."""

from __future__ import annotations

from typing import Any

import pytest

from core.constraints.operators import aten, linear, of, op_of, reading
from shardwright.core.constraints.resolve import OutputAxes, requested_outputs
from shardwright.core.layout.layout import Layout
from shardwright.errors import StrategyError

LAYOUT = Layout((2, 2, 2), ("dp", "sp", "mp"))
SUMMED = ((2, 4), (1, 4))
"""Of a linear layer: b over a, k over b and c; the output is a sum over b and c."""


def left(inputs: Any, outputs: Any, op: Any = None) -> OutputAxes | None:
    found = reading(op or linear(), inputs, outputs)
    return requested_outputs(found, found.cuts())


@pytest.mark.parametrize(
    ("out", "expected"),
    [
        ((2, 1), ((0,), ())),
        ((8, 1), ((0, 1, 2), ())),
        ((2, 4), ((0,), (1, 2))),
        ((4, 2), ((0, 1), (2,))),
        ((4, 1), ((0, 1), ())),
        (LAYOUT(("dp", "mp", "sp"), "None"), ((0, 2, 1), ())),
        (LAYOUT("dp", "sp"), ((0,), (1,))),
        (None, None),
    ],
)
def test_a_sum_is_all_reduced_or_scattered_onto_any_dimension(out: Any, expected: Any) -> None:
    assert left(SUMMED, (out,)) == (expected,)


def test_without_an_out_strategy_nothing_is_said() -> None:
    assert left(SUMMED, None) is None


def test_without_a_sum_the_output_is_left_as_it_is_made() -> None:
    assert left(((2, 1), (4, 1)), ((2, 4),)) == (((0,), (1, 2)),)


def test_each_output_has_its_own_entry() -> None:
    split = op_of(aten.split.Tensor, of(16, 8), 4, 1)
    assert left(((8, 1),), (None, (8, 1)), split) == (None, ((0, 1, 2), ()))


@pytest.mark.parametrize(
    ("inputs", "outputs", "message"),
    [
        (
            SUMMED,
            ((1, 1),),
            r"fc: .* → \(\(1,1\),\) for .*: output 0 \[16, 64\] cannot be sharded as \(1,1\): the"
            r" operator computes it as \(2,1\), a partial sum of 4 terms\nvalid entries:"
            r" \(2,1\) \(all-reduce\),"
            r" \(8,1\), \(2,4\) \(reduce-scatter\)$",
        ),
        (SUMMED, ((16, 1),), r"cannot be sharded as \(16,1\)"),
        (
            SUMMED,
            (LAYOUT(("sp", "dp"), "None"),),
            r"cannot be sharded as .*\nvalid entries: \(2,1\) .*; the axes of the sum must be",
        ),
        (
            (LAYOUT("dp", ("sp", "mp")), LAYOUT("None", ("sp", "mp"))),
            ((1, 1),),
            r"computes it as \(2,1\), a partial sum of 4 terms over sp·mp\nvalid entries: ",
        ),
        (
            ((2, 1), (4, 1)),
            (LAYOUT("dp", "None"),),
            r"computes it as \(2,4\), not a partial sum\nvalid entries: \(dp, sp·mp\)$",
        ),
        (
            ((2, 1), (4, 1)),
            ((8, 1),),
            r"as \(8,1\): .* computes it as \(2,4\), not a partial sum\nvalid entries: \(2,4\)$",
        ),
        (SUMMED, ((8, 1, 1),), r"output 0 \[16, 64\] has 2 dimensions, but \(8,1,1\) has 3"),
        (SUMMED, ((8, 1), (8, 1)), r"has 2 entries for 1 outputs"),
    ],
)
def test_what_an_operator_cannot_give_is_refused(inputs: Any, outputs: Any, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        left(inputs, outputs)


def test_a_dimension_that_the_scattered_parts_do_not_divide_is_refused() -> None:
    with pytest.raises(
        StrategyError, match=r"valid entries: \(2,1\) \(all-reduce\), \(2,4\) \(reduce"
    ):
        left(SUMMED, ((8, 1),), linear(rows=4))
