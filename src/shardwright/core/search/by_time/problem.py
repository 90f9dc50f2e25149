"""The variables and edges of the search by time: operators, and the values between them.

Operators of repeated blocks share one `OpVariable`, and values with equal sources and readers one
`TensorEdge`; `count` says how many each stands for. So the tables of a deep model are those of a
few of its blocks.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from shardwright.core.cost.flops import Work, work_of
from shardwright.core.graph.graph import Graph, Kind, Op, Value
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
    """An operator whose cuts are to be decided, and its equals in repeated blocks.

    Args:
        count: the number of operators that get its cuts.
        differentiable: whether gradients pass through it.
        pinned: its cuts if they are fixed.
        own_parameters: indices of the inputs that are parameters which only this operator reads.
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
    """An input or output of a variable.

    Args:
        variable: its number.
        side: 0 for an input, 1 for an output.
        tensor_index: among the inputs, or among the outputs.
    """

    variable: int
    side: int
    tensor_index: int


@dataclass(frozen=True, eq=False)
class TensorEdge:
    """A value between its producer and all of its readers.

    Args:
        source: the variable that computes it and the output index; None for inputs of the model,
            parameters, buffers and constants.
        fixed_axes: the axes that cut each dim at the source, where that is not decided: for values
            without a producer, and for outputs whose layout is fixed; else None.
        readers: the variables that read it, each with the input index.
        returned: whether the model also returns it, replicated.
        differentiable: whether a gradient flows back.
        is_shared_parameter: whether it is a parameter that several operators read; how it is stored
            is then a decision of its own. Others are part of their operator's cost.
        count: the number of values that it stands for.
    """

    value: Value
    source: tuple[int, int] | None
    fixed_axes: CutAxes | None
    readers: tuple[tuple[int, int], ...]
    returned: bool
    differentiable: bool
    is_shared_parameter: bool
    count: int

    @property
    def source_variable(self) -> int | None:
        """The variable whose cuts decide the layout at the source; None if that is fixed."""
        return self.source[0] if self.source is not None and self.fixed_axes is None else None

    def ends(self) -> list[EdgeEnd]:
        """The ends at its readers, then the end at its source if it has one."""
        ends = [EdgeEnd(number, 0, index) for number, index in self.readers]
        if self.source is not None:
            ends.append(EdgeEnd(self.source[0], 1, self.source[1]))
        return ends


@dataclass(frozen=True, eq=False)
class SearchProblem:
    """The variables, the edges between them, and the variable of each operator of the graph.

    Args:
        variable_of: for each operator of the graph the number of its variable.
        eliminations: elimination orders by table sizes and scopes; shared by all searches on the
            problem, since most axes have the same.
    """

    variables: tuple[OpVariable, ...]
    edges: tuple[TensorEdge, ...]
    variable_of: tuple[int, ...]
    indexed: IndexedGraph
    eliminations: dict[object, Elimination] = field(default_factory=dict, repr=False)
    _data_parallel_choices: dict[int, tuple[int, ...]] = field(default_factory=dict, repr=False)

    def data_parallel_choices(self, size: int) -> tuple[int, ...]:
        """Each variable's choice if an axis of `size` devices, and no other, is data parallel."""
        if size not in self._data_parallel_choices:
            shard_counts = [(1,) * len(op_type.factors) for op_type in self.indexed.op_types]
            level = AxisLevel(self.indexed, shard_counts, size)
            level.decide_remaining()
            # Reversed, so that the first of the operators that share a variable wins.
            decided = dict(zip(reversed(self.variable_of), reversed(level.choice), strict=True))
            choices = tuple(decided[number] for number in range(len(self.variables)))
            self._data_parallel_choices[size] = choices
        return self._data_parallel_choices[size]

    def edges_around(self) -> list[list[TensorEdge]]:
        """Return for each variable the edges that have an end at it."""
        around: list[dict[TensorEdge, None]] = [{} for _ in self.variables]
        for edge in self.edges:
            for end in edge.ends():
                around[end.variable][edge] = None
        return [list(edges) for edges in around]


