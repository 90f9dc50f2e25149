"""The variables and edges of the search by time: operators, and the values between them.

Operators of repeated blocks share one `OpVariable`, and values with equal producers and consumers
one `TensorEdge`; `count` is the number of operators or values that each represents. So a deep model
needs the tables of only a few of its blocks.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from shardwright.core.cost.flops import Work, work_of
from shardwright.core.graph.graph import Graph, Op, Origin, Value
from shardwright.core.partition.decisions import NO_OUTPUTS, CutAxes, Outputs
from shardwright.core.rules import rule_of
from shardwright.core.rules.rule import Cuts, ShardingRule, num_rules
from shardwright.core.search.by_time.elimination import Elimination
from shardwright.core.search.indexed_graph import (
    IndexedGraph,
    OpType,
    index_graph,
    replicated_outputs,
)
from shardwright.core.search.recursive.axis_level import AxisLevel


@dataclass(frozen=True, eq=False)
class OpVariable:
    """Decision variable: the cuts of an operator and of equal operators in repeated blocks.

    Args:
        count: number of operators, `op` included, that get the cuts of the variable.
        differentiable: whether gradients pass through the operator.
        pinned: cuts that the user fixed; None if the search decides them.
        own_parameters: indices of the inputs that are parameters without another consumer.
    """

    op: Op
    rule: ShardingRule | None
    op_type: OpType
    work: Work
    count: int
    differentiable: bool
    pinned: Cuts | None
    own_parameters: tuple[int, ...]


class EdgeEnd(NamedTuple):
    """The input or output of an operator at which an edge ends.

    Args:
        variable: index of the operator's variable.
        is_output: whether the edge ends at an output; also an index into (inputs, outputs).
        tensor_index: index among the inputs, or among the outputs, of the operator.
    """

    variable: int
    is_output: bool
    tensor_index: int


@dataclass(frozen=True, eq=False)
class TensorEdge:
    """A value between its producer and all of its consumers.

    Args:
        producer: index of the variable that computes the value, and the output index; None for
            inputs of the model, parameters, buffers and constants.
        fixed_axes: the axes that shard each dim before redistribution, for values without a
            producer and for outputs with a fixed layout; None if the producer's cuts decide.
        consumers: (variable index, input index) of each operator that reads the value.
        returned: whether the value must be replicated because the model returns it or updates a
            buffer with it.
        differentiable: whether a gradient flows back to the producer.
        is_shared_parameter: whether the value is a parameter that several operators read. Its
            storage is decided separately, while the storage of other parameters follows from the
            cuts of their operator.
        count: number of values that the edge represents.
    """

    value: Value
    producer: tuple[int, int] | None
    fixed_axes: CutAxes | None
    consumers: tuple[tuple[int, int], ...]
    returned: bool
    differentiable: bool
    is_shared_parameter: bool
    count: int

    @property
    def producer_variable(self) -> int | None:
        """Index of the variable whose cuts decide the layout before redistribution; None if that
        layout is fixed."""
        return self.producer[0] if self.producer is not None and self.fixed_axes is None else None

    def ends(self) -> list[EdgeEnd]:
        """Return the edge's ends: the inputs of its consumers, then the output of its producer, if
        any."""
        ends = [EdgeEnd(variable, False, input_index) for variable, input_index in self.consumers]
        if self.producer is not None:
            ends.append(EdgeEnd(self.producer[0], True, self.producer[1]))
        return ends


@dataclass(frozen=True, eq=False)
class SearchProblem:
    """Decision variables for the operators of a graph, and the edges between these variables.

    Args:
        variable_of: for each operator of the graph the index of its variable.
        eliminations: cache of elimination orders by table sizes and scopes; shared by all searches
            on the problem, since most axes have equal sizes and scopes.
    """

    variables: tuple[OpVariable, ...]
    edges: tuple[TensorEdge, ...]
    variable_of: tuple[int, ...]
    indexed: IndexedGraph
    eliminations: dict[object, Elimination] = field(default_factory=dict, repr=False)
    _data_parallel_choices: dict[int, tuple[int, ...]] = field(default_factory=dict, repr=False)

    def data_parallel_choices(self, axis_size: int) -> tuple[int, ...]:
        """Return the factor index that each variable cuts (or `NO_CUT`) if an axis of `axis_size`
        devices is data parallel."""
        if axis_size not in self._data_parallel_choices:
            # As if no other axis cut anything: the caller that copies the choices checks that sizes
            # are divisible.
            shard_counts = [(1,) * len(op_type.factors) for op_type in self.indexed.op_types]
            level = AxisLevel(self.indexed, shard_counts, axis_size)
            level.decide_remaining()
            # Reversed, so that the first of the operators that share a variable wins.
            decided = dict(zip(reversed(self.variable_of), reversed(level.choices), strict=True))
            choices = tuple(decided[variable] for variable in range(len(self.variables)))
            self._data_parallel_choices[axis_size] = choices
        return self._data_parallel_choices[axis_size]

    def edges_around(self) -> list[list[TensorEdge]]:
        """Return for each variable the edges with an end at its operator."""
        # Dicts as ordered sets: an operator may read one value twice.
        edges_of_variable: list[dict[TensorEdge, None]] = [{} for _ in self.variables]
        for edge in self.edges:
            for end in edge.ends():
                edges_of_variable[end.variable][edge] = None
        return [list(edges) for edges in edges_of_variable]


def search_problem(
    graph: Graph,
    pinned: Mapping[str, Cuts],
    outputs: Outputs = NO_OUTPUTS,
    arrivals: Mapping[str, CutAxes] | None = None,
    fold: bool = True,
) -> SearchProblem:
    """Return the variables and edges of `graph`; the last problem of each graph is cached.

    Args:
        pinned: cuts of pinned operators, by operator name.
        outputs: fixed output layouts, by operator name; see `Outputs`.
        arrivals: axes that shard each dim of model inputs that arrive sharded, by input name.
        fold: whether repeated blocks share variables.
    """
    pins = tuple((name, tuple(cuts.items())) for name, cuts in pinned.items())
    passed_in = tuple((arrivals or {}).items())
    # A rule that is registered later changes the variables.
    key = num_rules(), pins, tuple(outputs.items()), passed_in, fold
    cached = _LAST_PROBLEM.get(graph)
    if cached is None or cached[0] != key:
        problem = _build_problem(graph, pinned, outputs, arrivals or {}, fold)
        cached = _LAST_PROBLEM[graph] = key, problem
    return cached[1]


_LAST_PROBLEM: WeakKeyDictionary[Graph, tuple[object, SearchProblem]] = WeakKeyDictionary()
"""Cache of the last problem built for each graph, as (key of the arguments, problem). One problem
per graph is enough: the searches for one plan differ only in the mesh and in weights, which a
problem does not contain."""


def _build_problem(
    graph: Graph,
    pinned: Mapping[str, Cuts],
    outputs: Outputs,
    arrivals: Mapping[str, CutAxes],
    fold: bool,
) -> SearchProblem:
    indexed = index_graph(graph)
    works = [work_of(op) for op in graph.ops]
    op_keys = [
        _op_folding_key(op, work, pinned, outputs)
        for op, work in zip(graph.ops, works, strict=True)
    ]
    representative_of = representatives(indexed, op_keys) if fold else list(range(len(graph.ops)))
    # Sorted, so that variables are in graph order.
    index_of = {op: index for index, op in enumerate(sorted(set(representative_of)))}
    variable_of = tuple(index_of[op] for op in representative_of)
    own_parameters = _unshared_parameter_indices(graph, indexed)
    counts = [0] * len(index_of)
    for variable in variable_of:
        counts[variable] += 1
    variables = tuple(
        OpVariable(
            op=graph.ops[op],
            rule=rule_of(graph.ops[op]),
            op_type=indexed.op_types[op],
            work=works[op],
            count=counts[index],
            differentiable=any(value.requires_grad for value in graph.ops[op].outputs),
            pinned=pinned.get(graph.ops[op].name),
            own_parameters=own_parameters[op],
        )
        for op, index in index_of.items()
    )
    edges = _tensor_edges(graph, indexed, variable_of, variables, outputs, arrivals)
    return SearchProblem(variables, edges, variable_of, indexed)


def _op_folding_key(op: Op, work: Work, pinned: Mapping[str, Cuts], outputs: Outputs) -> Hashable:
    """Return a key that is equal for operators that may share a variable, given that their
    `OpType`s are equal."""
    cuts = pinned.get(op.name)
    pin = None if cuts is None else tuple(cuts.items())
    # The gradients that an operator computes decide the seconds of its backward pass.
    requires_grad = tuple(value.requires_grad for value in (*op.inputs, *op.outputs))
    return id(work), requires_grad, pin, outputs.get(op.name)


def _unshared_parameter_indices(graph: Graph, indexed: IndexedGraph) -> list[tuple[int, ...]]:
    return [
        tuple(
            input_index
            for input_index, value in enumerate(op.inputs)
            if value.origin is Origin.PARAMETER and len(indexed.consumers[read[input_index]]) == 1
        )
        for op, read in zip(graph.ops, indexed.inputs, strict=True)
    ]


def _tensor_edges(
    graph: Graph,
    indexed: IndexedGraph,
    variable_of: tuple[int, ...],
    variables: tuple[OpVariable, ...],
    outputs: Outputs,
    arrivals: Mapping[str, CutAxes],
) -> tuple[TensorEdge, ...]:
    returned_values = replicated_outputs(graph)
    replicated = returned_values | {value for _, value in graph.updates}
    edges: dict[Hashable, tuple[TensorEdge, int]] = {}
    for value_index, value in enumerate(graph.values()):
        uses = indexed.consumers[value_index]
        is_parameter = value.origin is Origin.PARAMETER
        # A parameter with one consumer is stored as it is read; its cost belongs to the operator.
        if (is_parameter and len(uses) < 2) or not (uses or value in replicated):
            continue
        # A set: repeated layers that share a variable read a value such as a mask alike.
        consumers = tuple(sorted({(variable_of[op], index) for op, index in uses}))
        op_and_output, producer = indexed.producer[value_index], None
        if op_and_output is None:
            axes: CutAxes | None = arrivals.get(value.name, ((),) * len(value.shape))
        else:
            op, output_index = op_and_output
            producer = (variable_of[op], output_index)
            axes = outputs.get(graph.ops[op].name, (None,) * (output_index + 1))[output_index]
        # A value may require a gradient although no consumer sends one back.
        has_gradient = value.requires_grad and (
            value in returned_values
            or any(variables[consumer].differentiable for consumer, _ in consumers)
        )
        edge = TensorEdge(
            value, producer, axes, consumers, value in replicated, has_gradient, is_parameter, 0
        )
        # Equal for the values between corresponding operators of repeated blocks.
        key: Hashable = (
            producer,
            axes,
            consumers,
            value in replicated,
            value.shape,
            value.dtype,
            has_gradient,
        )
        if producer is None:
            # Values without a producer are one edge each: two parameters or inputs of one shape are
            # not one value.
            key = (key, value_index)
        representative, count = edges.get(key, (edge, 0))
        edges[key] = (representative, count + 1)
    return tuple(replace(edge, count=count) for edge, count in edges.values())


MIN_BLOCKS = 4
"""Minimum number of equal consecutive blocks whose operators share variables.

