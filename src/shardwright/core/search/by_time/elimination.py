"""Minimize a sum of cost tables exactly by variable elimination.

Each table (*factor*) has the costs of all combinations of choices of a few variables. To eliminate
a variable, the tables that contain it are added, and their sum is replaced by its minimum over the
variable; at the end the choices are read back in reverse order (Dechter, "Bucket elimination",
1999). The time grows with the largest intermediate table, which depends on the connections between
variables rather than on their number. The order of elimination is min-fill: the next variable is
the variable whose elimination connects the fewest pairs of neighbors that are not connected yet.

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
"""Cost table with its scope: the variables in ascending order, and an array of costs with one
dimension for each of these variables."""

LARGEST_TABLE = 1 << 22
"""Maximum number of elements of a table: 32 MB in double precision."""


def factor_between(row: int | None, column: int | None, table: Table) -> Factor:
    """Return a cost table of two variables as a `Factor`, with its scope in ascending order.

    Args:
        row, column: variables whose choices select a row and a column of `table`; None for a single
            row or column. If both are the same variable, only the diagonal remains.
    """
    if row is None or column is None:
        scope = tuple(variable for variable in (row, column) if variable is not None)
        return scope, table.reshape(-1) if scope else table.reshape(())
    if row == column:
        # As of an edge between repeated blocks, whose producer and consumer share a variable.
        return (row,), np.diagonal(table)
    return ((row, column), table) if row < column else ((column, row), table.T)


@dataclass(frozen=True)
class Minimum:
    """The least cost and the choice of each variable; ties go to the first choice."""

    cost: float
    choices: tuple[int, ...]


class TooWideError(Exception):
    """Raised if eliminating a variable needs a table with more elements than the limit."""

    def __init__(self, elements: int, limit: int) -> None:
        super().__init__(f"a table needs {elements:,} elements, above the limit of {limit:,}")
        self.elements = elements


def minimum(sizes: Sequence[int], factors: Iterable[Factor], limit: int = LARGEST_TABLE) -> Minimum:
    """Return the choices with the least sum of all factors.

    Args:
        sizes: the number of choices of each variable.
        factors: tables to add; a variable without a table takes its first choice.
        limit: maximum number of elements of a table.

    Raises:
        TooWideError: if a table with more elements would be needed.
    """
    factors = list(factors)
    elimination = Elimination(sizes, [scope for scope, _ in factors], limit)
    return elimination.minimum([table for _, table in factors])


ALL = slice(None)


@dataclass(frozen=True, slots=True)
class _EliminationStep:
    """The elimination of one variable.

    Args:
        addends: indices of the tables that contain `variable`, each with its shape for
            broadcasting; the smallest first, so that few additions have the full shape.
        scopes: indices of the same tables, each with its variables in ascending order.
        axis: dimension of the sum of these tables that belongs to `variable`.
        other_variables: variables of the other dimensions of the sum, in order.
    """

    variable: int
    addends: tuple[tuple[int, tuple[int, ...]], ...]
    scopes: tuple[tuple[int, tuple[int, ...]], ...]
    axis: int
    other_variables: tuple[int, ...]

    def costs_of_choices(self, tables: Sequence[Table], choices: Sequence[int]) -> Table:
        """Return the sum of the tables for each choice of `variable`, given those of the others.

        One vector takes far less time than `argmin` of the full sum.
        """
        # In the order of the full sum, so that both round alike.
        first, *others = (
            tables[table][tuple([ALL if v == self.variable else choices[v] for v in scope])]
            for table, scope in self.scopes
        )
        return sum(others, start=first)


class Elimination:
    """Elimination steps for tables of given scopes, reusable for tables with other entries.

    Args:
        sizes: the number of choices of each variable.
        scopes: the variables of each table.
        limit: maximum number of elements of a table.

    Raises:
        TooWideError: if a table with more elements than `limit` would be needed.
    """

    def __init__(
        self, sizes: Sequence[int], scopes: Sequence[tuple[int, ...]], limit: int = LARGEST_TABLE
    ) -> None:
        self._sizes = sizes
        self._order = min_fill_order(sizes, scopes)
        self._position = [0] * len(sizes)
        for position, variable in enumerate(self._order):
            self._position[variable] = position
        # By position in the order: (table index, scope) of the tables whose first variable is
        # there.
        buckets: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in sizes]
        # Tables without variables: arguments, or results of eliminating the last variable of a
        # connected component.
        self._constants = [table for table, scope in enumerate(scopes) if not scope]
        for table, scope in enumerate(scopes):
            self._add_to_bucket(buckets, table, scope)
        self._steps: list[_EliminationStep] = []
        num_tables = len(scopes)
        for position, variable in enumerate(self._order):
            # A variable without a table takes its first choice.
            if buckets[position]:
                step = self._elimination_step(variable, buckets[position], limit)
                self._steps.append(step)
                if not step.other_variables:
                    self._constants.append(num_tables)
                # The minimum over the variable is a new table, with the next index.
                self._add_to_bucket(buckets, num_tables, step.other_variables)
                num_tables += 1

    def _add_to_bucket(
        self, buckets: list[list[tuple[int, tuple[int, ...]]]], table: int, scope: tuple[int, ...]
    ) -> None:
        """Add a table index to the bucket of the variable in `scope` that is eliminated first."""
        if scope:
            buckets[min(self._position[v] for v in scope)].append((table, scope))

    def _elimination_step(
        self, variable: int, bucket: list[tuple[int, tuple[int, ...]]], limit: int
    ) -> _EliminationStep:
        sizes = self._sizes
        scope = tuple(sorted({v for _, variables in bucket for v in variables}))
        elements = prod(sizes[v] for v in scope)
        # A single table exists already, and no larger one is made for its minimum.
        if len(bucket) > 1 and elements > limit:
            raise TooWideError(elements, limit)
        bucket = sorted(bucket, key=lambda entry: prod(sizes[v] for v in entry[1]))
        addends = tuple(
            (table, tuple(sizes[v] if v in variables else 1 for v in scope))
            for table, variables in bucket
        )
        axis = scope.index(variable)
        others = scope[:axis] + scope[axis + 1 :]
        return _EliminationStep(variable, addends, tuple(bucket), axis, others)

    def minimum(self, tables: Sequence[Table]) -> Minimum:
        """Return the choices with the least sum of `tables`.

        Args:
            tables: one table for each scope, in the same order.
        """
        all_tables = list(tables)
        for step in self._steps:
            table, shape = step.addends[0]
            total = all_tables[table].reshape(shape)
            for table, shape in step.addends[1:]:
                # Not in place: `total` may be a view of a table of the caller.
                total = total + all_tables[table].reshape(shape)
            all_tables.append(np.minimum.reduce(total, axis=step.axis))
        choices = [0] * len(self._sizes)
        # Backwards: the best choice of a variable depends on those eliminated after it.
        for step in reversed(self._steps):
            costs = step.costs_of_choices(all_tables, choices)
            # `argmin` returns the first of equal costs, so that plans are the same in every run.
            choices[step.variable] = int(costs.argmin())
        # Each connected component of variables leaves one constant.
        return Minimum(sum(float(all_tables[table]) for table in self._constants), tuple(choices))


def min_fill_order(sizes: Sequence[int], scopes: Iterable[Sequence[int]]) -> list[int]:
    """Return the variables in min-fill order: next is the variable whose elimination connects the
    fewest pairs of neighbors.

    Ties go to the smallest table over the neighbors, then to the first variable.

    Args:
        sizes: the number of choices of each variable.
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
        adjacent = sorted(neighbors[variable])
        fill = sum(
            other not in neighbors[neighbor]
            for i, neighbor in enumerate(adjacent)
            for other in adjacent[i + 1 :]
        )
        # The variable's index breaks ties, so that plans are the same in every run.
        return fill, prod(sizes[v] for v in adjacent), variable

    keys = [key(variable) for variable in range(count)]
    heap = list(keys)
    heapify(heap)
    order: list[int] = []
    is_eliminated = [False] * count
    while heap:
        entry = heappop(heap)
        variable = entry[2]
        # A heap cannot update entries: a variable is pushed again when its key changes, and
        # outdated entries are skipped.
        if is_eliminated[variable] or entry != keys[variable]:
            continue
        is_eliminated[variable] = True
        order.append(variable)
        adjacent = neighbors[variable]
        changed = set(adjacent)
        for neighbor in adjacent:
            neighbors[neighbor].discard(variable)
        for neighbor in adjacent:
            missing = adjacent - neighbors[neighbor] - {neighbor}
            if missing:
                neighbors[neighbor] |= missing
                # New connections between neighbors can also change the fill of their neighbors.
                changed.update(neighbors[neighbor])
        for neighbor in changed:
            if not is_eliminated[neighbor]:
                keys[neighbor] = key(neighbor)
                heappush(heap, keys[neighbor])
    return order
