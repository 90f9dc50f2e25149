"""What can be said of a tensor, and strategies as JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shardwright.constraints import OperatorStrategy
from shardwright.errors import StrategyError
from shardwright.layout.layout import Layout, TensorLayout

LAYOUT = Layout((2, 2, 2), ("dp", "sp", "mp"))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((2, 4), r"in_strategy \(2, 4\) holds 2; .*For one tensor write \(\(2, 4\),\)"),
        ([(2, 4)], r"must be a tuple with one entry for each tensor, not \[\(2, 4\)\]"),
        (((2, 0),), r"holds \(2, 0\) with 0; every count is an int of at least 1"),
        (((2, -4),), r"holds \(2, -4\) with -4; every count is an int of at least 1"),
        (((2, 4.0),), r"holds \(2, 4.0\) with 4.0; every count is an int of at least 1"),
        (((True, 4),), r"holds \(True, 4\) with True; every count is an int"),
        (((2, "dp"),), r"holds \(2, 'dp'\) with 'dp'; every count is an int"),
        (([2, 4],), r"holds \[2, 4\]; an entry is a tuple of counts"),
        (("dp",), r"holds 'dp'; an entry is a tuple of counts"),
        ((LAYOUT,), r"lays out no tensor; call it with one entry for each dimension"),
        ((TensorLayout(LAYOUT, ((), ()), frozenset({0})),), "is a partial sum"),
        ((None, None), r"\(None,None\) says nothing"),
    ],
)
def test_an_entry_that_is_none_is_refused_by_what_it_is(inputs: Any, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        OperatorStrategy(inputs)


def test_an_out_strategy_is_checked_likewise() -> None:
    with pytest.raises(StrategyError, match=r"out_strategy \(4, 1\) holds 4"):
        OperatorStrategy(((2, 4),), (4, 1))  # type: ignore[arg-type]


def test_a_strategy_is_saved_as_json_with_tuples_and_layouts() -> None:
    strategy = OperatorStrategy((LAYOUT("mp", ("sp", "dp")), None, ()), ((8, 1), None))
    data = json.loads(json.dumps(strategy.to_dict()))
    assert data["outputs"] == [[8, 1], None]
    assert OperatorStrategy.from_dict(data) == strategy


def test_a_strategy_is_written_as_the_user_writes_it() -> None:
    strategy = OperatorStrategy(((2, 4), (4,)), ((8, 1),))
    assert str(strategy) == "((2,4),(4,)) → ((8,1),)"
    assert str(OperatorStrategy((LAYOUT("mp", "None"), None))) == (
        "((mp, None) on (dp 2, sp 2, mp 2),None)"
    )
