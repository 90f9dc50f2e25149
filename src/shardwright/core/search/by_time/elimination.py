"""The least sum of small tables of costs, found exactly by eliminating variable after variable.

Each table (*factor*) says what a combination of choices of a few variables costs. To eliminate a
variable, the tables that have it are added and replaced by their minimum over it; at the end the
choices are read back in reverse (Dechter, "Bucket elimination", 1999). The work grows with the
largest table on the way, hence with how the variables are connected, not with their number: the
order takes next the variable whose neighbors need the fewest new connections (min-fill).

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


def factor_between(row: int | None, column: int | None, table: Table) -> Factor:
    """A table whose rows are choices of one variable and columns those of another.

    Args:
        row, column: the variables; None where there is one row (or column) and nothing to choose.
    """
    if row is None or column is None:
        scope = tuple(variable for variable in (row, column) if variable is not None)
        return scope, table.reshape(-1) if scope else table.reshape(())
    if row == column:
        return (row,), np.diagonal(table)
    return ((row, column), table) if row < column else ((column, row), table.T)


@dataclass(frozen=True)
class Minimum:
    """The least cost, and for each variable its choice there; of equal ones the first."""

    cost: float
    choices: tuple[int, ...]


class TooWideError(Exception):
    """Variables are so connected that a table would have more elements than the limit."""

    def __init__(self, elements: int, limit: int) -> None:
        super().__init__(f"a table needs {elements:,} elements, above the limit of {limit:,}")
        self.elements = elements


def minimum(sizes: Sequence[int], factors: Iterable[Factor], limit: int = LARGEST_TABLE) -> Minimum:
    """The choices with the least sum of all factors.

    Args:
        sizes: for each variable how many choices it has.
        factors: tables; a variable in none of them takes its first choice.
        limit: elements of the largest table.

    Raises:
        TooWideError: if a table of more elements would be needed.
    """
    factors = list(factors)
    elimination = Elimination(sizes, [scope for scope, _ in factors], limit)
    return elimination.minimum([table for _, table in factors])


@dataclass(frozen=True, slots=True)
class _Step:
    """The elimination of one variable.

    Args:
        reads: numbers of the tables that have it, the smallest first, so that few sums are made in
            the full shape; each with its shape beside the others.
        axis: of their sum, which is the variable's.
        rest: the other variables of the sum.
    """

    variable: int
    reads: tuple[tuple[int, tuple[int, ...]], ...]
    axis: int
    rest: tuple[int, ...]


class Elimination:
    """What is done for factors of certain variables, whatever is in their tables; see `minimum`.

    Raises:
        TooWideError: if a table of more elements than `limit` would be needed.
    """

    def __init__(
        self, sizes: Sequence[int], scopes: Sequence[tuple[int, ...]], limit: int = LARGEST_TABLE
    ) -> None:
        self._sizes = sizes
        self._order = min_fill(sizes, scopes)
        self._place = [0] * len(sizes)
        for position, variable in enumerate(self._order):
            self._place[variable] = position
        buckets: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in sizes]
        self._constants = [number for number, scope in enumerate(scopes) if not scope]
        for number, scope in enumerate(scopes):
            self._put(buckets, number, scope)
        self._steps: list[_Step] = []
        tables = len(scopes)
        for position, variable in enumerate(self._order):
            if buckets[position]:
                step = self._step(variable, buckets[position], limit)
                self._steps.append(step)
                if not step.rest:
                    self._constants.append(tables)
                self._put(buckets, tables, step.rest)
                tables += 1

    def _put(
        self, buckets: list[list[tuple[int, tuple[int, ...]]]], number: int, scope: tuple[int, ...]
    ) -> None:
        """A table waits for the first of its variables to be eliminated."""
        if scope:
            buckets[min(self._place[v] for v in scope)].append((number, scope))

    def _step(self, variable: int, bucket: list[tuple[int, tuple[int, ...]]], limit: int) -> _Step:
        sizes = self._sizes
        scope = tuple(sorted({v for _, one in bucket for v in one}))
        elements = prod(sizes[v] for v in scope)
        if len(bucket) > 1 and elements > limit:
            raise TooWideError(elements, limit)
        bucket = sorted(bucket, key=lambda entry: prod(sizes[v] for v in entry[1]))
        reads = tuple(
            (number, tuple(sizes[v] if v in one else 1 for v in scope)) for number, one in bucket
        )
        axis = scope.index(variable)
        return _Step(variable, reads, axis, scope[:axis] + scope[axis + 1 :])

    def minimum(self, tables: Sequence[Table]) -> Minimum:
        """The choices with the least sum.

        Args:
            tables: of the factors, in the order of their scopes.
        """
        known = list(tables)
        taken: list[npt.NDArray[np.intp]] = []
        for step in self._steps:
            total = known[step.reads[0][0]].reshape(step.reads[0][1])
            for number, shape in step.reads[1:]:
                total = total + known[number].reshape(shape)
            taken.append(total.argmin(axis=step.axis))
            known.append(np.minimum.reduce(total, axis=step.axis))
        choices = [0] * len(self._sizes)
        for step, best in zip(reversed(self._steps), reversed(taken), strict=True):
            choices[step.variable] = int(best[tuple(choices[v] for v in step.rest)])
        return Minimum(sum(float(known[number]) for number in self._constants), tuple(choices))


def min_fill(sizes: Sequence[int], scopes: Iterable[Sequence[int]]) -> list[int]:
    """An order of elimination: next the variable whose neighbors lack the fewest connections.

    Args:
        sizes: choices of each variable; of equal variables the one with the smaller table is next.
        scopes: the variables of each factor.
    """
    count = len(sizes)
    neighbors: list[set[int]] = [set() for _ in range(count)]
    for scope in scopes:
        for variable in scope:
            neighbors[variable].update(scope)
    for variable in range(count):
        neighbors[variable].discard(variable)

    def key(variable: int) -> tuple[int, int, int]:
        around = sorted(neighbors[variable])
        fill = sum(
            other not in neighbors[one] for i, one in enumerate(around) for other in around[i + 1 :]
        )
        return fill, prod(sizes[v] for v in around), variable

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
        around = neighbors[variable]
        touched = set(around)
        for one in around:
            neighbors[one].discard(variable)
        for one in around:
            missing = around - neighbors[one] - {one}
            if missing:
                neighbors[one] |= missing
                touched.update(neighbors[one])
        for one in touched:
            if not done[one]:
                keys[one] = key(one)
                heappush(heap, keys[one])
    return order
