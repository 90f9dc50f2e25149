"""Cost tables of a relaxed problem, whose least sum is a lower bound on the objective of all plans.

The choices of a variable are not the cuts of an operator but *cut counts*: the numbers of axes of
each group that cut each factor. Tables of single variables contain costs of operators; tables of
edges contain lower bounds on the seconds of redistributions (`axis_counts`). `bound` computes a
lower bound on their least sum.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwright.core.cost.time_model import TimeModel
from shardwright.core.graph.graph import Value
from shardwright.core.rules.rule import Cuts, no_reductions
from shardwright.core.search.by_time.axis_counts import (
    CountedRedistributionBound,
    Counts,
    LayoutTable,
    enumerate_cut_counts,
    group_axes,
    num_shards_of,
    pick_axes,
)
from shardwright.core.search.by_time.axis_tables import Weights
from shardwright.core.search.by_time.problem import OpVariable, SearchProblem, TensorEdge
from shardwright.core.search.indexed_graph import NO_CUT
from shardwright.progress import OnShare, ignore_share, subrange, track

Array = npt.NDArray[np.float64]

MAX_CUTS_PER_OPERATOR = 20_000
"""Maximum number of ways to distribute mesh axes over the factors of one operator; above it,
`TooManyCutsError` is raised."""

MAX_TABLE_ENTRIES = 1 << 22
"""Maximum number of entries of an edge table: 16 MB in single precision."""

EQUAL_COST_TOLERANCE = 1e-6
"""Relative tolerance within which the redistribution costs of two consumers count as equal."""


class TooManyCutsError(Exception):
    """Raised for an operator above `MAX_CUTS_PER_OPERATOR` or a table above `MAX_TABLE_ENTRIES`."""


class TableEnd:
    """Layouts of a value at one end of a cost table: its producer or its consumer.

    Args:
        layout_of: for each choice of the operator at this end, the layout of the value, as an index
            of the rows or columns of the table.

    Attributes:
        first_of_layout: for each layout the position of its first choice, with choices sorted by
            layout.
    """

    def __init__(self, layout_of: npt.NDArray[np.intp]) -> None:
        self.layout_of = layout_of
        self._order = np.argsort(layout_of, kind="stable")
        # Where the sorted layouts change; layouts count from 0, so the first differs from -1.
        self.first_of_layout = np.flatnonzero(np.diff(layout_of[self._order], prepend=-1))

    def least_costs(self, costs: Array) -> Array:
        """Return the minimum of `costs` for each layout, over all choices with that layout.

        Args:
            costs: cost of each choice of the operator at this end.
        """
        least_costs: Array = np.minimum.reduceat(costs[self._order], self.first_of_layout)
        return least_costs


@dataclass(frozen=True, eq=False)
class EdgeTable:
    """Lower bounds on the seconds of redistributions of a value to one of its consumers.

    Args:
        consumer: (variable, input index) of the consumer.
        variables: indices of the producer's (rows) and the consumer's (columns) variable.
        table_ends: the layouts at the producer and at the consumer.
        bounds: seconds from each layout at the producer to each layout at the consumer.
        scale: coefficient of `bounds` in the objective: the consumer's weight, times the weight of
            redistributions, times the number of values that the edge represents.
    """

    edge: TensorEdge
    consumer: tuple[int, int]
    variables: tuple[int, int]
    table_ends: tuple[TableEnd, TableEnd]
    bounds: LayoutTable
    scale: float


class CountTables:
    """Cost tables whose minimum sum is a lower bound on the objective.

    Args:
        model: time model on a device matrix whose axes have prime sizes.
        weights: weights of the linear objective.
        plan: the cuts of a plan, by operator name. They only decide how the cost of a shared
            redistribution is divided between its consumers (`_consumer_weights`).
        on_share: called with the fraction of variables and edges whose tables are built.

    Attributes:
        op_costs: for each variable the cost of each cut count (a number of shards per factor),
            times the number of operators that the variable represents.
        edge_tables: tables of redistributions between two variables.
        constant: cost of edges between fixed layouts.

    Raises:
        TooManyCutsError: if an operator has too many cut counts, or an edge table too many entries.
    """

    def __init__(
        self,
        problem: SearchProblem,
        model: TimeModel,
        weights: Weights,
        plan: Mapping[str, Cuts],
        on_share: OnShare = ignore_share,
    ) -> None:
        self.problem, self.model, self.weights = problem, model, weights
        self.axis_groups = group_axes(model.links)
        self._bound = CountedRedistributionBound(model.links, self.axis_groups)
        self._cache: dict[object, Array] = {}
        self.constant = 0.0
        self.edge_tables: list[EdgeTable] = []
        self._cut_counts = [self._enumerate_cut_counts(variable) for variable in problem.variables]
        self._plan_counts = [
            self._count_axes_of_cuts(variable, plan.get(variable.op.name, {}))
            for variable in problem.variables
        ]
        variables = track(problem.variables, subrange(on_share, 0, 2))
        self.op_costs = [
            variable.count * self._operator_costs(variable, cut_counts)
            for variable, cut_counts in zip(variables, self._cut_counts, strict=True)
        ]
        for edge in track(problem.edges, subrange(on_share, 1, 2)):
            if edge.is_shared_parameter:
                self._add_shared_parameter_cost(edge)
            else:
                self._add_edge_table(edge)

    def _enumerate_cut_counts(self, variable: OpVariable) -> Counts:
        if variable.pinned is not None:
            return self._count_axes_of_cuts(variable, variable.pinned)
        cut_counts = enumerate_cut_counts(
            self.axis_groups, variable.op_type.limits, MAX_CUTS_PER_OPERATOR
        )
        if cut_counts is None:
            raise TooManyCutsError
        # At most one of two factors that cut the same dims may be cut.
        for pair in variable.op_type.joined:
            is_cut = np.stack([cut_counts[:, factor].any(axis=1) for factor in pair])
            cut_counts = cut_counts[~is_cut.all(axis=0)]
        return cut_counts

    def _count_axes_of_cuts(self, variable: OpVariable, cuts: Cuts) -> Counts:
        return self._num_axes_by_group(
            [cuts.get(factor, ()) for factor in variable.op_type.factors]
        )

    def _num_axes_by_group(self, axes_of_dims: Sequence[Sequence[int]]) -> Counts:
        """Return how many axes of each axis group are in each element of `axes_of_dims`, as an
        array of shape (1, dims, axis groups)."""
        counts = [
            [len(set(group.axes) & set(axes)) for group in self.axis_groups]
            for axes in axes_of_dims
        ]
        return np.array(counts, dtype=np.int64).reshape(1, len(axes_of_dims), len(self.axis_groups))

    # Costs of single operators.

    def _operator_costs(self, variable: OpVariable, cut_counts: Counts) -> Array:
        parameters = tuple(
            variable.op.inputs[input_index] for input_index in variable.own_parameters
        )
        parameter_keys = tuple((v.itemsize, v.stored_dtype, v.requires_grad) for v in parameters)
        ids = id(variable.work), id(variable.op_type), variable.differentiable
        # By contents: equal operators of different layers share tables.
        key = (
            "operator",
            *ids,
            variable.own_parameters,
            parameter_keys,
            len(cut_counts),
            cut_counts.tobytes(),
        )
        if key not in self._cache:
            costs = self._computation_costs(variable, cut_counts)
            for input_index in variable.own_parameters:
                costs = costs + self._parameter_costs(variable, input_index, cut_counts)
            self._cache[key] = costs
        return self._cache[key]

    def _computation_costs(self, variable: OpVariable, cut_counts: Counts) -> Array:
        op_type, rule, weights = variable.op_type, variable.rule, self.weights
        # Computation depends on numbers of shards only, which many cut counts have in common.
        distinct_counts, row_of = _distinct_rows(num_shards_of(self.axis_groups, cut_counts))
        shard_counts = [
            dict(zip(op_type.factors, map(int, row), strict=True)) for row in distinct_counts
        ]
        seconds = np.array([self.model.work_seconds(variable.work, each) for each in shard_counts])
        costs: Array = (seconds @ [weights.forward, weights.backward])[row_of]
        if rule is None or rule.reductions is no_reductions:
            return costs
        for count_index, (counts, row) in enumerate(zip(cut_counts, row_of, strict=True)):
            for reduction in rule.reductions(variable.op, shard_counts[row]):
                factors = [
                    op_type.factors.index(f) for f in reduction.factors if f in op_type.factors
                ]
                # Any axes of the groups: the time of a collective depends on sizes and links only.
                axes = pick_axes(self.axis_groups, counts[factors].sum(0))
                collective_seconds = self.model.inner_collective_seconds(
                    reduction, axes, variable.differentiable, tuple(seconds[row])
                )
                costs[count_index] += weights.redistributions * sum(collective_seconds)
        return costs

    def _parameter_costs(self, variable: OpVariable, input_index: int, cut_counts: Counts) -> Array:
        """Return for each row of `cut_counts` the weighted seconds of storing, updating, reducing
        and gathering a parameter that a single operator reads."""
        value, weights = variable.op.inputs[input_index], self.weights
        layouts = self._tensor_layouts(variable, False, input_index, cut_counts)
        shard_counts, partial_counts = layouts[:, :-1].sum(1), layouts[:, -1]
        # No gradient is reduced if the operator has none, whatever axes replicate the parameter.
        uses = np.stack(
            [shard_counts, partial_counts if variable.differentiable else 0 * partial_counts],
            axis=1,
        )
        distinct_uses, row_of = _distinct_rows(uses)
        costs = []
        for shard_axes, partial_axes in distinct_uses:
            num_shards = int(num_shards_of(self.axis_groups, shard_axes))
            # Once for each distinct use: most cut counts shard a parameter in one of a few ways.
            cost = self._parameter_byte_cost(value, num_shards)
            if value.requires_grad:
                # Disjoint axes: the first shard the parameter, the next reduce its gradient, the
                # rest gather it.
                reduce_axes = pick_axes(self.axis_groups, partial_axes, shard_axes)
                other_axes = (
                    [len(group.axes) for group in self.axis_groups] - shard_axes - partial_axes
                )
                gather_axes = pick_axes(self.axis_groups, other_axes, shard_axes + partial_axes)
                seconds = self.model.parameter_seconds(
                    reduce_axes, gather_axes, value.numel * value.itemsize / num_shards
                )
                cost += weights.gradients * sum(seconds)
            costs.append(cost)
        all_costs: Array = np.array(costs)[row_of]
        return all_costs

    def _parameter_byte_cost(self, value: Value, num_shards: int) -> float:
        parameter_bytes = value.numel * value.stored_dtype.itemsize / num_shards
        update = (
            self.model.parameter_update_seconds(parameter_bytes, num_shards)
            if value.requires_grad
            else 0.0
        )
        return self.weights.parameter_bytes * parameter_bytes + update

    # Redistributions between operators.

    def _tensor_layouts(
        self, variable: OpVariable, is_output: bool, tensor_index: int, cut_counts: Counts
    ) -> Counts:
        """Return the layout of an operator's input or output for each possible cut of the operator.

        Args:
            cut_counts: number of axes of each group that cut each factor, one row per possible cut.

        Returns:
            Axis counts of shape (row, dim + 1, axis group). The last dim counts the axes over which
            an output, or the gradient of an input, is partial.
        """
        op_type, rule = variable.op_type, variable.rule
        value = (variable.op.inputs, variable.op.outputs)[is_output][tensor_index]
        dims = (op_type.input_dims, op_type.output_dims)[is_output]
        complete = rule.complete if rule is not None and is_output else frozenset[str]()
        layouts = np.zeros(
            (len(cut_counts), len(value.shape) + 1, len(self.axis_groups)), dtype=np.int64
        )
        for factor_index, factor in enumerate(op_type.factors):
            dim = dims[factor_index][tensor_index]
            if dim != NO_CUT or factor not in complete:
                layouts[:, dim] += cut_counts[:, factor_index]  # `NO_CUT` is -1, the last dim.
        return layouts

    def _producer_layouts(self, edge: TensorEdge, cut_counts: Sequence[Counts]) -> Counts:
        """Return the layout of a value for each possible cut of its producer, as axis counts."""
        if edge.producer_variable is None:
            axes = edge.fixed_axes or ((),) * len(edge.value.shape)
            return self._num_axes_by_group((*axes, ()))
        assert edge.producer is not None
        index, output_index = edge.producer
        return self._tensor_layouts(
            self.problem.variables[index], True, output_index, cut_counts[index]
        )

    def _consumer_layouts(self, edge: TensorEdge, cut_counts: Sequence[Counts]) -> Iterator[Counts]:
        """Yield for each consumer the layout that it reads at each of its possible cuts; last the
        replicated layout, if the model returns the value."""
        for index, input_index in edge.consumers:
            yield self._tensor_layouts(
                self.problem.variables[index], False, input_index, cut_counts[index]
            )
        if edge.returned:
            yield self._num_axes_by_group([()] * (len(edge.value.shape) + 1))

    def _add_edge_table(self, edge: TensorEdge) -> None:
        sources, source_of = _distinct_rows(self._producer_layouts(edge, self._cut_counts))
        # Any weights of the consumers prove a bound; those of the plan's costs prove a high one.
        plan_source = self._producer_layouts(edge, self._plan_counts)
        plan_costs = [
            float(self._redistribution_lower_bounds(edge, plan_source, targets)[0, 0])
            for targets in self._consumer_layouts(edge, self._plan_counts)
        ]
        for consumer_index, (layouts, consumer_weight) in enumerate(
            zip(
                self._consumer_layouts(edge, self._cut_counts),
                _consumer_weights(plan_costs),
                strict=True,
            )
        ):
            targets, target_of = _distinct_rows(layouts)
            scale = consumer_weight * edge.count * self.weights.redistributions
            table = self._redistribution_lower_bounds(edge, sources, targets)
            # Without a table the edge is free, and need not connect its variables.
            if not scale or not table.any():
                continue
            # The layout in which the model returns the value follows those of all consumers.
            is_returned = consumer_index == len(edge.consumers)
            consumer = None if is_returned else edge.consumers[consumer_index]
            # A fixed layout is a single row or column: then the table belongs to the other end.
            if edge.producer_variable is not None and consumer is not None:
                table_ends = TableEnd(source_of), TableEnd(target_of)
                variables = edge.producer_variable, consumer[0]
                self.edge_tables.append(
                    EdgeTable(edge, consumer, variables, table_ends, table, scale)
                )
            elif consumer is not None:
                self.op_costs[consumer[0]] = (
                    self.op_costs[consumer[0]] + scale * table[0][target_of]
                )
            elif edge.producer_variable is not None:
                self.op_costs[edge.producer_variable] = (
                    self.op_costs[edge.producer_variable] + scale * table[:, 0][source_of]
                )
            else:
                self.constant += scale * float(table[0, 0])

    def _add_shared_parameter_cost(self, edge: TensorEdge) -> None:
        """Add the cost of a parameter that several operators read to the costs of these operators.

        The parameter is stored in one of the layouts in which it is read, or replicated. Each
        consumer adds its weight times the least cost over these layouts, so that the sum over
        consumers is at most the true cost.
        """
        layouts_of_consumers = [
            _distinct_rows(layouts) for layouts in self._consumer_layouts(edge, self._cut_counts)
        ]
        all_layouts = np.concatenate([layouts for layouts, _ in layouts_of_consumers])
        # Stored without partial sums; the row of zeros that is appended is replicated storage.
        all_layouts[:, -1] = 0
        storage_layouts, _ = _distinct_rows(np.concatenate([all_layouts, 0 * all_layouts[:1]]))
        num_shards = num_shards_of(self.axis_groups, storage_layouts[:, :-1].sum(1))
        # A parameter may be stored as one of its consumers reads it or replicated; other layouts
        # would only add redistributions.
        storage_costs = np.array(
            [self._parameter_byte_cost(edge.value, int(shards)) for shards in num_shards]
        )
        plan_layouts = list(self._consumer_layouts(edge, self._plan_counts))
        plan_costs = [
            float(self._redistribution_lower_bounds(edge, storage_layouts, layouts).min())
            for layouts in plan_layouts
        ]
        for (variable, _), (layouts, row_of), consumer_weight in zip(
            edge.consumers, layouts_of_consumers, _consumer_weights(plan_costs), strict=True
        ):
            # As in `Objective._edge_cost`, where redistributions of parameters count as gradients.
            weight = self.weights.gradients * self.model.parameter_weight
            seconds = weight * self._redistribution_lower_bounds(edge, storage_layouts, layouts)
            least_costs = (storage_costs[:, None] + seconds).min(axis=0)
            self.op_costs[variable] = (
                self.op_costs[variable] + edge.count * consumer_weight * least_costs[row_of]
            )

    def _redistribution_lower_bounds(
        self, edge: TensorEdge, sources: Counts, targets: Counts
    ) -> LayoutTable:
        if len(sources) * len(targets) > MAX_TABLE_ENTRIES:
            # Before the table is computed, which might not fit into memory.
            raise TooManyCutsError
        num_bytes = edge.value.numel * edge.value.itemsize
        return self._bound.between(sources, targets, num_bytes, edge.differentiable)


def _distinct_rows(rows: Counts) -> tuple[Counts, npt.NDArray[np.intp]]:
    """Return the distinct rows, and for each row of `rows` its index among the distinct rows.

    For small integers this is faster than `np.unique(rows, axis=0)`, which sorts rows as records.
    """
    flat = rows.reshape(len(rows), -1)
    codes = np.zeros(len(rows), dtype=np.int64)
    for column in flat.T:  # Renumbered each time, so that the products do not overflow.
        values, column_code = np.unique(column, return_inverse=True)
        codes = np.unique(codes * len(values) + column_code, return_inverse=True)[1]
    _, first, row_of = np.unique(codes, return_index=True, return_inverse=True)
    return rows[first], row_of.reshape(-1)


def _consumer_weights(costs: Sequence[float]) -> list[float]:
    """Return the weight of each consumer's cost in the lower bound of a shared redistribution.

    The weight is 1/n for the n consumers with the largest cost, 0 for all others. As shared
    redistributions cost at least any weighted mean of the consumers' costs, the bound is valid.

    Args:
        costs: seconds of the redistribution to each consumer.
    """
    # Where nothing is redistributed in the plan, all consumers have equal weight.
    highest = max(costs, default=0.0)
    is_highest = [each >= highest * (1 - EQUAL_COST_TOLERANCE) for each in costs]
    return [float(each) / sum(is_highest) for each in is_highest]
