"""Decide all operators on one axis of the device matrix exactly, by variable elimination.

The choices of a variable are the factors that the axis may cut, then no cut. A table for each
variable contains the cost of each choice (computation, parameters). A table for a pair of variables
contains the cost of redistributing a value from its producer's layout to a consumer's. Consumers
that read one layout share its redistribution. So a value with several consumers gets one more
variable, the *set* of layouts in which the value is read:

    producer -- cost of redistributing to all layouts of the set -- set -- 0 or infinity -- consumer
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import numpy as np

from shardwright.core.cost.time_model import TimeModel
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
    PARTIAL,
    REPLICATED,
    AxisLayout,
    ReadLayouts,
    column_sums,
    layout_sets,
    redistribution_table,
    table_index,
    union_of_reads,
)
from shardwright.core.search.indexed_graph import NO_CUT

FIXED_PER_RETRY = 4
"""Number of operators whose choice is fixed before an elimination that needed a table above the
size limit is retried."""

Choices = list[list[int]]
"""Index of the factor that each axis cuts in each operator, or `NO_CUT`:
`choices[variable][axis]`."""


@dataclass(frozen=True)
class Weights:
    """Coefficients of the linear objective, a sum over operators and edges.

    Args:
        forward, backward: weight of a second of computation.
        redistributions: weight of a second of redistributing activations.
        gradients: weight of a second of gathering parameters and reducing their gradients.
        parameter_bytes: weight of a byte of parameters on a device, in seconds.
    """

    forward: float
    backward: float
    redistributions: float
    gradients: float
    parameter_bytes: float

    def weighted_seconds(self, cost: ObjectiveCost) -> float:
        """Return the linear objective of `cost` in seconds: its components times their weights."""
        return (
            self.forward * cost.forward
            + self.backward * cost.backward
            + self.redistributions * cost.redistributions
            + self.gradients * (cost.gathers + cost.gradients)
            + cost.update
            + self.parameter_bytes * cost.parameter_bytes
        )


class AxisTables:
    """The cost tables of one mesh axis, given the choices on all other axes.

    Args:
        axis: the axis of the device matrix to decide.
        choices: the factor that each axis cuts, for each variable; read on `axis` only for fixed
            variables.
        tables: cache of tables that all axes share; the key of a table contains all its inputs.

    Attributes:
        shard_counts: for each variable the number of shards of each factor over the other axes.
        options: for each variable the factors that `axis` may cut, and `NO_CUT`.
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
        # Links instead of the index: axes over equal links share tables.
        self._key = (model.links.levels[axis], weights)
        self._tables = tables
        self._cached_reads: dict[object, ReadLayouts] = {}
        self.shard_counts = [
            variable.op_type.shard_counts(row, model.mesh.device_matrix, axis)
            for variable, row in zip(problem.variables, choices, strict=True)
        ]
        self.options = [
            self._valid_choices_on_axis(n, variable) for n, variable in enumerate(problem.variables)
        ]

    def decide(self, eliminations: dict[object, Elimination]) -> list[int]:
        """Return the choices of all variables on this axis that minimize the total cost.

        If the elimination would need a table above the size limit, it is retried with
        `FIXED_PER_RETRY` more operators fixed to their current choice, beginning with the operators
        with the most neighbors.

        Args:
            eliminations: cache of elimination orders by table sizes and scopes, shared by all axes.
        """
        while True:
            sizes, factors = self._build_tables()
            scopes = tuple(scope for scope, _ in factors)
            # The order of elimination depends on sizes and scopes only, which most axes have in
            # common.
            key = (tuple(sizes), scopes)
            try:
                if key not in eliminations:
                    eliminations[key] = Elimination(sizes, scopes)
            # Densely connected graphs, such as one with a value that all layers read. Only a few
            # operators are fixed, and the others are still decided exactly.
            except TooWideError:
                self._fix_most_connected_variables(scopes)
                continue
            minimum = eliminations[key].minimum([table for _, table in factors])
            return [
                options[choice]
                # Not strict: the variables of storage and of sets follow those of operators.
                for options, choice in zip(self.options, minimum.choices, strict=False)
            ]

    def _fix_most_connected_variables(self, scopes: Sequence[Sequence[int]]) -> None:
        """Fix the choices of the `FIXED_PER_RETRY` variables that share tables with the largest
        number of other variables."""
        degree = [0] * len(self.options)
        for scope in scopes:
            for variable in scope:
                # The variables after those of operators are storage and sets of layouts.
                if variable < len(degree) and len(self.options[variable]) > 1:
                    degree[variable] += len(scope) - 1
        for variable in sorted(range(len(degree)), key=lambda n: -degree[n])[:FIXED_PER_RETRY]:
            choice = self.choices[variable][self.axis]
            self.options[variable] = (choice if choice in self.options[variable] else NO_CUT,)

    def _valid_choices_on_axis(self, index: int, variable: OpVariable) -> tuple[int, ...]:
        if variable.pinned is not None:
            # A single choice, so that the pin costs the elimination nothing.
            return (self.choices[index][self.axis],)
        op_type, shard_counts = variable.op_type, self.shard_counts[index]
        # Only factors whose shards over all other axes are divisible by this axis; `NO_CUT` is
        # last, so that ties prefer cuts.
        divides = [
            f for f in range(len(op_type.factors)) if op_type.divides(f, shard_counts, self.size)
        ]
        return (*divides, NO_CUT)

    def _build_tables(self) -> tuple[list[int], list[Factor]]:
        """Return the number of choices of each variable, and all (variables, cost table) pairs."""
        sizes = [len(options) for options in self.options]
        factors: list[Factor] = [
            ((n,), self._operator_table(n, variable))
            for n, variable in enumerate(self.problem.variables)
        ]
        for edge in self.problem.edges:
            self._add_edge_tables(edge, sizes, factors)
        return sizes, factors

    # Costs of single operators.

    def _operator_table(self, index: int, variable: OpVariable) -> Table:
        options, shard_counts = self.options[index], self.shard_counts[index]
        # Without the axis: axes of one size and equal links share tables, as do repeated layers.
        op_key = (id(variable.work), id(variable.op_type), variable.own_parameters)
        key = (self._key, *op_key, options, shard_counts, variable.count)
        if key not in self._tables:
            costs = [self._operator_cost(variable, choice, shard_counts) for choice in options]
            self._tables[key] = variable.count * np.array(costs)
        return self._tables[key]

    def _operator_cost(
        self, variable: OpVariable, choice: int, shard_counts: tuple[int, ...]
    ) -> float:
        op_type, rule, weights = variable.op_type, variable.rule, self.weights
        new_counts = list(shard_counts)
        if choice != NO_CUT:
            new_counts[choice] *= self.size
        counts_by_factor = dict(zip(op_type.factors, new_counts, strict=True))
        forward, backward = self.model.work_seconds(variable.work, counts_by_factor)
        cost = weights.forward * forward + weights.backward * backward
        if rule is not None and rule.reductions is not no_reductions and choice != NO_CUT:
            for reduction in rule.reductions(variable.op, counts_by_factor):
                # Over this axis alone: each other axis counts its collective when it is decided.
                if op_type.factors[choice] in reduction.factors:
                    seconds = self.model.inner_collective_seconds(
                        reduction, (self.axis,), variable.differentiable, (forward, backward)
                    )
                    cost += weights.redistributions * sum(seconds)
        for input_index in variable.own_parameters:
            cost += self._parameter_cost(variable, input_index, choice, new_counts)
        return cost

    def _parameter_cost(
        self, variable: OpVariable, input_index: int, choice: int, shard_counts: list[int]
    ) -> float:
        """Return the seconds, weighted by `self.weights`, of updating, gathering and storing a
        parameter that a single operator reads.

        If the axis does not shard the parameter, either its gradient is partial over the axis and
        all-reduced, or (under ZeRO) the parameter is stored sharded over the axis and gathered.
        """
        value, own_factors = (
            variable.op.inputs[input_index],
            variable.op_type.tensors[input_index].factors,
        )
        num_shards = prod(shard_counts[factor] for factor in own_factors)
        parameter_bytes = value.numel * value.stored_dtype.itemsize / num_shards
        cost = self.weights.parameter_bytes * parameter_bytes
        if value.requires_grad:
            cost += self.model.parameter_update_seconds(parameter_bytes, num_shards)
            if choice not in own_factors:
                # Stored and updated in the stored dtype, but gathered and reduced in the dtype of
                # use.
                shard_bytes = value.numel * value.itemsize / num_shards
                is_partial = choice != NO_CUT and variable.differentiable
                axes = (self.axis,)
                reduce_axes, gather_axes = (axes, ()) if is_partial else ((), axes)
                seconds = self.model.parameter_seconds(reduce_axes, gather_axes, shard_bytes)
                cost += self.weights.gradients * sum(seconds)
        return cost

    # Costs of redistributions between operators.

    def _add_edge_tables(self, edge: TensorEdge, sizes: list[int], factors: list[Factor]) -> None:
        """Add the cost tables of the redistributions of an edge's value to `factors`.

        Only consumers that shard the value equally over all other axes share redistributions, so
        each group of equally sharded consumers has its own tables.

        Args:
            sizes: number of choices of each variable; new variables are appended.
        """
        produced = self._produced_layouts(edge, sizes, factors)
        groups: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for consumer, input_index in edge.consumers:
            groups.setdefault(self._dims_on_other_axes(consumer, input_index), []).append(
                (consumer, input_index)
            )
        if edge.returned:
            # The model returns the value replicated, like a consumer that no axis cuts.
            groups.setdefault((REPLICATED,) * len(self.model.mesh.device_matrix), [])
        for other_dims, consumers in groups.items():
            # The bytes of the smaller of the two shards that the other axes leave, at the producer
            # or the consumers: there the redistribution over this axis is cheaper.
            num_shards = max(produced.num_shards, self._num_shards_on_other_axes(other_dims))
            num_bytes = edge.value.numel // num_shards * edge.value.itemsize
            table_arguments = (
                len(edge.value.shape),
                num_bytes,
                edge.differentiable,
                edge.is_shared_parameter,
            )
            costs = self._costs_by_produced_layout(table_arguments, produced.layouts, edge.count)
            # No table: the edge costs nothing, and need not connect its operators in the
            # elimination.
            if costs is None:
                continue
            reads: dict[int, ReadLayouts] = {}
            for consumer, input_index in consumers:
                layouts = self._read_layouts(edge, consumer, input_index)
                # An operator that reads the value twice has one variable, and reads both layouts.
                reads[consumer] = (
                    union_of_reads(reads[consumer], layouts) if consumer in reads else layouts
                )
            is_replicated = edge.returned and all(dim == REPLICATED for dim in other_dims)
            returned = frozenset({REPLICATED} if is_replicated else ())
            self._add_consumer_tables(costs, produced.variable, reads, returned, sizes, factors)

    def _produced_layouts(
        self, edge: TensorEdge, sizes: list[int], factors: list[Factor]
    ) -> _ProducedLayouts:
        matrix = self.model.mesh.device_matrix
        if edge.is_shared_parameter:
            return self._add_storage_variable(edge, sizes, factors)
        if edge.fixed_axes is not None:
            dim_of_axis = {axis: dim for dim, axes in enumerate(edge.fixed_axes) for axis in axes}
            num_shards = prod(matrix[a] for a in dim_of_axis if a != self.axis)
            return _ProducedLayouts(num_shards, None, (dim_of_axis.get(self.axis, REPLICATED),))
        assert edge.producer is not None
        index, output_index = edge.producer
        variable = self.problem.variables[index]
        op_type = variable.op_type
        num_shards = prod(
            matrix[axis]
            for axis, choice in enumerate(self.choices[index])
            if axis != self.axis and op_type.output_dims[choice][output_index] != NO_CUT
        )
        complete = variable.rule.complete if variable.rule is not None else frozenset()
        layouts = []
        for choice in self.options[index]:
            dim = op_type.output_dims[choice][output_index]
            if dim == NO_CUT and choice != NO_CUT:
                # Cutting a factor that an output lacks leaves partial sums, unless the rule says
                # that the operator completes them itself.
                dim = REPLICATED if op_type.factors[choice] in complete else PARTIAL
            layouts.append(dim)
        return _ProducedLayouts(num_shards, index, tuple(layouts))

    def _add_storage_variable(
        self, edge: TensorEdge, sizes: list[int], factors: list[Factor]
    ) -> _ProducedLayouts:
        """Add a variable for the storage layout of a parameter that several operators read.

        The choices of the variable are the dims along which consumers may read the parameter
        sharded, and last no sharding.
        """
        dims = sorted(
            {
                self.problem.variables[consumer].op_type.input_dims[choice][input_index]
                for consumer, input_index in edge.consumers
                for choice in self.options[consumer]
            }
            - {NO_CUT}
        )
        num_shards = max(
            self._num_shards_on_other_axes(self._dims_on_other_axes(consumer, input_index))
            for consumer, input_index in edge.consumers
        )
        parameter_bytes = edge.value.numel * edge.value.stored_dtype.itemsize / num_shards

        def cost_of(shards_on_axis: int) -> float:
            shard_bytes = parameter_bytes / shards_on_axis
            cost = self.weights.parameter_bytes * parameter_bytes / shards_on_axis
            if edge.value.requires_grad:
                cost += self.model.parameter_update_seconds(
                    shard_bytes, num_shards * shards_on_axis
                )
            return cost

        # After the variables of all operators: `decide` reads only the choices of the first
        # `len(options)` variables.
        storage_variable = len(sizes)
        sizes.append(len(dims) + 1)
        table = np.array([cost_of(self.size)] * len(dims) + [cost_of(1)])
        factors.append(((storage_variable,), table))
        return _ProducedLayouts(num_shards, storage_variable, (*dims, REPLICATED))

    def _dims_on_other_axes(self, consumer: int, input_index: int) -> tuple[int, ...]:
        """Return for each axis the dim of a consumer's input that the axis shards, or `REPLICATED`;
        always `REPLICATED` for the axis to decide."""
        input_dims = self.problem.variables[consumer].op_type.input_dims
        # This axis has an equal entry for all consumers, so that results can be compared.
        return tuple(
            REPLICATED if axis == self.axis else input_dims[choice][input_index]
            for axis, choice in enumerate(self.choices[consumer])
        )

    def _num_shards_on_other_axes(self, other_dims: tuple[int, ...]) -> int:
        """Return the number of shards of a value over all axes but the axis to decide.

        Args:
            other_dims: for each axis the dim that it shards, as from `_dims_on_other_axes`.
        """
        matrix = self.model.mesh.device_matrix
        return prod(matrix[axis] for axis, dim in enumerate(other_dims) if dim >= 0)

    def _read_layouts(self, edge: TensorEdge, consumer: int, input_index: int) -> ReadLayouts:
        op_type, options = self.problem.variables[consumer].op_type, self.options[consumer]
        key = (id(op_type), options, input_index, edge.differentiable)
        if key not in self._cached_reads:
            layouts = []
            for choice in options:
                dim = op_type.input_dims[choice][input_index]
                # Without a gradient, reading the full value as `PARTIAL` is the same as
                # `REPLICATED`.
                is_partial = dim == NO_CUT and choice != NO_CUT and edge.differentiable
                layouts.append(frozenset((PARTIAL if is_partial else dim,)))
            self._cached_reads[key] = tuple(layouts)
        return self._cached_reads[key]

    def _costs_by_produced_layout(
        self,
        table_arguments: tuple[int, int, bool, bool],
        layouts: tuple[AxisLayout, ...],
        count: int,
    ) -> Table | None:
        """Return the rows of `_redistribution_table(*table_arguments)` for `layouts`, times
        `count`; None if all costs are 0.

        Args:
            layouts: layout for each choice of the producer; several choices may give one layout.
            count: number of equal edges.
        """
        key = (self._key, "rows", table_arguments, layouts, count)
        if key not in self._tables:
            rows = [table_index(layout) for layout in layouts]
            costs = count * self._redistribution_table(*table_arguments)[rows]
            # Empty for None.
            self._tables[key] = costs if costs.any() else np.empty(0)
        table = self._tables[key]
        return table if table.size else None

    def _redistribution_table(
        self, ndim: int, num_bytes: int, differentiable: bool, is_parameter: bool
    ) -> Table:
        """Return the seconds, weighted by `self.weights`, of redistributing a value of `num_bytes`
        per device.

        Rows and columns are as in `redistribution_table`. Parameters are redistributed once
        per step, in buckets that share latency.
        """
        key = (self._key, "redistributions", ndim, num_bytes, differentiable, is_parameter)
        if key not in self._tables:

            def seconds(collective: str) -> float:
                if is_parameter:
                    return self.model.bucketed_seconds((self.axis,), num_bytes, collective)
                return self.model.links.seconds(collective, (self.axis,), num_bytes)

            weight = self.weights.gradients if is_parameter else self.weights.redistributions
            self._tables[key] = weight * redistribution_table(ndim, differentiable, seconds)
        return self._tables[key]

    def _add_consumer_tables(
        self,
        costs: Table,
        producer: int | None,
        reads: dict[int, ReadLayouts],
        returned: frozenset[AxisLayout],
        sizes: list[int],
        factors: list[Factor],
    ) -> None:
        """Add the cost tables of a value whose consumers may share redistributions to `factors`.

        Args:
            costs: seconds, weighted by `self.weights`, from the layout of each choice of the
                producer (row) to each layout (column), as in `redistribution_table`.
            producer: the variable that decides the row; None if there is one row.
            reads: for each consumer (a variable) the layouts that it reads at each of its choices.
            returned: the layouts in which the model returns the value; empty if it is not returned.
        """
        columns = costs.shape[1]
        # A single reader shares with nobody, and needs no variable for a set.
        if len(reads) + bool(returned) < 2:
            consumer = next(iter(reads), None)
            layouts = reads[consumer] if consumer is not None else (returned,)
            factors.append(
                factor_between(producer, consumer, costs @ column_sums(layouts, columns))
            )
            return
        # Sorted, so that the cache finds equal consumers in any order; sets have no total order.
        all_sets, consumer_tables = layout_sets(tuple(sorted(reads.values(), key=repr)), returned)
        # Without a variable for the set, a table over the producer and all consumers would be
        # needed, which grows exponentially with the consumers.
        set_variable = len(sizes)
        sizes.append(len(all_sets))
        factors.append(
            factor_between(producer, set_variable, costs @ column_sums(all_sets, columns))
        )
        for consumer, layouts in reads.items():
            factors.append(factor_between(consumer, set_variable, consumer_tables[layouts]))


class _ProducedLayouts(NamedTuple):
    """The layouts on one axis in which a value may be computed, stored or passed in.

    Args:
        num_shards: number of shards over the other axes.
        variable: index of the variable that decides the layout; None if the layout is fixed.
        layouts: the layout on the axis for each choice of the variable.
    """

    num_shards: int
    variable: int | None
    layouts: tuple[AxisLayout, ...]
