"""Cost tables of the relaxed problem whose minimum bounds every plan from below.

A choice of a variable is not a cut but its *counts*: how many axes of each group cut each factor.
Tables of single variables hold costs of operators, tables of edges lower bounds of redistributions
(`axis_counts`). `bound` bounds their least sum.
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
"""The largest number of different counts of one operator."""

MAX_TABLE_ENTRIES = 1 << 22
"""Entries of the largest table: 16 MB in single precision."""

EQUAL_COST_TOLERANCE = 1e-6
"""Relative difference below which the redistributions of two readers count as equally expensive."""


class TooManyCutsError(Exception):
    """An operator has more cuts, or an edge more layouts, than a table may have."""


class TableEnd:
    """The variable at one end of an edge table.

    Args:
        layout_of: for each of its counts the row or column: the layout of the value.
    """

    def __init__(self, layout_of: npt.NDArray[np.intp]) -> None:
        self.layout_of = layout_of
        self._order = np.argsort(layout_of, kind="stable")
        self.first_of_layout = np.flatnonzero(np.diff(layout_of[self._order], prepend=-1))

    def least(self, costs: Array) -> Array:
        """Return for each layout the least of the costs of all counts with that layout."""
        least: Array = np.minimum.reduceat(costs[self._order], self.first_of_layout)
        return least


@dataclass(frozen=True, eq=False)
class EdgeTable:
    """Lower bounds of the redistribution between the source of a value and one reader.

    Args:
        reader: the variable that reads it, and the input index.
        variables: the variables of the rows (source) and of the columns (reader).
        bounds: seconds between layouts.
        scale: the weight of `bounds`: that of the reader times the number of equal values.
    """

    edge: TensorEdge
    reader: tuple[int, int]
    variables: tuple[int, int]
    table_ends: tuple[TableEnd, TableEnd]
    bounds: LayoutTable
    scale: float


class CountTables:
    """The tables of a problem.

    Args:
        model: on a device matrix of prime axes.
        weights: of the linear objective.
        plan: known cuts. Readers of one value share redistributions, so that only a weighted mean
            of their costs is a lower bound; those with the largest cost in this plan are weighted.
        on_share: called with the share of the variables and edges that have tables.

    Attributes:
        op_costs: for each variable the costs of all its counts, times the operators that it stands
            for.
        edge_tables: tables of two variables.
        constant: cost of edges between fixed layouts.

    Raises:
        TooManyCutsError: if there are more cuts or layouts than tables may have.
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
            self._counts_of_cuts(variable, plan.get(variable.op.name, {}))
            for variable in problem.variables
        ]
        variables = track(problem.variables, subrange(on_share, 0, 2))
        self.op_costs = [
            variable.count * self._op_costs(variable, cut_counts)
            for variable, cut_counts in zip(variables, self._cut_counts, strict=True)
        ]
        for edge in track(problem.edges, subrange(on_share, 1, 2)):
            if edge.is_shared_parameter:
                self._add_shared_parameter(edge)
            else:
                self._add_edge(edge)

    def _enumerate_cut_counts(self, variable: OpVariable) -> Counts:
        if variable.pinned is not None:
            return self._counts_of_cuts(variable, variable.pinned)
        cut_counts = enumerate_cut_counts(
            self.axis_groups, variable.op_type.limits, MAX_CUTS_PER_OPERATOR
        )
        if cut_counts is None:
            raise TooManyCutsError
        # Of two factors that cut the same dims at most one may be cut.
        for pair in variable.op_type.joined:
            is_cut = np.stack([cut_counts[:, factor].any(axis=1) for factor in pair])
            cut_counts = cut_counts[~is_cut.all(axis=0)]
        return cut_counts

    def _counts_of_cuts(self, variable: OpVariable, cuts: Cuts) -> Counts:
        return self._count_axes([cuts.get(factor, ()) for factor in variable.op_type.factors])

    def _count_axes(self, axes: Sequence[Sequence[int]]) -> Counts:
        """Counts with one entry: the number of axes of each group in each element of `axes`."""
        counts = [[len(set(group.axes) & set(each)) for group in self.axis_groups] for each in axes]
        return np.array(counts, dtype=np.int64).reshape(1, len(axes), len(self.axis_groups))

    # Costs of single operators.

    def _op_costs(self, variable: OpVariable, cut_counts: Counts) -> Array:
        parameters = tuple(
            variable.op.inputs[input_index] for input_index in variable.own_parameters
        )
        parameter_keys = tuple((v.itemsize, v.stored_dtype, v.requires_grad) for v in parameters)
        ids = id(variable.work), id(variable.op_type), variable.differentiable
        key = (
            "alone",
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
        distinct_counts, row_of = _distinct(num_shards_of(self.axis_groups, cut_counts))
        shard_counts = [
            dict(zip(op_type.factors, map(int, row), strict=True)) for row in distinct_counts
        ]
        seconds = np.array([self.model.work(variable.work, each) for each in shard_counts])
        costs: Array = (seconds @ [weights.forward, weights.backward])[row_of]
        if rule is None or rule.reductions is no_reductions:
            return costs
        for number, (counts, row) in enumerate(zip(cut_counts, row_of, strict=True)):
            for reduction in rule.reductions(variable.op, shard_counts[row]):
                factors = [
                    op_type.factors.index(f) for f in reduction.factors if f in op_type.factors
                ]
                axes = pick_axes(self.axis_groups, counts[factors].sum(0))
                inside = self.model.inner_collective(
                    reduction, axes, variable.differentiable, tuple(seconds[row])
                )
                costs[number] += weights.redistributions * sum(inside)
        return costs

    def _parameter_costs(self, variable: OpVariable, input_index: int, cut_counts: Counts) -> Array:
        """Costs of a parameter that only this operator reads, stored as it is read."""
        value, weights = variable.op.inputs[input_index], self.weights
        layouts = self._layouts(variable, 0, input_index, cut_counts)
        shards, partial_counts = layouts[:, :-1].sum(1), layouts[:, -1]
        uses = np.stack(
            [shards, partial_counts if variable.differentiable else 0 * partial_counts], axis=1
        )
        distinct_uses, row_of = _distinct(uses)
        costs = []
        for shard_axes, partial_axes in distinct_uses:
            num_shards = int(num_shards_of(self.axis_groups, shard_axes))
            cost = self._parameter_byte_cost(value, num_shards)
            if value.requires_grad:
                reduce_axes = pick_axes(self.axis_groups, partial_axes, shard_axes)
                other_axes = (
                    [len(group.axes) for group in self.axis_groups] - shard_axes - partial_axes
                )
                gather_axes = pick_axes(self.axis_groups, other_axes, shard_axes + partial_axes)
                seconds = self.model.parameter(
                    reduce_axes, gather_axes, value.numel * value.itemsize / num_shards
                )
                cost += weights.gradients * sum(seconds)
            costs.append(cost)
        all_costs: Array = np.array(costs)[row_of]
        return all_costs

    def _parameter_byte_cost(self, value: Value, num_shards: int) -> float:
        parameter_bytes = value.numel * value.stored_dtype.itemsize / num_shards
        update = (
            self.model.parameter_update(parameter_bytes, num_shards) if value.requires_grad else 0.0
        )
        return self.weights.parameter_bytes * parameter_bytes + update

    # Redistributions between operators.

    def _layouts(
        self, variable: OpVariable, side: int, tensor_index: int, cut_counts: Counts
    ) -> Counts:
        """The layouts of a tensor for all counts of its operator, (counts, dim, axis group).

        One more dim, the last, has the axes over which an output is partial, or the gradient of an
        input.
        """
        op_type, rule = variable.op_type, variable.rule
        value = (variable.op.inputs, variable.op.outputs)[side][tensor_index]
        dims = (op_type.input_dims, op_type.output_dims)[side]
        complete = rule.complete if rule is not None and side == 1 else frozenset[str]()
        layouts = np.zeros(
            (len(cut_counts), len(value.shape) + 1, len(self.axis_groups)), dtype=np.int64
        )
        for number, factor in enumerate(op_type.factors):
            dim = dims[number][tensor_index]
            if dim != NO_CUT or factor not in complete:
                layouts[:, dim] += cut_counts[:, number]  # `NO_CUT` is -1, the last dim.
        return layouts

    def _source_layouts(self, edge: TensorEdge, cut_counts: Sequence[Counts]) -> Counts:
        """The layouts of a value for all counts of its source."""
        if edge.source_variable is None:
            axes = edge.fixed_axes or ((),) * len(edge.value.shape)
            return self._count_axes((*axes, ()))
        assert edge.source is not None
        number, output_index = edge.source
        return self._layouts(self.problem.variables[number], 1, output_index, cut_counts[number])

    def _reader_layouts(self, edge: TensorEdge, cut_counts: Sequence[Counts]) -> Iterator[Counts]:
        """The layouts of a value for all counts of each reader, and those in which it returns."""
        for number, input_index in edge.readers:
            yield self._layouts(self.problem.variables[number], 0, input_index, cut_counts[number])
        if edge.returned:
            yield self._count_axes([()] * (len(edge.value.shape) + 1))

    def _add_edge(self, edge: TensorEdge) -> None:
        sources, source_of = _distinct(self._source_layouts(edge, self._cut_counts))
        plan_source = self._source_layouts(edge, self._plan_counts)
        plan_costs = [
            float(self._lower_bounds(edge, plan_source, reads)[0, 0])
            for reads in self._reader_layouts(edge, self._plan_counts)
        ]
        for number, (cut_counts, reader_weight) in enumerate(
            zip(
                self._reader_layouts(edge, self._cut_counts),
                _reader_weights(plan_costs),
                strict=True,
            )
        ):
            reads, read_of = _distinct(cut_counts)
            scale = reader_weight * edge.count * self.weights.redistributions
            table = self._lower_bounds(edge, sources, reads)
            if not scale or not table.any():
                continue
            reader = edge.readers[number] if number < len(edge.readers) else None
            if edge.source_variable is not None and reader is not None:
                table_ends = TableEnd(source_of), TableEnd(read_of)
                variables = edge.source_variable, reader[0]
                self.edge_tables.append(
                    EdgeTable(edge, reader, variables, table_ends, table, scale)
                )
            elif reader is not None:
                self.op_costs[reader[0]] = self.op_costs[reader[0]] + scale * table[0][read_of]
            elif edge.source_variable is not None:
                self.op_costs[edge.source_variable] = (
                    self.op_costs[edge.source_variable] + scale * table[:, 0][source_of]
                )
            else:
                self.constant += scale * float(table[0, 0])

    def _add_shared_parameter(self, edge: TensorEdge) -> None:
        """Distribute the cost of a parameter that several operators read over these.

        It is stored in one of the layouts in which it is read, or replicated. Each reader is
        charged its share of the least cost over all of them, which is no more than the true cost.
        """
        reads = [
            _distinct(cut_counts) for cut_counts in self._reader_layouts(edge, self._cut_counts)
        ]
        all_layouts = np.concatenate([layouts for layouts, _ in reads])
        all_layouts[:, -1] = 0
        storage_layouts, _ = _distinct(np.concatenate([all_layouts, 0 * all_layouts[:1]]))
        num_shards = num_shards_of(self.axis_groups, storage_layouts[:, :-1].sum(1))
        # A parameter may be stored as one of its readers reads it or replicated; other layouts
        # would only add redistributions.
        storage_costs = np.array(
            [self._parameter_byte_cost(edge.value, int(number)) for number in num_shards]
        )
        plan_reads = list(self._reader_layouts(edge, self._plan_counts))
        plan_costs = [
            float(self._lower_bounds(edge, storage_layouts, read).min()) for read in plan_reads
        ]
        for (number, _), (read, row_of), reader_weight in zip(
            edge.readers, reads, _reader_weights(plan_costs), strict=True
        ):
            weight = self.weights.gradients * self.model.parameter_weight
            seconds = weight * self._lower_bounds(edge, storage_layouts, read)
            least = (storage_costs[:, None] + seconds).min(axis=0)
            self.op_costs[number] = (
                self.op_costs[number] + edge.count * reader_weight * least[row_of]
            )

    def _lower_bounds(self, edge: TensorEdge, sources: Counts, reads: Counts) -> LayoutTable:
        if len(sources) * len(reads) > MAX_TABLE_ENTRIES:
            raise TooManyCutsError
        num_bytes = edge.value.numel * edge.value.itemsize
        return self._bound.between(sources, reads, num_bytes, edge.differentiable)


def _distinct(rows: Counts) -> tuple[Counts, npt.NDArray[np.intp]]:
    """Distinct entries along the first dimension, and the index of each entry's own.

    As `np.unique(rows, axis=0)`, but without its sort of whole rows; entries are small integers.
    """
    flat = rows.reshape(len(rows), -1)
    codes = np.zeros(len(rows), dtype=np.int64)
    for column in flat.T:  # Renumbered each time, so that the products do not overflow.
        values, column_code = np.unique(column, return_inverse=True)
        codes = np.unique(codes * len(values) + column_code, return_inverse=True)[1]
    _, first, row_of = np.unique(codes, return_index=True, return_inverse=True)
    return rows[first], row_of.reshape(-1)


def _reader_weights(costs: Sequence[float]) -> list[float]:
    """The weight of each reader: equal for all with the largest cost, else 0; the sum is 1."""
    highest = max(costs, default=0.0)
    is_highest = [each >= highest * (1 - EQUAL_COST_TOLERANCE) for each in costs]
    return [float(each) / sum(is_highest) for each in is_highest]
