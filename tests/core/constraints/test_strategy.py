"""What can be said of a tensor, and strategies as JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shardwright.core.constraints import OperatorStrategy
from shardwright.core.layout.layout import Layout, TensorLayout
from shardwright.errors import StrategyError

LAYOUT = Layout((2, 2, 2), ("dp", "sp", "mp"))


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            (2, 4),
            r"in_strategy \(2, 4\) has the int 2 .*\n.*for a single tensor write \(\(2, 4\),\)",
        ),
        ([(2, 4)], r"must be a tuple with one entry per tensor, not \[\(2, 4\)\]"),
        (((2, 0),), r"\(2, 0\) contains 0\nuse shard counts that are ints of at least 1"),
        (((2, -4),), r"\(2, -4\) contains -4\nuse shard counts that are ints of at least 1"),
        (((2, 4.0),), r"\(2, 4.0\) contains 4.0\nuse shard counts that are ints of at least 1"),
        (((True, 4),), r"\(True, 4\) contains True\nuse shard counts that are ints"),
        (((2, "dp"),), r"\(2, 'dp'\) contains 'dp'\nuse shard counts that are ints"),
        (([2, 4],), r"contains \[2, 4\]\nuse as an entry a tuple with one shard count"),
        (("dp",), r"contains 'dp'\nuse as an entry a tuple with one shard count"),
        ((LAYOUT,), r"is a Layout, not a TensorLayout\ncall the layout with the axes of each"),
        ((TensorLayout(LAYOUT, ((), ()), frozenset({0})),), "is a partial sum"),
        ((None, None), r"\(None,None\) shards no tensor"),
    ],
)
def test_an_entry_that_is_none_is_refused_by_what_it_is(inputs: Any, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        OperatorStrategy(inputs)


def test_an_out_strategy_is_checked_likewise() -> None:
    with pytest.raises(StrategyError, match=r"out_strategy \(4, 1\) has the int 4"):
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
