"""The least sum of tables, against trying all choices."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.core.search.by_time.elimination import (
    Elimination,
    Factor,
    TooWideError,
    minimum,
)


def by_trying_all(sizes: list[int], factors: list[Factor]) -> float:
    return min(
        sum(float(table[tuple(choice[v] for v in scope)]) for scope, table in factors)
        for choice in product(*map(range, sizes))
    )


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], list[Factor]]:
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=6))
    seed = draw(st.integers(0, 1000))
    numbers = np.random.default_rng(seed)
    factors: list[Factor] = []
    for _ in range(draw(st.integers(0, 8))):
        chosen = draw(st.sets(st.integers(0, len(sizes) - 1), max_size=3))
        scope = tuple(sorted(chosen))
        table = numbers.integers(0, 9, [sizes[v] for v in scope]).astype(float)
        table[numbers.random(table.shape) < 0.1] = np.inf
        factors.append((scope, table))
    return sizes, factors


@settings(max_examples=150, deadline=None)
@given(problems())
def test_the_minimum_is_that_of_all_combinations(problem: tuple[list[int], list[Factor]]) -> None:
    sizes, factors = problem
    found = minimum(sizes, factors)
    cost = sum(float(table[tuple(found.choices[v] for v in scope)]) for scope, table in factors)
    assert found.cost == by_trying_all(sizes, factors)
    assert cost == found.cost


def largest_table(variables: int, scopes: list[tuple[int, ...]]) -> int:
    """Elements of the largest table that is made where each variable has three choices."""
    limit = 1
    while True:
        try:
            Elimination([3] * variables, scopes, limit=limit)
        except TooWideError as error:
            limit = error.elements
        else:
            return limit


def test_a_chain_needs_tables_of_two_variables_only() -> None:
    assert largest_table(51, [(i, i + 1) for i in range(50)]) == 3**2


def test_parallel_branches_need_tables_of_three_variables() -> None:
    # 0 and 1 are joined by ten chains of two variables each.
    scopes: list[tuple[int, ...]] = []
    for branch in range(10):
        first = 2 + 2 * branch
        scopes += [(0, first), (first, first + 1), (1, first + 1)]
    assert largest_table(22, scopes) == 3**3


def test_the_first_of_equal_choices_is_taken() -> None:
    assert minimum([3, 2], [((0, 1), np.zeros((3, 2)))]).choices == (0, 0)


def test_a_table_beyond_the_limit_is_refused() -> None:
    everything = [((i, j), np.zeros((4, 4))) for j in range(6) for i in range(j)]
    with pytest.raises(TooWideError, match="needs 4,096 elements, above the limit of 1,000"):
        minimum([4] * 6, everything, limit=1000)
