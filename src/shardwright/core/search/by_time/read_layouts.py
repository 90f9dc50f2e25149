"""How a value is left and read on one axis of the mesh, and what lies between.

Readers that ask for the same layout share its redistribution, so that of several readers it matters
which *set* of layouts they ask for together.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import combinations

import numpy as np

from shardwright.core.search.by_time.elimination import Table

AxisLayout = int
"""How a value lies on the axis: cut along a dimension (0 and up), or one of these two."""

SUMMED: AxisLayout = -2
"""As terms of a sum; of a value that is read: with a gradient that is one."""

WHOLE: AxisLayout = -1
"""The same on every device."""

LARGEST_SET = 3
"""A value is read in at most so many layouts on one axis."""

ReadLayouts = tuple[frozenset[AxisLayout], ...]
"""For each choice of a reader, or of several together, the layouts in which they read a value."""


def row_of(layout: AxisLayout) -> int:
    """The row and the column of a layout in the tables of redistributions."""
    return layout - SUMMED


def redistribution_table(ndim: int, differentiable: bool, seconds: Callable[[str], float]) -> Table:
    """Seconds from each layout in which a value is left (row) to each in which it is read (column).

    A last column is the part that reading in both `SUMMED` and `WHOLE` pays once: the sum itself.

    Args:
        seconds: of a collective over the axis, by its name.
    """
    back = 1.0 if differentiable else 0.0
    reduce, gather = seconds("all_reduce"), seconds("all_gather")
    scatter, exchange = seconds("reduce_scatter"), seconds("all_to_all")
    table = np.zeros((ndim + 2, ndim + 3))
    table[0, :] = scatter + back * gather
    table[0, :2] = reduce + back * reduce, reduce
    table[0, -1] = reduce
    table[1, 0] = back * reduce
    table[1, 2:-1] = back * gather
    for dim in range(2, ndim + 2):
        table[dim, 0] = gather + back * scatter
        table[dim, 1] = gather
        table[dim, 2:-1] = (1 + back) * exchange
        table[dim, dim] = 0.0
    return table


@cache
def column_sums(sets: ReadLayouts, columns: int) -> Table:
    """For each set of layouts (column) which entries of a row of `redistribution_table` it adds;
    the last one is subtracted where the set has both layouts that share it."""
    table = np.zeros((columns, len(sets)))
    for number, layouts in enumerate(sets):
        table[[row_of(layout) for layout in layouts], number] = 1.0
        if SUMMED in layouts and WHOLE in layouts:
            table[-1, number] = -1.0
    return table


@cache
def layout_sets(
    readers: tuple[ReadLayouts, ...], returned: frozenset[AxisLayout]
) -> tuple[ReadLayouts, dict[ReadLayouts, Table]]:
    """The sets of layouts in which a value may be read, and for each reader which of its choices
    (row) a set (column) serves: 0, else infinity.

    Args:
        returned: the layouts in which the model returns it, which are in every set.
    """
    every = sorted(frozenset().union(returned, *(read for reads in readers for read in reads)))
    most = max(LARGEST_SET, max(len(read) for reads in readers for read in reads))
    sets = tuple(
        chosen
        for length in range(1, min(most, len(every)) + 1)
        for chosen in map(frozenset, combinations(every, length))
        if returned <= chosen
    )
    serves = {
        reads: np.array([[0.0 if read <= chosen else np.inf for chosen in sets] for read in reads])
        for reads in readers
    }
    return sets, serves


@cache
def joined_reads(one: ReadLayouts, other: ReadLayouts) -> ReadLayouts:
    """The layouts of an operator that reads the value in two places."""
    return tuple(a | b for a, b in zip(one, other, strict=True))
