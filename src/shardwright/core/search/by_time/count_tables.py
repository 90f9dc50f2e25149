"""Tables of what operators cost, and of what lies between them at least, by numbers of axes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from shardwright.core.cost.step_time import TimeModel
from shardwright.core.graph.graph import Value
from shardwright.core.rules.rule import Cuts, no_reductions
from shardwright.core.search.by_time.axis_counts import (
    Counts,
    LayoutTable,
    LeastSeconds,
    group_axes,
    parts_of,
    some_axes,
    ways_to_cut,
)
from shardwright.core.search.by_time.axis_tables import Weights
from shardwright.core.search.by_time.problem import OpVariable, SearchProblem, TensorEdge
from shardwright.core.search.indexed_graph import NO_CUT
from shardwright.progress import OnShare, ignore_share, subrange, track

Array = npt.NDArray[np.float64]

MOST_WAYS = 20_000
"""To cut one operator."""

MOST_ENTRIES = 1 << 22
"""Of one table."""

NEAR = 1e-6
"""Relative; readers whose redistributions differ by less pay equally."""


class TooManyWaysError(Exception):
    """Operators can be cut in more ways than tables have room for."""


class Side:
    """One end of a table.

    Args:
        of: for each way to cut the operator there the number of the layout of the value.
    """

    def __init__(self, of: npt.NDArray[np.intp]) -> None:
        self.of = of
        self._order = np.argsort(of, kind="stable")
        self.first = np.flatnonzero(np.diff(of[self._order], prepend=-1))

    def least(self, costs: Array) -> Array:
        """For each layout the least cost of the ways that have it."""
        least: Array = np.minimum.reduceat(costs[self._order], self.first)
        return least


@dataclass(frozen=True, eq=False)
class Pair:
    """What lies at least between the maker of a value and one of its readers.

    Args:
        reader: the variable and the place there.
        ends: the variables of the rows and the columns.
        table: seconds between layouts, of which `scale` times as much counts for all such values.
    """

    edge: TensorEdge
    reader: tuple[int, int]
    ends: tuple[int, int]
    sides: tuple[Side, Side]
    table: LayoutTable
    scale: float


class CountTables:
    """The tables of a problem.

    Args:
        model: on a device matrix of prime axes.
        weights: what counts how much.
        plan: known cuts of operators; readers of a value that pay most there have its weight.
        on_share: of the operators and values with tables.

    Attributes:
        own: for each variable what its ways to be cut cost by themselves, all that it stands for.
        pairs: tables of two variables.
        constant: what every plan costs.

    Raises:
        TooManyWaysError: if there are more ways or layouts than tables have room for.
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
        self._least = LeastSeconds(model.links, self.axis_groups)
        self._cache: dict[object, Array] = {}
        self.constant = 0.0
        self.pairs: list[Pair] = []
        self._ways = [self._ways_of(variable) for variable in problem.variables]
        self._planned = [
            self._counted(variable, plan.get(variable.op.name, {}))
            for variable in problem.variables
        ]
        alone = track(problem.variables, subrange(on_share, 0, 2))
        self.op_costs = [
            variable.count * self._alone(variable, ways)
            for variable, ways in zip(alone, self._ways, strict=True)
        ]
        for edge in track(problem.edges, subrange(on_share, 1, 2)):
            if edge.is_shared_parameter:
                self._stored(edge)
            else:
                self._passed(edge)

    def _ways_of(self, variable: OpVariable) -> Counts:
        if variable.pinned is not None:
            return self._counted(variable, variable.pinned)
        ways = ways_to_cut(self.axis_groups, variable.op_type.limits, MOST_WAYS)
        if ways is None:
            raise TooManyWaysError
        # Of two factors that cut the same dimensions one is whole.
        for pair in variable.op_type.joined:
            cut = np.stack([ways[:, factor].any(axis=1) for factor in pair])
            ways = ways[~cut.all(axis=0)]
        return ways

    def _counted(self, variable: OpVariable, cuts: Cuts) -> Counts:
        return self._numbers([cuts.get(factor, ()) for factor in variable.op_type.factors])

    def _numbers(self, axes: Sequence[Sequence[int]]) -> Counts:
        """One way: for each entry of `axes` how many of each kind it has."""
        counts = [[len(set(group.axes) & set(each)) for group in self.axis_groups] for each in axes]
        return np.array(counts, dtype=np.int64).reshape(1, len(axes), len(self.axis_groups))

    # What an operator costs by itself.

    def _alone(self, variable: OpVariable, ways: Counts) -> Array:
        own = tuple(variable.op.inputs[place] for place in variable.own_parameters)
        stored = tuple((v.itemsize, v.stored_dtype, v.requires_grad) for v in own)
        ids = id(variable.work), id(variable.op_type), variable.differentiable
        key = ("alone", *ids, variable.own_parameters, stored, len(ways), ways.tobytes())
        if key not in self._cache:
            cost = self._computes(variable, ways)
            for place in variable.own_parameters:
                cost = cost + self._parameter(variable, place, ways)
            self._cache[key] = cost
        return self._cache[key]

    def _computes(self, variable: OpVariable, ways: Counts) -> Array:
        op_type, rule, weights = variable.op_type, variable.rule, self.weights
        rows, of = _distinct(parts_of(self.axis_groups, ways))
        named = [dict(zip(op_type.factors, map(int, row), strict=True)) for row in rows]
        seconds = np.array([self.model.work(variable.work, parts) for parts in named])
        cost: Array = (seconds @ [weights.forward, weights.backward])[of]
        if rule is None or rule.reductions is no_reductions:
            return cost
        for number, (way, row) in enumerate(zip(ways, of, strict=True)):
            for reduction in rule.reductions(variable.op, named[row]):
                cut = [op_type.factors.index(f) for f in reduction.factors if f in op_type.factors]
                axes = some_axes(self.axis_groups, way[cut].sum(0))
                inside = self.model.inside(
                    reduction, axes, variable.differentiable, tuple(seconds[row])
                )
                cost[number] += weights.redistributions * sum(inside)
        return cost

    def _parameter(self, variable: OpVariable, place: int, ways: Counts) -> Array:
        """A parameter that only this operator reads is stored as it is read."""
        value, weights = variable.op.inputs[place], self.weights
        layouts = self._layouts(variable, 0, place, ways)
        shards, terms = layouts[:, :-1].sum(1), layouts[:, -1]
        uses = np.stack([shards, terms if variable.differentiable else 0 * terms], axis=1)
        rows, of = _distinct(uses)
        costs = []
        for cut, varying in rows:
            parts = int(parts_of(self.axis_groups, cut))
            cost = self._parameter_byte_cost(value, parts)
            if value.requires_grad:
                over = some_axes(self.axis_groups, varying, cut)
                rest = [len(group.axes) for group in self.axis_groups] - cut - varying
                whole = some_axes(self.axis_groups, rest, cut + varying)
                sent = self.model.parameter(over, whole, value.numel * value.itemsize / parts)
                cost += weights.gradients * sum(sent)
            costs.append(cost)
        every: Array = np.array(costs)[of]
        return every

    def _parameter_byte_cost(self, value: Value, parts: int) -> float:
        parameter_bytes = value.numel * value.stored_dtype.itemsize / parts
        update = self.model.update_of(parameter_bytes, parts) if value.requires_grad else 0.0
        return self.weights.parameter_bytes * parameter_bytes + update

    # What lies between operators.

    def _layouts(self, variable: OpVariable, side: int, place: int, ways: Counts) -> Counts:
        """Of a tensor for each way to cut its operator: (way, dimension, kind), and last the axes
        over which it is terms of a sum, or is read so that its gradient is."""
        op_type, rule = variable.op_type, variable.rule
        value = (variable.op.inputs, variable.op.outputs)[side][place]
        dims = (op_type.input_dims, op_type.output_dims)[side]
        complete = rule.complete if rule is not None and side == 1 else frozenset[str]()
        layouts = np.zeros((len(ways), len(value.shape) + 1, len(self.axis_groups)), dtype=np.int64)
        for number, factor in enumerate(op_type.factors):
            dim = dims[number][place]
            if dim != NO_CUT or factor not in complete:
                layouts[:, dim] += ways[:, number]  # `NO_CUT` is the last.
        return layouts

    def _made(self, edge: TensorEdge, ways: Sequence[Counts]) -> Counts:
        """How the value is left, for each way of its maker."""
        if edge.source_variable is None:
            axes = edge.fixed_axes or ((),) * len(edge.value.shape)
            return self._numbers((*axes, ()))
        assert edge.source is not None
        number, place = edge.source
        return self._layouts(self.problem.variables[number], 1, place, ways[number])

    def _read(self, edge: TensorEdge, ways: Sequence[Counts]) -> Iterator[Counts]:
        """How it is read by each reader, and as it is returned."""
        for number, place in edge.readers:
            yield self._layouts(self.problem.variables[number], 0, place, ways[number])
        if edge.returned:
            yield self._numbers([()] * (len(edge.value.shape) + 1))

    def _passed(self, edge: TensorEdge) -> None:
        left, here = _distinct(self._made(edge, self._ways))
        planned = self._made(edge, self._planned)
        paid = [
            float(self._between(edge, planned, read)[0, 0])
            for read in self._read(edge, self._planned)
        ]
        for at, (ways, share) in enumerate(
            zip(self._read(edge, self._ways), _shares(paid), strict=True)
        ):
            read, there = _distinct(ways)
            scale = share * edge.count * self.weights.redistributions
            table = self._between(edge, left, read)
            if not scale or not table.any():
                continue
            reader = edge.readers[at] if at < len(edge.readers) else None
            if edge.source_variable is not None and reader is not None:
                sides = Side(here), Side(there)
                ends = edge.source_variable, reader[0]
                self.pairs.append(Pair(edge, reader, ends, sides, table, scale))
            elif reader is not None:
                self.op_costs[reader[0]] = self.op_costs[reader[0]] + scale * table[0][there]
            elif edge.source_variable is not None:
                self.op_costs[edge.source_variable] = (
                    self.op_costs[edge.source_variable] + scale * table[:, 0][here]
                )
            else:
                self.constant += scale * float(table[0, 0])

    def _stored(self, edge: TensorEdge) -> None:
        """A parameter that several operators read is stored in the layout of one of them."""
        reads = [_distinct(ways) for ways in self._read(edge, self._ways)]
        blocks = np.concatenate([layouts for layouts, _ in reads])
        blocks[:, -1] = 0
        stored, _ = _distinct(np.concatenate([blocks, 0 * blocks[:1]]))
        parts = parts_of(self.axis_groups, stored[:, :-1].sum(1))
        parameter_bytes = np.array(
            [self._parameter_byte_cost(edge.value, int(number)) for number in parts]
        )
        planned = list(self._read(edge, self._planned))
        paid = [float(self._between(edge, stored, read).min()) for read in planned]
        for (number, _), (read, of), share in zip(edge.readers, reads, _shares(paid), strict=True):
            weight = self.weights.gradients * self.model.parameter_weight
            sent = weight * self._between(edge, stored, read)
            least = (parameter_bytes[:, None] + sent).min(axis=0)
            self.op_costs[number] = self.op_costs[number] + edge.count * share * least[of]

    def _between(self, edge: TensorEdge, left: Counts, read: Counts) -> LayoutTable:
        if len(left) * len(read) > MOST_ENTRIES:
            raise TooManyWaysError
        num_bytes = edge.value.numel * edge.value.itemsize
        return self._least.between(left, read, num_bytes, edge.differentiable)


def _distinct(rows: Counts) -> tuple[Counts, npt.NDArray[np.intp]]:
    """The rows of small numbers that differ, and for each of all the number of its own."""
    flat = rows.reshape(len(rows), -1)
    codes = np.zeros(len(rows), dtype=np.int64)
    for column in flat.T:  # Numbered anew each time, so that they stay small.
        values, of_column = np.unique(column, return_inverse=True)
        codes = np.unique(codes * len(values) + of_column, return_inverse=True)[1]
    _, first, of = np.unique(codes, return_index=True, return_inverse=True)
    return rows[first], of.reshape(-1)


def _shares(paid: Sequence[float]) -> list[float]:
    """The weight of each reader: equal ones for those that pay most."""
    most = max(paid, default=0.0)
    pays = [each >= most * (1 - NEAR) for each in paid]
    return [float(each) / sum(pays) for each in pays]
