"""Layouts of a value on one mesh axis, and the costs of redistributing between them.

Consumers that read the same layout share one redistribution, so the cost of several consumers
depends on the *set* of layouts that they read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import combinations

import numpy as np

from shardwright.core.search.by_time.elimination import Table

AxisLayout = int
"""The placement of a value on one mesh axis: the dim that the axis shards (0 and up), `PARTIAL` or
`REPLICATED`."""

PARTIAL: AxisLayout = -2
"""DTensor's `Partial`: each device has a partial sum. A consumer with layout `PARTIAL` reads the
value replicated, and the gradient of the value is partial."""

REPLICATED: AxisLayout = -1
"""DTensor's `Replicate`: each device has the same elements of the value."""

MAX_LAYOUTS = 3
"""Maximum number of layouts in one set of layouts, unless a single consumer reads more.

The limit keeps the number of sets of n layouts below n³ instead of 2ⁿ.
"""

ReadLayouts = tuple[frozenset[AxisLayout], ...]
"""For each choice of the factor that a consumer cuts over one mesh axis, the set of layouts in
which it reads a value."""


def table_index(layout: AxisLayout) -> int:
    """Return the row or column index of a layout in `redistribution_table`."""
    return layout - PARTIAL


def redistribution_table(ndim: int, differentiable: bool, seconds: Callable[[str], float]) -> Table:
    """Return the seconds of redistributing a value over one mesh axis, forward plus backward.

    Rows are the layouts at the producer, columns the layouts at a consumer. The last column has the
    all-reduce of the forward pass, which consumers in `PARTIAL` and in `REPLICATED` share.

    Args:
        ndim: number of dims of the value.
        differentiable: whether the gradient of the value is redistributed back.
        seconds: returns the seconds of a collective over the axis, given its name.
    """
    backward = 1.0 if differentiable else 0.0
    reduce, gather = seconds("all_reduce"), seconds("all_gather")
    scatter, exchange = seconds("reduce_scatter"), seconds("all_to_all")
    table = np.zeros((ndim + 2, ndim + 3))
    # A partial sum is reduce-scattered to a sharded consumer, and the gradient gathered back.
    table[0, :] = scatter + backward * gather
    # To a consumer with a partial gradient both passes all-reduce. To a replicated one only the
    # forward pass does: the operator g of Megatron-LM (Shoeybi et al., arXiv:1909.08053, fig. 3).
    table[0, :2] = reduce + backward * reduce, reduce
    table[0, -1] = reduce
    # The operator f of Megatron-LM: nothing forward, and the partial gradient is all-reduced.
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
    """Return a matrix M such that column i of `redistribution_table(...) @ M` is the cost of
    reading a value in all layouts of `sets[i]`.

    M is 1 for the layouts of a set. For a set with both `PARTIAL` and `REPLICATED`, its last row is
    -1, since the two share an all-reduce.

    Args:
        sets: sets of layouts, one per column of M.
        columns: number of columns of the redistribution table, which is the number of rows of M.
    """
    table = np.zeros((columns, len(sets)))
    for set_index, layouts in enumerate(sets):
        table[[table_index(layout) for layout in layouts], set_index] = 1.0
        if PARTIAL in layouts and REPLICATED in layouts:
            table[-1, set_index] = -1.0
    return table


@cache
def layout_sets(
    consumers: tuple[ReadLayouts, ...], returned: frozenset[AxisLayout]
) -> tuple[ReadLayouts, dict[ReadLayouts, Table]]:
    """Return the possible sets of layouts in which consumers read a value, and a table for each
    consumer.

    The table of a consumer is 0 where a set (column) contains the layouts that the consumer reads
    at a choice (row), and infinity elsewhere.

    Args:
        consumers: the layouts of each consumer, for each of its choices.
        returned: the layouts in which the model returns the value; every set contains them.
    """
    all_layouts = sorted(
        frozenset().union(returned, *(read for reads in consumers for read in reads))
    )
    # An operator that reads the value twice may need more layouts at once than the limit.
    max_size = max(MAX_LAYOUTS, max(len(read) for reads in consumers for read in reads))
    sets = tuple(
        layouts
        for length in range(1, min(max_size, len(all_layouts)) + 1)
        for layouts in map(frozenset, combinations(all_layouts, length))
        if returned <= layouts
    )
    reader_tables = {
        reads: np.array(
            [[0.0 if read <= layouts else np.inf for layouts in sets] for read in reads]
        )
        for reads in consumers
    }
    return sets, reader_tables


@cache
def union_of_reads(first: ReadLayouts, second: ReadLayouts) -> ReadLayouts:
    """Return, for each choice of an operator, the layouts in which it reads a value that is passed
    as two of its inputs."""
    return tuple(a | b for a, b in zip(first, second, strict=True))
