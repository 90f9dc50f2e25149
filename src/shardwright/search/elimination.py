"""The least sum of small tables of costs, found exactly by eliminating variable after variable.

Each table (*factor*) says what a combination of choices of a few variables costs. To eliminate a
variable, the tables that have it are added and replaced by their minimum over it; at the end the
choices are read back in reverse (Dechter, "Bucket elimination", 1999). The work grows with the
largest table on the way, hence with how the variables are connected, not with their number: the
order takes next the variable whose neighbours need the fewest new connections (min-fill).

>>> import numpy as np
>>> differ = np.array([[5.0, 0.0], [0.0, 5.0]])
>>> minimum([2, 2, 2], [((0, 1), differ), ((1, 2), differ), ((0,), np.array([1.0, 0.0]))])
Minimum(cost=0.0, choices=(1, 0, 1))
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import prod

import numpy as np
import numpy.typing as npt

Table = npt.NDArray[np.float64]
Factor = tuple[tuple[int, ...], Table]
"""Variables in ascending order, and the cost of each combination of their choices."""

LARGEST_TABLE = 1 << 22
"""Elements; a table of more is not made."""


@dataclass(frozen=True)
class Minimum:
    """The least cost, and for each variable its choice there; of equal ones the first."""

    cost: float
    choices: tuple[int, ...]


class TooWideError(Exception):
    """Variables are so connected that a table would have more elements than the limit."""

    def __init__(self, elements: int, limit: int) -> None:
        super().__init__(f"a table of {elements:,} elements is needed, {limit:,} are allowed")
        self.elements = elements


def minimum(
    sizes: Sequence[int],
    factors: Iterable[Factor],
    order: Sequence[int] | None = None,
    limit: int = LARGEST_TABLE,
) -> Minimum:
    """The choices with the least sum of all factors.

    Args:
        sizes: for each variable how many choices it has.
        factors: tables; a variable in none of them takes its first choice.
        order: in which variables are eliminated; by default that of `min_fill`.
        limit: elements of the largest table.

    Raises:
        TooWideError: if a table of more elements would be needed.
    """
    found = list(factors)
    if order is None:
        order = min_fill(len(sizes), [scope for scope, _ in found], sizes)
    place = [0] * len(sizes)
    for position, variable in enumerate(order):
        place[variable] = position
    buckets: list[list[Factor]] = [[] for _ in sizes]
    total = 0.0
    for scope, table in found:
        if scope:
            buckets[min(place[v] for v in scope)].append((scope, table))
        else:
            total += float(table)
    taken: list[tuple[tuple[int, ...], npt.NDArray[np.intp]] | None] = [None] * len(sizes)
    for position, variable in enumerate(order):
        bucket = buckets[position]
        if not bucket:
            continue
        scope, table = _sum(bucket, sizes, limit)
        axis = scope.index(variable)
        rest = scope[:axis] + scope[axis + 1 :]
        taken[variable] = (rest, table.argmin(axis=axis))
        least = table.min(axis=axis)
        if rest:
            buckets[min(place[v] for v in rest)].append((rest, least))
        else:
            total += float(least)
    choices = [0] * len(sizes)
    for variable in reversed(order):
        entry = taken[variable]
        if entry is not None:
            choices[variable] = int(entry[1][tuple(choices[v] for v in entry[0])])
    return Minimum(total, tuple(choices))


def _sum(bucket: list[Factor], sizes: Sequence[int], limit: int) -> Factor:
    if len(bucket) == 1:
        return bucket[0]
    scope = tuple(sorted({v for one, _ in bucket for v in one}))
    shape = tuple(sizes[v] for v in scope)
    if prod(shape) > limit:
        raise TooWideError(prod(shape), limit)
    # The largest first, so that few sums are made in the full shape.
    total: Table | None = None
    for one, table in sorted(bucket, key=lambda factor: factor[1].size):
        aligned = table.reshape(tuple(sizes[v] if v in one else 1 for v in scope))
        total = aligned if total is None else total + aligned
    assert total is not None
    return scope, np.broadcast_to(total, shape)


def min_fill(
    count: int, scopes: Iterable[Sequence[int]], sizes: Sequence[int] | None = None
) -> list[int]:
    """An order of elimination: next the variable whose neighbours lack the fewest connections.

    Args:
        count: number of variables.
        scopes: the variables of each factor.
        sizes: choices of each variable; of equal variables the one with the smaller table is next.
    """
    neighbours: list[set[int]] = [set() for _ in range(count)]
    for scope in scopes:
        for variable in scope:
            neighbours[variable].update(scope)
    for variable in range(count):
        neighbours[variable].discard(variable)

    def key(variable: int) -> tuple[int, int, int]:
        around = sorted(neighbours[variable])
        fill = sum(
            other not in neighbours[one]
            for i, one in enumerate(around)
            for other in around[i + 1 :]
        )
        table = prod(sizes[v] for v in around) if sizes is not None else len(around)
        return fill, table, variable

    keys = [key(variable) for variable in range(count)]
    heap = list(keys)
    heapify(heap)
    order: list[int] = []
    done = [False] * count
    while heap:
        entry = heappop(heap)
        variable = entry[2]
        if done[variable] or entry != keys[variable]:
            continue
        done[variable] = True
        order.append(variable)
        around = neighbours[variable]
        touched = set(around)
        for one in around:
            neighbours[one].discard(variable)
        for one in around:
            missing = around - neighbours[one] - {one}
            if missing:
                neighbours[one] |= missing
                touched.update(neighbours[one])
        for one in touched:
            if not done[one]:
                keys[one] = key(one)
                heappush(heap, keys[one])
    return order


def widest(order: Sequence[int], scopes: Iterable[Sequence[int]], sizes: Sequence[int]) -> int:
    """Elements of the largest table that eliminating in `order` makes."""
    neighbours: list[set[int]] = [{variable} for variable in range(len(sizes))]
    for scope in scopes:
        for variable in scope:
            neighbours[variable].update(scope)
    largest = 0
    for variable in order:
        around = neighbours[variable]
        largest = max(largest, prod(sizes[v] for v in around))
        around.discard(variable)
        for one in around:
            neighbours[one] |= around
            neighbours[one].discard(variable)
    return largest