def search_problem(
    graph: Graph,
    pinned: Mapping[str, Cuts],
    outputs: Outputs = NO_OUTPUTS,
    arrivals: Mapping[str, CutAxes] | None = None,
    fold: bool = True,
) -> SearchProblem:
    """Return the variables and edges of `graph`; the last problem of each graph is cached.

    Args:
        pinned: cuts of operators that are fixed.
        outputs: the axes of each output of the operators whose output layouts are fixed.
        arrivals: the axes of each dim of the model inputs that arrive sharded.
        fold: whether repeated blocks share variables.
    """
    pins = tuple((name, tuple(cuts.items())) for name, cuts in pinned.items())
    arriving = tuple((arrivals or {}).items())
    key = num_rules(), pins, tuple(outputs.items()), arriving, fold
    cached = _LAST_PROBLEM.get(graph)
    if cached is None or cached[0] != key:
        problem = _search_problem(graph, pinned, outputs, arrivals or {}, fold)
        cached = _LAST_PROBLEM[graph] = key, problem
    return cached[1]


_LAST_PROBLEM: WeakKeyDictionary[Graph, tuple[object, SearchProblem]] = WeakKeyDictionary()
"""By graph the last problem, with the arguments that it depends on. One is enough: the searches of
one plan differ in the mesh and in weights, which a problem does not contain."""


def _search_problem(
    graph: Graph,
    pinned: Mapping[str, Cuts],
    outputs: Outputs,
    arrivals: Mapping[str, CutAxes],
    fold: bool,
) -> SearchProblem:
    indexed = index_graph(graph)
    works = [work_of(op) for op in graph.ops]
    op_keys = [
        _op_key(op, work, pinned, outputs) for op, work in zip(graph.ops, works, strict=True)
    ]
    decided_by = representatives(indexed, op_keys) if fold else list(range(len(graph.ops)))
    number_of = {op: number for number, op in enumerate(sorted(set(decided_by)))}
    variable_of = tuple(number_of[op] for op in decided_by)
    own_parameters = _own_parameters(graph, indexed)
    counts = [0] * len(number_of)
    for number in variable_of:
        counts[number] += 1
    variables = tuple(
        OpVariable(
            op=graph.ops[op],
            rule=rule_of(graph.ops[op]),
            op_type=indexed.op_types[op],
            work=works[op],
            count=counts[number],
            differentiable=any(value.requires_grad for value in graph.ops[op].outputs),
            pinned=pinned.get(graph.ops[op].name),
            own_parameters=own_parameters[op],
        )
        for op, number in number_of.items()
    )
    edges = _edges(graph, indexed, variable_of, variables, outputs, arrivals)
    return SearchProblem(variables, edges, variable_of, indexed)


def _op_key(op: Op, work: Work, pinned: Mapping[str, Cuts], outputs: Outputs) -> Hashable:
    """A key that, with the rule, is equal for operators that may share a variable."""
    cuts = pinned.get(op.name)
    pin = None if cuts is None else tuple(cuts.items())
    grads = tuple(value.requires_grad for value in (*op.inputs, *op.outputs))
    return id(work), grads, pin, outputs.get(op.name)


def _own_parameters(graph: Graph, indexed: IndexedGraph) -> list[tuple[int, ...]]:
    return [
        tuple(
            input_index
            for input_index, value in enumerate(op.inputs)
            if value.kind is Kind.PARAMETER and len(indexed.consumers[read[input_index]]) == 1
        )
        for op, read in zip(graph.ops, indexed.inputs, strict=True)
    ]


