"""The ways in which a value is made and read on one axis, and what sets of them cost."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import numpy as np

from shardwright.search.elimination import Table

SUMMED, WHOLE = -2, -1
"""How a value is made or read on the axis: as terms of a sum (read: with a gradient that is one),
whole on every device, or (0 and up) cut along that dimension."""

LARGEST_SET = 3
"""A value is read in at most so many ways on one axis."""

Ways = tuple[frozenset[int], ...]
"""For each choice of a reader, or of several together, the ways in which a value is read."""


@cache
def prices(sets: Ways, columns: int) -> Table:
    """For each set of ways of reading (a column) which costs of a row it adds; the row's last one
    is paid once less where it is in two of them."""
    table = np.zeros((columns, len(sets)))
    for number, ways in enumerate(sets):
        table[[way + 2 for way in ways], number] = 1.0
        if SUMMED in ways and WHOLE in ways:
            table[-1, number] = -1.0
    return table


@cache
def sets_of(readers: tuple[Ways, ...], ends: frozenset[int]) -> tuple[Ways, dict[Ways, Table]]:
    """The sets of ways in which a value may be read, and for each reader which of its choices (row)
    fit which set (column): 0, else infinity."""
    every = sorted(frozenset().union(ends, *(way for ways in readers for way in ways)))
    most = max(LARGEST_SET, max(len(way) for ways in readers for way in ways))
    sets = tuple(
        chosen
        for length in range(1, min(most, len(every)) + 1)
        for chosen in map(frozenset, combinations(every, length))
        if ends <= chosen
    )
    fits = {
        ways: np.array([[0.0 if way <= chosen else np.inf for chosen in sets] for way in ways])
        for ways in readers
    }
    return sets, fits


@cache
def joined(before: Ways, ways: Ways) -> Ways:
    """The ways of an operator that reads the value in two places."""
    return tuple(b | w for b, w in zip(before, ways, strict=True))
