"""One axis of the device matrix: all operators decided together, exactly.

Variables are operators, their choices the factors that divide, then no cut. Tables say what each
choice computes and keeps, and what it costs to convert a value between the choice of its maker and
those of its readers. Readers that ask for the same layout share its conversion: where a value has
several, a further variable says in which set of ways it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from math import prod

import numpy as np

from shardwright.cost.step_time import TimeModel
from shardwright.rules.rule import no_reductions
from shardwright.search.by_time.elimination import Elimination, Factor, Table, TooWideError
from shardwright.search.by_time.problem import OpVariable, SearchProblem, TensorEdge
from shardwright.search.indexed_graph import NO_CUT

CONDITIONED = 4
"""How many more operators keep their first guess each time that a table would be too large."""

Choices = list[list[int]]
"""For each node on each axis the factor that it cuts, or `NO_CUT`."""


@dataclass(frozen=True)
class Weights:
    """What a second counts, and what a byte that is kept counts.

    Args:
        forward, backward: seconds of computation.
        conversions: seconds of conversions of activations.
        gradients: seconds of gathering parameters and reducing their gradients.
        kept: bytes of parameters.
    """

    forward: float
    backward: float
    conversions: float
    gradients: float
    kept: float


class AxisTables:
    """The tables of one axis; equal operators and conversions are tabulated once.

    Args:
        axis: which one of the device matrix is decided.
        choices: on all axes; those of the others are kept.
        tables: what earlier axes of the same size and links have tabulated.
    """

    def __init__(
        self,
        network: SearchProblem,
        model: TimeModel,
        axis: int,
        choices: Choices,
        weights: Weights,
        tables: dict[object, Table],
    ) -> None:
        self.network = network
        self.model = model
        self.axis = axis
        self.size = model.mesh.device_matrix[axis]
        self.choices = choices
        self.weights = weights
        self._key = (model.links.levels[axis], self.size, weights)
        self._tables = tables
        self._ways: dict[object, ReadLayouts] = {}
        self.parts = [self._parts(n, node) for n, node in enumerate(network.nodes)]
        self.options = [self._options(n, node) for n, node in enumerate(network.nodes)]

    def decide(self, eliminations: dict[object, Elimination]) -> list[int]:
        """The choice of each node on this axis with the least cost altogether.

        Where the graph is so connected that this needs too large tables, the operators with the
        most neighbors keep the choice that they have, until it does not.

        Args:
            eliminations: by what is connected; kept between axes.
        """
        while True:
            sizes, factors = self._problem()
            scopes = tuple(scope for scope, _ in factors)
            key = (tuple(sizes), scopes)
            try:
                if key not in eliminations:
                    eliminations[key] = Elimination(sizes, scopes)
            except TooWideError:
                self._condition(scopes)
                continue
            found = eliminations[key].minimum([table for _, table in factors])
            return [
                options[choice]
                for options, choice in zip(self.options, found.choices, strict=False)
            ]

    def _condition(self, scopes: Sequence[Sequence[int]]) -> None:
        degree = [0] * len(self.options)
        for scope in scopes:
            for variable in scope:
                if variable < len(degree) and len(self.options[variable]) > 1:
                    degree[variable] += len(scope) - 1
        for node in sorted(range(len(degree)), key=lambda n: -degree[n])[:CONDITIONED]:
            kept = self.choices[node][self.axis]
            self.options[node] = (kept if kept in self.options[node] else NO_CUT,)

    def _parts(self, number: int, node: OpVariable) -> tuple[int, ...]:
        """In how many parts the other axes cut each factor."""
        parts = [1] * len(node.kind.factors)
        for axis, choice in enumerate(self.choices[number]):
            if axis != self.axis and choice != NO_CUT:
                parts[choice] *= self.model.mesh.device_matrix[axis]
        return tuple(parts)

    def _options(self, number: int, node: OpVariable) -> tuple[int, ...]:
        if node.pinned is not None:
            return (self.choices[number][self.axis],)
        kind, parts = node.kind, self.parts[number]
        divides = [f for f in range(len(kind.factors)) if kind.divides(f, parts, self.size)]
        return (*divides, NO_CUT)

    def _problem(self) -> tuple[list[int], list[Factor]]:
        sizes = [len(options) for options in self.options]
        factors: list[Factor] = [
            ((n,), self._operator(n, node)) for n, node in enumerate(self.network.nodes)
        ]
        for stream in self.network.streams:
            self._stream(stream, sizes, factors)
        return sizes, factors

    # What an operator costs by itself.

    def _operator(self, number: int, node: OpVariable) -> Table:
        options, parts = self.options[number], self.parts[number]
        key = (self._key, id(node.work), id(node.kind), node.own, options, parts, node.count)
        if key not in self._tables:
            costs = [self._alone(node, choice, parts) for choice in options]
            self._tables[key] = node.count * np.array(costs)
        return self._tables[key]

    def _alone(self, node: OpVariable, choice: int, parts: tuple[int, ...]) -> float:
        kind, weights = node.kind, self.weights
        after = list(parts)
        if choice != NO_CUT:
            after[choice] *= self.size
        named = dict(zip(kind.factors, after, strict=True))
        forward, backward = self.model.work(node.work, named)
        cost = weights.forward * forward + weights.backward * backward
        if node.rule is not None and node.rule.reductions is not no_reductions and choice != NO_CUT:
            for reduction in node.rule.reductions(node.op, named):
                if kind.factors[choice] in reduction.factors:
                    inside = self.model.inside(reduction, (self.axis,), node.differentiable)
                    cost += weights.conversions * sum(inside)
        for place in node.own:
            cost += self._parameter(node, place, choice, after)
        return cost

    def _parameter(self, node: OpVariable, place: int, choice: int, parts: list[int]) -> float:
        """A parameter that only this operator reads is stored as it is read."""
        value, dims = node.op.inputs[place], node.kind.inputs[place]
        shared = prod(parts[factor] for factor in dims if factor != NO_CUT)
        kept = value.numel * value.stored_dtype.itemsize / shared
        cost = self.weights.kept * kept
        if value.requires_grad:
            cost += self.model.update_of(kept, shared)
            if choice == NO_CUT or choice not in dims:
                sent = value.numel * value.itemsize / shared
                varies = choice != NO_CUT and node.differentiable
                here = (self.axis,)
                varying, whole = (here, ()) if varies else ((), here)
                both = self.model.parameter(varying, whole, sent)
                cost += self.weights.gradients * sum(both)
        return cost

    # What it costs that values are made in one way and read in another.

    def _stream(self, stream: TensorEdge, sizes: list[int], factors: list[Factor]) -> None:
        """Adds the tables of a value; readers that other axes treat alike share conversions."""
        made_parts, maker, made = self._making(stream, sizes, factors)
        groups: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for node, place in stream.readers:
            groups.setdefault(self._elsewhere(node, place), []).append((node, place))
        if stream.returned:
            groups.setdefault((WHOLE,) * len(self.model.mesh.device_matrix), [])
        for elsewhere, readers in groups.items():
            read_parts = prod(
                self.model.mesh.device_matrix[axis]
                for axis, dim in enumerate(elsewhere)
                if dim >= 0
            )
            returned = stream.returned and all(dim == WHOLE for dim in elsewhere)
            elements = stream.value.numel // max(made_parts, read_parts)
            costs = self._conversions(
                len(stream.value.shape),
                elements * stream.value.itemsize,
                stream.differentiable,
                stream.stored,
            )
            if not costs[[code + 2 for code in made]].any():
                continue
            reads: dict[int, ReadLayouts] = {}
            for node, place in readers:
                ways = self._reading(stream, node, place)
                reads[node] = joined_reads(reads[node], ways) if node in reads else ways
            ends = frozenset({WHOLE} if returned else ())
            self._group(costs * stream.count, maker, made, reads, ends, sizes, factors)

    def _making(
        self, stream: TensorEdge, sizes: list[int], factors: list[Factor]
    ) -> tuple[int, int | None, tuple[int, ...]]:
        """Parts on other axes, the variable that decides (None: given), and how it is made in each
        of its choices."""
        matrix = self.model.mesh.device_matrix
        if stream.stored:
            return self._storage(stream, sizes, factors)
        if stream.made is not None or stream.source is None:
            axes = stream.made or ()
            cut = [(axis, dim) for dim, group in enumerate(axes) for axis in group]
            here = next((dim for axis, dim in cut if axis == self.axis), WHOLE)
            return prod(matrix[axis] for axis, _ in cut if axis != self.axis), None, (here,)
        number, slot = stream.source
        node = self.network.nodes[number]
        parts = prod(
            matrix[axis]
            for axis, choice in enumerate(self.choices[number])
            if axis != self.axis and node.kind.left[choice][slot] != NO_CUT
        )
        ways = []
        for choice in self.options[number]:
            dim = node.kind.left[choice][slot]
            if dim == NO_CUT and choice != NO_CUT:
                complete = node.rule is not None and node.kind.factors[choice] in node.rule.complete
                dim = WHOLE if complete else SUMMED
            ways.append(dim)
        return parts, number, tuple(ways)

    def _storage(
        self, stream: TensorEdge, sizes: list[int], factors: list[Factor]
    ) -> tuple[int, int | None, tuple[int, ...]]:
        """A parameter that several operators read: how it is stored is a variable of its own."""
        dims = sorted(
            {
                self.network.nodes[node].kind.read[choice][place]
                for node, place in stream.readers
                for choice in self.options[node]
            }
            - {NO_CUT}
        )
        ways = (*dims, WHOLE)
        parts = max(
            prod(
                self.model.mesh.device_matrix[axis]
                for axis, dim in enumerate(self._elsewhere(node, place))
                if dim >= 0
            )
            for node, place in stream.readers
        )
        kept = stream.value.numel * stream.value.stored_dtype.itemsize / parts

        def keeping(size: int) -> float:
            cost = self.weights.kept * kept / size
            if stream.value.requires_grad:
                cost += self.model.update_of(kept / size, parts * size)
            return cost

        variable = len(sizes)
        sizes.append(len(ways))
        table = np.array([keeping(self.size)] * len(dims) + [keeping(1)])
        factors.append(((variable,), table))
        return parts, variable, ways

    def _elsewhere(self, node: int, place: int) -> tuple[int, ...]:
        """How a node reads a value on the other axes."""
        read = self.network.nodes[node].kind.read
        return tuple(
            WHOLE if axis == self.axis else read[choice][place]
            for axis, choice in enumerate(self.choices[node])
        )

    def _reading(self, stream: TensorEdge, node: int, place: int) -> ReadLayouts:
        kind, options = self.network.nodes[node].kind, self.options[node]
        key = (id(kind), options, place, stream.differentiable)
        if key not in self._ways:
            found = []
            for choice in options:
                dim = kind.read[choice][place]
                varies = dim == NO_CUT and choice != NO_CUT and stream.differentiable
                found.append(frozenset((SUMMED if varies else dim,)))
            self._ways[key] = tuple(found)
        return self._ways[key]

    def _conversions(self, ndim: int, num_bytes: int, differentiable: bool, stored: bool) -> Table:
        """Seconds from each way in which a value is made (row) to each in which it is read, both
        shifted by 2; a last column is what summing up costs once for two ways of reading."""
        key = (self._key, "conversions", ndim, num_bytes, differentiable, stored)
        if key in self._tables:
            return self._tables[key]

        def seconds(collective: str) -> float:
            if stored:
                return self.model.bucketed((self.axis,), num_bytes, collective)
            return self.model.links.seconds(collective, (self.axis,), num_bytes)

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
        table *= self.weights.gradients if stored else self.weights.conversions
        self._tables[key] = table
        return table

    def _group(
        self,
        costs: Table,
        maker: int | None,
        made: tuple[int, ...],
        reads: dict[int, ReadLayouts],
        ends: frozenset[int],
        sizes: list[int],
        factors: list[Factor],
    ) -> None:
        """The tables of one value and the readers that may share its conversions."""
        rows = costs[[code + 2 for code in made]]
        if len(reads) + bool(ends) < 2:
            node = next(iter(reads), None)
            ways = reads[node] if node is not None else (ends,)
            self._add(factors, maker, node, rows @ prices(ways, costs.shape[1]))
            return
        sets, fits = sets_of(tuple(sorted(reads.values(), key=repr)), ends)
        variable = len(sizes)
        sizes.append(len(sets))
        self._add(factors, maker, variable, rows @ prices(sets, costs.shape[1]))
        for node, ways in reads.items():
            self._add(factors, node, variable, fits[ways])

    def _add(
        self, factors: list[Factor], row: int | None, column: int | None, table: Table
    ) -> None:
        """Adds a table whose rows are choices of one variable and columns those of another."""
        if row is None or column is None:
            scope = tuple(v for v in (row, column) if v is not None)
            factors.append((scope, table.sum() if not scope else table.reshape(-1)))
        elif row == column:
            factors.append(((row,), np.diagonal(table)))
        elif row < column:
            factors.append(((row, column), table))
        else:
            factors.append(((column, row), table.T))


SUMMED, WHOLE = -2, -1
"""How a value is made or read on the axis: as terms of a sum (read: with a gradient that is one),
whole on every device, or (0 and up) cut along that dimension."""

LARGEST_SET = 3
"""A value is read in at most so many ways on one axis."""

ReadLayouts = tuple[frozenset[int], ...]
"""For each choice of a reader, or of several together, the ways in which a value is read."""


@cache
def prices(sets: ReadLayouts, columns: int) -> Table:
    """For each set of ways of reading (a column) which costs of a row it adds; the row's last one
    is paid once less where it is in two of them."""
    table = np.zeros((columns, len(sets)))
    for number, ways in enumerate(sets):
        table[[way + 2 for way in ways], number] = 1.0
        if SUMMED in ways and WHOLE in ways:
            table[-1, number] = -1.0
    return table


@cache
def sets_of(
    readers: tuple[ReadLayouts, ...], ends: frozenset[int]
) -> tuple[ReadLayouts, dict[ReadLayouts, Table]]:
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
def joined_reads(before: ReadLayouts, ways: ReadLayouts) -> ReadLayouts:
    """The ways of an operator that reads the value in two places."""
    return tuple(b | w for b, w in zip(before, ways, strict=True))