def _edges(
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
    for number, value in enumerate(graph.values()):
        consumers = indexed.consumers[number]
        parameter = value.kind is Kind.PARAMETER
        # A parameter with one reader is stored as it is read; its cost belongs to the operator.
        if (parameter and len(consumers) < 2) or not (consumers or value in replicated):
            continue
        readers = tuple(sorted({(variable_of[op], index) for op, index in consumers}))
        producer, source = indexed.producer[number], None
        if producer is None:
            axes: CutAxes | None = arrivals.get(value.name, ((),) * len(value.shape))
        else:
            op, index = producer
            source = (variable_of[op], index)
            axes = outputs.get(graph.ops[op].name, (None,) * (index + 1))[index]
        has_gradient = value.requires_grad and (
            value in returned_values
            or any(variables[reader].differentiable for reader, _ in readers)
        )
        edge = TensorEdge(
            value, source, axes, readers, value in replicated, has_gradient, parameter, 0
        )
        key: Hashable = (
            source,
            axes,
            readers,
            value in replicated,
            value.shape,
            value.dtype,
            has_gradient,
        )
        if source is None:
            # Values without a producer are one edge each: two parameters or inputs of one shape are
            # not one value.
            key = (key, number)
        representative, count = edges.get(key, (edge, 0))
        edges[key] = (representative, count + 1)
    return tuple(replace(edge, count=count) for edge, count in edges.values())


MIN_BLOCKS = 4
"""Shorter runs of equal blocks are not folded. The first and the last block have other neighbors
and keep their own variables, so that in a run of three nothing would be saved."""


@dataclass(frozen=True)
class BlockRun:
    """`blocks` equal blocks in a row, each of `period` operators, from operator `start` on."""

    start: int
    period: int
    blocks: int


def representatives(indexed: IndexedGraph, op_keys: Sequence[Hashable]) -> list[int]:
    """Return for each operator the one whose cuts it gets.

    All blocks of a run but the first and the last get the cuts of the second: the neighbors of the
    first and of the last block differ.

    Args:
        op_keys: for each operator what must be equal, besides its type, to share cuts.
    """
    decided_by = list(range(len(indexed.names)))
    for run in block_runs(indexed, op_keys):
        # The first block reads from the embedding and the last is read by the head: redistributions
        # there differ from those between blocks.
        for block in range(2, run.blocks - 1):
            first = run.start + block * run.period
            for offset in range(run.period):
                decided_by[first + offset] = run.start + run.period + offset
    return decided_by


def block_runs(indexed: IndexedGraph, op_keys: Sequence[Hashable]) -> list[BlockRun]:
    """Return disjoint runs of at least `MIN_BLOCKS` equal blocks."""
    numbers: dict[Hashable, int] = {}
    keys = np.array(
        [
            numbers.setdefault((id(op_type), op_key), len(numbers))
            for op_type, op_key in zip(indexed.op_types, op_keys, strict=True)
        ],
        dtype=np.int64,
    )
    runs: list[BlockRun] = []
    intervals = [(0, len(keys))]
    while intervals:
        start, stop = intervals.pop()
        run = _longest_run(indexed, keys, start, stop)
        if run is not None:
            runs.append(run)
            intervals += [(start, run.start), (run.start + run.period * run.blocks, stop)]
    return runs


def _longest_run(
    indexed: IndexedGraph, keys: np.ndarray[tuple[int], np.dtype[np.int64]], start: int, stop: int
) -> BlockRun | None:
    """The longest run of equal blocks among operators `start` to `stop`, of the shortest period."""
    best_start, length = (0, 0), 0
    segment_keys = keys[start:stop]
    for period in range(1, (stop - start) // MIN_BLOCKS + 1):
        # A longer period has fewer operators left to compare.
        if length >= stop - start - period:
            break
        equal = segment_keys[period:] == segment_keys[:-period]
        first_op, size = _longest_true_run(equal)
        if size > length:
            best_start, length = (start + first_op, period), size
    if not length or length < (MIN_BLOCKS - 1) * best_start[1]:
        return None
    first_op, period = best_start
    reads = np.array(
        [_reads_equal_values(indexed, op, period) for op in range(first_op, first_op + length)]
    )
    offset, size = _longest_true_run(reads)
    blocks = size // period + 1
    return BlockRun(first_op + offset, period, blocks) if blocks >= MIN_BLOCKS else None


def _longest_true_run(flags: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> tuple[int, int]:
    """Start and length of the longest run of true flags; the first of equally long ones."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False])).astype(np.int8)))
    if not len(edges):
        return 0, 0
    lengths = edges[1::2] - edges[::2]
    longest = int(lengths.argmax())
    return int(edges[2 * longest]), int(lengths[longest])


def _reads_equal_values(indexed: IndexedGraph, op: int, period: int) -> bool:
    """Whether the operator one period after `op` reads the corresponding inputs.

    Each input must be the same value, or one computed one period later, or a parameter or constant
    whose readers are all one period later.
    """
    for value, later in zip(indexed.inputs[op], indexed.inputs[op + period], strict=True):
        if value == later:
            continue
        source, later_source = indexed.producer[value], indexed.producer[later]
        if source is None and later_source is None:
            uses = [
                (reader + period, input_index) for reader, input_index in indexed.consumers[value]
            ]
            if uses != list(indexed.consumers[later]):
                return False
        elif (
            source is None
            or later_source is None
            or (later_source[0] - period, later_source[1]) != source
        ):
            return False
    return True
