"""One axis of the device matrix: all operators decided together, exactly.

Variables are operators, their choices the factors that divide, then no cut. Tables say what each
choice computes and keeps, and what it costs to redistribute a value between the choice of its
source and those of its readers. Readers that ask for the same layout share its redistribution:
where a value has several, a further variable is the set of layouts in which it is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np

from shardwright.core.cost.step_time import TimeModel
from shardwright.core.rules.rule import no_reductions
from shardwright.core.search.by_time.elimination import (
    Elimination,
    Factor,
    Table,
    TooWideError,
    factor_between,
)
from shardwright.core.search.by_time.objective import ObjectiveCost
from shardwright.core.search.by_time.problem import OpVariable, SearchProblem, TensorEdge
from shardwright.core.search.by_time.read_layouts import (
    SUMMED,
    WHOLE,
    AxisLayout,
    ReadLayouts,
    column_sums,
    joined_reads,
    layout_sets,
    redistribution_table,
    row_of,
)
from shardwright.core.search.indexed_graph import NO_CUT

CONDITIONED = 4
"""How many more operators keep their first guess each time that a table would be too large."""

Choices = list[list[int]]
"""For each variable on each axis the factor that it cuts, or `NO_CUT`."""


@dataclass(frozen=True)
class Weights:
    """What a second counts, and what a byte that is kept counts.

    Args:
        forward, backward: seconds of computation.
        redistributions: seconds of redistributions of activations.
        gradients: seconds of gathering parameters and reducing their gradients.
        kept: bytes of parameters.
    """

    forward: float
    backward: float
    redistributions: float
    gradients: float
    kept: float

    def of(self, cost: ObjectiveCost) -> float:
        """What a cost counts altogether."""
        return (
            self.forward * cost.forward
            + self.backward * cost.backward
            + self.redistributions * cost.redistributions
            + self.gradients * (cost.gathers + cost.gradients)
            + cost.update
            + self.kept * cost.kept
        )


class AxisTables:
    """The tables of one axis; equal operators and redistributions are tabulated once.

    Args:
        axis: which one of the device matrix is decided.
        choices: on all axes; those of the others are kept.
        tables: what earlier axes of the same size and links have tabulated.
    """

    def __init__(
        self,
        problem: SearchProblem,
        model: TimeModel,
        axis: int,
        choices: Choices,
        weights: Weights,
        tables: dict[object, Table],
    ) -> None:
        self.problem = problem
        self.model = model
        self.axis = axis
        self.size = model.mesh.device_matrix[axis]
        self.choices = choices
        self.weights = weights
        self._key = (model.links.levels[axis], weights)
        self._tables = tables
        self._reads: dict[object, ReadLayouts] = {}
        self.parts = [
            variable.kind.parts(row, model.mesh.device_matrix, axis)
            for variable, row in zip(problem.variables, choices, strict=True)
        ]
        self.options = [self._options(n, variable) for n, variable in enumerate(problem.variables)]

    def decide(self, eliminations: dict[object, Elimination]) -> list[int]:
        """The choice of each variable on this axis with the least cost altogether.

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
            least = eliminations[key].minimum([table for _, table in factors])
            return [
                options[choice]
                for options, choice in zip(self.options, least.choices, strict=False)
            ]

    def _condition(self, scopes: Sequence[Sequence[int]]) -> None:
        degree = [0] * len(self.options)
        for scope in scopes:
            for variable in scope:
                if variable < len(degree) and len(self.options[variable]) > 1:
                    degree[variable] += len(scope) - 1
        for variable in sorted(range(len(degree)), key=lambda n: -degree[n])[:CONDITIONED]:
            choice = self.choices[variable][self.axis]
            self.options[variable] = (choice if choice in self.options[variable] else NO_CUT,)

    def _options(self, number: int, variable: OpVariable) -> tuple[int, ...]:
        if variable.pinned is not None:
            return (self.choices[number][self.axis],)
        kind, parts = variable.kind, self.parts[number]
        divides = [f for f in range(len(kind.factors)) if kind.divides(f, parts, self.size)]
        return (*divides, NO_CUT)

    def _problem(self) -> tuple[list[int], list[Factor]]:
        sizes = [len(options) for options in self.options]
        factors: list[Factor] = [
            ((n,), self._operator(n, variable)) for n, variable in enumerate(self.problem.variables)
        ]
        for edge in self.problem.edges:
            self._edge(edge, sizes, factors)
        return sizes, factors

    # What an operator costs by itself.

    def _operator(self, number: int, variable: OpVariable) -> Table:
        options, parts = self.options[number], self.parts[number]
        kinds = (id(variable.work), id(variable.kind), variable.own)
        key = (self._key, *kinds, options, parts, variable.count)
        if key not in self._tables:
            costs = [self._alone(variable, choice, parts) for choice in options]
            self._tables[key] = variable.count * np.array(costs)
        return self._tables[key]

    def _alone(self, variable: OpVariable, choice: int, parts: tuple[int, ...]) -> float:
        kind, rule, weights = variable.kind, variable.rule, self.weights
        after = list(parts)
        if choice != NO_CUT:
            after[choice] *= self.size
        named = dict(zip(kind.factors, after, strict=True))
        forward, backward = self.model.work(variable.work, named)
        cost = weights.forward * forward + weights.backward * backward
        if rule is not None and rule.reductions is not no_reductions and choice != NO_CUT:
            for reduction in rule.reductions(variable.op, named):
                if kind.factors[choice] in reduction.factors:
                    inside = self.model.inside(
                        reduction, (self.axis,), variable.differentiable, (forward, backward)
                    )
                    cost += weights.redistributions * sum(inside)
        for place in variable.own:
            cost += self._parameter(variable, place, choice, after)
        return cost

    def _parameter(self, variable: OpVariable, place: int, choice: int, parts: list[int]) -> float:
        """A parameter that only this operator reads is stored as it is read."""
        value, carried = variable.op.inputs[place], variable.kind.tensors[place].factors
        shared = prod(parts[factor] for factor in carried)
        kept = value.numel * value.stored_dtype.itemsize / shared
        cost = self.weights.kept * kept
        if value.requires_grad:
            cost += self.model.update_of(kept, shared)
            if choice not in carried:
                sent = value.numel * value.itemsize / shared
                varies = choice != NO_CUT and variable.differentiable
                here = (self.axis,)
                varying, whole = (here, ()) if varies else ((), here)
                both = self.model.parameter(varying, whole, sent)
                cost += self.weights.gradients * sum(both)
        return cost

    # What it costs that a value is left in one layout and read in another.

    def _edge(self, edge: TensorEdge, sizes: list[int], factors: list[Factor]) -> None:
        """Adds the tables of a value; readers that other axes treat alike share redistributions."""
        source = self._source(edge, sizes, factors)
        groups: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for reader, place in edge.readers:
            groups.setdefault(self._elsewhere(reader, place), []).append((reader, place))
        if edge.returned:
            groups.setdefault((WHOLE,) * len(self.model.mesh.device_matrix), [])
        for elsewhere, readers in groups.items():
            parts = max(source.parts, self._parts_elsewhere(elsewhere))
            num_bytes = edge.value.numel // parts * edge.value.itemsize
            costs = self._redistributions(
                len(edge.value.shape), num_bytes, edge.differentiable, edge.stored
            )
            costs = costs[[row_of(layout) for layout in source.layouts]]
            if not costs.any():
                continue
            reads: dict[int, ReadLayouts] = {}
            for reader, place in readers:
                layouts = self._reading(edge, reader, place)
                reads[reader] = joined_reads(reads[reader], layouts) if reader in reads else layouts
            whole = edge.returned and all(dim == WHOLE for dim in elsewhere)
            returned = frozenset({WHOLE} if whole else ())
            self._group(costs * edge.count, source.variable, reads, returned, sizes, factors)

    def _source(self, edge: TensorEdge, sizes: list[int], factors: list[Factor]) -> _Source:
        matrix = self.model.mesh.device_matrix
        if edge.stored:
            return self._storage(edge, sizes, factors)
        if edge.fixed_axes is not None:
            cut = [(axis, dim) for dim, axes in enumerate(edge.fixed_axes) for axis in axes]
            here = next((dim for axis, dim in cut if axis == self.axis), WHOLE)
            return _Source(prod(matrix[a] for a, _ in cut if a != self.axis), None, (here,))
        assert edge.source is not None
        number, place = edge.source
        variable = self.problem.variables[number]
        kind = variable.kind
        parts = prod(
            matrix[axis]
            for axis, choice in enumerate(self.choices[number])
            if axis != self.axis and kind.output_dims[choice][place] != NO_CUT
        )
        complete = variable.rule.complete if variable.rule is not None else frozenset()
        layouts = []
        for choice in self.options[number]:
            dim = kind.output_dims[choice][place]
            if dim == NO_CUT and choice != NO_CUT:
                dim = WHOLE if kind.factors[choice] in complete else SUMMED
            layouts.append(dim)
        return _Source(parts, number, tuple(layouts))

    def _storage(self, edge: TensorEdge, sizes: list[int], factors: list[Factor]) -> _Source:
        """A parameter that several operators read: how it is stored is a variable of its own."""
        dims = sorted(
            {
                self.problem.variables[reader].kind.input_dims[choice][place]
                for reader, place in edge.readers
                for choice in self.options[reader]
            }
            - {NO_CUT}
        )
        parts = max(
            self._parts_elsewhere(self._elsewhere(reader, place)) for reader, place in edge.readers
        )
        kept = edge.value.numel * edge.value.stored_dtype.itemsize / parts

        def cost_of(size: int) -> float:
            cost = self.weights.kept * kept / size
            if edge.value.requires_grad:
                cost += self.model.update_of(kept / size, parts * size)
            return cost

        number = len(sizes)
        sizes.append(len(dims) + 1)
        table = np.array([cost_of(self.size)] * len(dims) + [cost_of(1)])
        factors.append(((number,), table))
        return _Source(parts, number, (*dims, WHOLE))

    def _elsewhere(self, reader: int, place: int) -> tuple[int, ...]:
        """How a variable reads a value on the other axes."""
        read = self.problem.variables[reader].kind.input_dims
        return tuple(
            WHOLE if axis == self.axis else read[choice][place]
            for axis, choice in enumerate(self.choices[reader])
        )

    def _parts_elsewhere(self, elsewhere: tuple[int, ...]) -> int:
        matrix = self.model.mesh.device_matrix
        return prod(matrix[axis] for axis, dim in enumerate(elsewhere) if dim >= 0)

    def _reading(self, edge: TensorEdge, reader: int, place: int) -> ReadLayouts:
        kind, options = self.problem.variables[reader].kind, self.options[reader]
        key = (id(kind), options, place, edge.differentiable)
        if key not in self._reads:
            layouts = []
            for choice in options:
                dim = kind.input_dims[choice][place]
                varies = dim == NO_CUT and choice != NO_CUT and edge.differentiable
                layouts.append(frozenset((SUMMED if varies else dim,)))
            self._reads[key] = tuple(layouts)
        return self._reads[key]

    def _redistributions(
        self, ndim: int, num_bytes: int, differentiable: bool, stored: bool
    ) -> Table:
        """The `redistribution_table` of a value of `num_bytes`, weighed."""
        key = (self._key, "redistributions", ndim, num_bytes, differentiable, stored)
        if key not in self._tables:

            def seconds(collective: str) -> float:
                if stored:
                    return self.model.bucketed((self.axis,), num_bytes, collective)
                return self.model.links.seconds(collective, (self.axis,), num_bytes)

            weight = self.weights.gradients if stored else self.weights.redistributions
            self._tables[key] = weight * redistribution_table(ndim, differentiable, seconds)
        return self._tables[key]

    def _group(
        self,
        costs: Table,
        source: int | None,
        reads: dict[int, ReadLayouts],
        returned: frozenset[AxisLayout],
        sizes: list[int],
        factors: list[Factor],
    ) -> None:
        """The tables of one value and the readers that may share its redistributions.

        Args:
            costs: from the layout of each choice of the source (row) to each layout.
        """
        columns = costs.shape[1]
        if len(reads) + bool(returned) < 2:
            reader = next(iter(reads), None)
            layouts = reads[reader] if reader is not None else (returned,)
            factors.append(factor_between(source, reader, costs @ column_sums(layouts, columns)))
            return
        sets, serves = layout_sets(tuple(sorted(reads.values(), key=repr)), returned)
        number = len(sizes)
        sizes.append(len(sets))
        factors.append(factor_between(source, number, costs @ column_sums(sets, columns)))
        for reader, layouts in reads.items():
            factors.append(factor_between(reader, number, serves[layouts]))


class _Source(NamedTuple):
    """Where a value comes from.

    Args:
        parts: in how many parts the other axes cut it.
        variable: the number of the variable that decides its layout; None if it is fixed.
        layouts: on this axis, for each choice of the variable.
    """

    parts: int
    variable: int | None
    layouts: tuple[AxisLayout, ...]
