"""Layouts of a value on one mesh axis, and the costs of redistributing between them.

Readers of equal layouts share one redistribution, so the cost of several readers depends on the
*set* of layouts that they read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import combinations

import numpy as np

from shardwright.core.search.by_time.elimination import Table

AxisLayout = int
"""The placement of a value on the axis: the dim that is sharded (0 and up), or one of these two."""

PARTIAL: AxisLayout = -2
"""DTensor's `Partial`: each device has a term of a sum. For a value that is read: its gradient is
partial."""

REPLICATED: AxisLayout = -1
"""DTensor's `Replicate`."""

MAX_LAYOUTS = 3
"""The size of the largest set of layouts in which a value is read on one axis, unless one reader
alone needs more. It keeps the number of sets of n layouts below n³, where all sets would be 2ⁿ."""

ReadLayouts = tuple[frozenset[AxisLayout], ...]
"""For each choice of a reader the layouts in which it reads a value."""


def table_index(layout: AxisLayout) -> int:
    """The row or column of a layout in `redistribution_table`."""
    return layout - PARTIAL


def redistribution_table(ndim: int, differentiable: bool, seconds: Callable[[str], float]) -> Table:
    """Seconds from each layout at the source (row) to each layout at a reader (column).

    One more column, the last, holds what readers in `PARTIAL` and in `REPLICATED` share: the
    all-reduce of the forward pass.

    Args:
        ndim: number of dims of the value.
        differentiable: whether its gradient is redistributed back.
        seconds: of a collective over the axis, by its name.
    """
    backward = 1.0 if differentiable else 0.0
    reduce, gather = seconds("all_reduce"), seconds("all_gather")
    scatter, exchange = seconds("reduce_scatter"), seconds("all_to_all")
    table = np.zeros((ndim + 2, ndim + 3))
    # A partial sum is reduce-scattered to a sharded reader, and the gradient gathered back.
    table[0, :] = scatter + backward * gather
    # To a reader that leaves the gradient partial both passes all-reduce. To a replicated one only
    # the forward pass does: Megatron's g.
    table[0, :2] = reduce + backward * reduce, reduce
    table[0, -1] = reduce
    # Megatron's f: nothing forward, and the partial gradient is all-reduced.
    table[1, 0] = backward * reduce
    # Slicing a replicated value sends nothing; only the gradient is gathered.
    table[1, 2:-1] = backward * gather
    for dim in range(2, ndim + 2):
        table[dim, 0] = gather + backward * scatter
        table[dim, 1] = gather
        # Between two dims an all-to-all; between equal dims nothing.
        table[dim, 2:-1] = (1 + backward) * exchange
        table[dim, dim] = 0.0
    return table


@cache
def column_sums(sets: ReadLayouts, columns: int) -> Table:
    """A 0/1 matrix: `redistribution_table(...) @ column_sums(...)` is the cost of each set.

    The shared last column is subtracted for sets with both `PARTIAL` and `REPLICATED`.
    """
    table = np.zeros((columns, len(sets)))
    for number, layouts in enumerate(sets):
        table[[table_index(layout) for layout in layouts], number] = 1.0
        if PARTIAL in layouts and REPLICATED in layouts:
            table[-1, number] = -1.0
    return table


@cache
def layout_sets(
    readers: tuple[ReadLayouts, ...], returned: frozenset[AxisLayout]
) -> tuple[ReadLayouts, dict[ReadLayouts, Table]]:
    """The sets of layouts in which a value may be read, and a table for each reader.

    A table is 0 where the set (column) contains the layouts of the reader's choice (row), else
    infinity.

    Args:
        returned: the layouts in which the model returns the value; every set contains them.
    """
    all_layouts = sorted(
        frozenset().union(returned, *(read for reads in readers for read in reads))
    )
    max_size = max(MAX_LAYOUTS, max(len(read) for reads in readers for read in reads))
    sets = tuple(
        layouts
        for length in range(1, min(max_size, len(all_layouts)) + 1)
        for layouts in map(frozenset, combinations(all_layouts, length))
        if returned <= layouts
    )
    serves = {
        reads: np.array(
            [[0.0 if read <= layouts else np.inf for layouts in sets] for read in reads]
        )
        for reads in readers
    }
    return sets, serves


@cache
def united_reads(first: ReadLayouts, second: ReadLayouts) -> ReadLayouts:
    """The layouts of an operator that reads the value as two of its inputs."""
    return tuple(a | b for a, b in zip(first, second, strict=True))