The first and the last block always have their own variables, since their neighbors differ from
those of inner blocks; with three blocks nothing would be shared.
"""


@dataclass(frozen=True)
class BlockRun:
    """A run of `blocks` equal consecutive blocks of `period` operators each, from index `start`."""

    start: int
    period: int
    blocks: int


def representatives(indexed: IndexedGraph, op_keys: Sequence[Hashable]) -> list[int]:
    """Return for each operator the index of its representative, whose cuts it copies.

    All blocks of a run but the first and the last get the cuts of the second block.

    Args:
        op_keys: a hashable key of each operator; operators share cuts only if their keys and types
            are equal.
    """
    representative_of = list(range(len(indexed.names)))
    for run in block_runs(indexed, op_keys):
        # The first block reads from the embedding and the last is read by the head: redistributions
        # there differ from those between blocks.
        for block in range(2, run.blocks - 1):
            first = run.start + block * run.period
            for offset in range(run.period):
                representative_of[first + offset] = run.start + run.period + offset
    return representative_of


def block_runs(indexed: IndexedGraph, op_keys: Sequence[Hashable]) -> list[BlockRun]:
    """Return disjoint runs of at least `MIN_BLOCKS` equal blocks.

    Args:
        op_keys: a hashable key of each operator; operators are equal if their keys and types are.
    """
    # Numbers instead of keys, so that NumPy compares all operators one period apart at once.
    number_of_key: dict[Hashable, int] = {}
    keys = np.array(
        [
            number_of_key.setdefault((id(op_type), op_key), len(number_of_key))
            for op_type, op_key in zip(indexed.op_types, op_keys, strict=True)
        ],
        dtype=np.int64,
    )
    runs: list[BlockRun] = []
    intervals = [(0, len(keys))]
    while intervals:
        start, stop = intervals.pop()
        run = _find_longest_repeated_run(indexed, keys, start, stop)
        # Operators before and after a run may be further runs, such as an encoder and a decoder.
        if run is not None:
            runs.append(run)
            intervals += [(start, run.start), (run.start + run.period * run.blocks, stop)]
    return runs


def _find_longest_repeated_run(
    indexed: IndexedGraph, keys: np.ndarray[tuple[int], np.dtype[np.int64]], start: int, stop: int
) -> BlockRun | None:
    """Return the run of equal blocks among operators `start` to `stop - 1` with the most operators
    that share a variable, or None.

    Ties go to the shortest period.
    """
    segment_keys = keys[start:stop]
    # (Upper bound on the shared operators, period, first operator, length) of each period.
    candidates: list[tuple[int, int, int, int]] = []
    # A longer period would leave no room for `MIN_BLOCKS` blocks.
    for period in range(1, (stop - start) // MIN_BLOCKS + 1):
        equal = segment_keys[period:] == segment_keys[:-period]
        first_op, length = _find_longest_true_run(equal)
        # Of n equal blocks, n - 1 periods of operators equal those one period later.
        if length >= (MIN_BLOCKS - 1) * period:
            candidates.append((_num_shared(length, period), period, start + first_op, length))
    candidates.sort(key=lambda candidate: (-candidate[0], candidate[1]))
    best, most_shared = None, 0
    for bound, period, first_op, length in candidates:
        if bound <= most_shared:
            break
        # Equal operators may be connected differently, as where layers with a mask of a window
        # alternate with others. So inputs are compared too: in Python, for the operators of a run.
        reads_equal = np.array(
            [
                _reads_corresponding_inputs(indexed, op, period)
                for op in range(first_op, first_op + length)
            ]
        )
        offset, size = _find_longest_true_run(reads_equal)
        if _num_shared(size, period) > most_shared:
            most_shared = _num_shared(size, period)
            best = BlockRun(first_op + offset, period, size // period + 1)
    return best


def _num_shared(length: int, period: int) -> int:
    """Return the number of operators of a run that get the variable of another block.

    Args:
        length: number of operators that equal the operator one period later.
    """
    return max(0, length // period + 1 - (MIN_BLOCKS - 1)) * period


def _find_longest_true_run(flags: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> tuple[int, int]:
    """Return the start and the length of the longest run of true flags; ties go to the first
    run."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False])).astype(np.int8)))
    if not len(edges):
        return 0, 0
    # Starts and ends of runs alternate.
    lengths = edges[1::2] - edges[::2]
    longest = int(lengths.argmax())
    return int(edges[2 * longest]), int(lengths[longest])


def _reads_corresponding_inputs(indexed: IndexedGraph, op: int, period: int) -> bool:
    """Whether the operator one period after `op` reads inputs that correspond to the inputs of
    `op`.

    Corresponding inputs are the same value, or values computed one period apart, or parameters or
    constants whose consumers are all one period apart.
    """
    for value, later in zip(indexed.inputs[op], indexed.inputs[op + period], strict=True):
        # One value that all blocks read, such as a mask.
        if value == later:
            continue
        producer, later_producer = indexed.producer[value], indexed.producer[later]
        if producer is None and later_producer is None:
            uses = [
                (consumer + period, input_index)
                for consumer, input_index in indexed.consumers[value]
            ]
            if uses != list(indexed.consumers[later]):
                return False
        elif (
            producer is None
            or later_producer is None
            or (later_producer[0] - period, later_producer[1]) != producer
        ):
            return False
    return True
