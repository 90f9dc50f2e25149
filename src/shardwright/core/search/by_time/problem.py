"""What the search by time decides: operators, and the values that pass between them.

Operators that blocks repeat are one `OpVariable`, values that are made and read alike one
`TensorEdge`; both know how often they occur.
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
from shardwright.core.search.indexed_graph import IndexedGraph, OpKind, index_graph, whole_outputs
from shardwright.core.search.recursive.axis_level import AxisLevel


@dataclass(frozen=True, eq=False)
class OpVariable:
    """An operator to be decided.

    Args:
        count: how many operators are decided by it.
        differentiable: whether gradients pass through it.
        pinned: its cuts if they are fixed.
        own: its inputs that are parameters which nothing else reads.
    """

    op: Op
    rule: ShardingRule | None
    kind: OpKind
    work: Work
    count: int
    differentiable: bool
    pinned: Cuts | None
    own: tuple[int, ...]


class EdgeEnd(NamedTuple):
    """Where a value enters or leaves an operator.

    Args:
        variable: the number of the operator's variable.
        side: 0 among its inputs, 1 among its outputs.
        place: the number there.
    """

    variable: int
    side: int
    place: int


@dataclass(frozen=True, eq=False)
class TensorEdge:
    """A value on its way from the operator that makes it to all that read it.

    Args:
        source: the variable that makes it and the place among its outputs; None if it arrives.
        fixed_axes: the axes that cut it where no variable decides how it is made: a value that
            arrives, or an output whose layout is fixed; None where its source decides.
        readers: the variables that read it, each with the place among its inputs.
        returned: whether it is also returned whole.
        differentiable: whether a gradient comes back.
        stored: whether it is a parameter that several operators read.
        count: how many values are such.
    """

    value: Value
    source: tuple[int, int] | None
    fixed_axes: CutAxes | None
    readers: tuple[tuple[int, int], ...]
    returned: bool
    differentiable: bool
    stored: bool
    count: int

    @property
    def maker(self) -> int | None:
        """The variable that decides how the value is made."""
        return self.source[0] if self.source is not None and self.fixed_axes is None else None

    def ends(self) -> list[EdgeEnd]:
        """The ends at its readers, then at its source if it has one."""
        ends = [EdgeEnd(number, 0, place) for number, place in self.readers]
        if self.source is not None:
            ends.append(EdgeEnd(self.source[0], 1, self.source[1]))
        return ends


@dataclass(frozen=True, eq=False)
class SearchProblem:
    """Variables, the edges between them, and for each operator of the graph its variable.

    Args:
        eliminations: of variables, by what is connected; all searches on the problem share them.
    """

    variables: tuple[OpVariable, ...]
    edges: tuple[TensorEdge, ...]
    variable_of: tuple[int, ...]
    indexed: IndexedGraph
    eliminations: dict[object, Elimination] = field(default_factory=dict, repr=False)
    _along_batch: dict[int, tuple[int, ...]] = field(default_factory=dict, repr=False)

    def along_batch(self, size: int) -> tuple[int, ...]:
        """The choices of data parallel on an axis of so many devices, where no other is cut."""
        if size not in self._along_batch:
            parts = [(1,) * len(kind.factors) for kind in self.indexed.kinds]
            level = AxisLevel(self.indexed, parts, size)
            level.fill()
            # Of the operators that a variable decides the first counts.
            decided = dict(zip(reversed(self.variable_of), reversed(level.choice), strict=True))
            choices = tuple(decided[number] for number in range(len(self.variables)))
            self._along_batch[size] = choices
        return self._along_batch[size]

    def edges_around(self) -> list[list[TensorEdge]]:
        """For each variable the edges that it makes or reads."""
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
    """The operators and values of `graph`, those that blocks repeat folded into one.

    Args:
        pinned: cuts of operators that are kept.
        outputs: the axes of each output of the operators whose output layouts are fixed.
        arrivals: the axes of each model input that does not arrive whole.
        fold: whether blocks that repeat are decided once.
    """
    pins = tuple((name, tuple(cuts.items())) for name, cuts in pinned.items())
    arriving = tuple((arrivals or {}).items())
    asked = num_rules(), pins, tuple(outputs.items()), arriving, fold
    known = _KNOWN.get(graph)
    if known is None or known[0] != asked:
        found = _search_problem(graph, pinned, outputs, arrivals or {}, fold)
        known = _KNOWN[graph] = asked, found
    return known[1]


_KNOWN: WeakKeyDictionary[Graph, tuple[object, SearchProblem]] = WeakKeyDictionary()
"""What was searched last of each graph, with what it depends on: searches of one plan differ in
what they weigh and in the devices."""


def _search_problem(
    graph: Graph,
    pinned: Mapping[str, Cuts],
    outputs: Outputs,
    arrivals: Mapping[str, CutAxes],
    fold: bool,
) -> SearchProblem:
    indexed = index_graph(graph)
    works = [work_of(op) for op in graph.ops]
    alike = [_alike(op, work, pinned, outputs) for op, work in zip(graph.ops, works, strict=True)]
    decided_by = representatives(indexed, alike) if fold else list(range(len(graph.ops)))
    number_of = {op: number for number, op in enumerate(sorted(set(decided_by)))}
    variable_of = tuple(number_of[op] for op in decided_by)
    own = _own_parameters(graph, indexed)
    counts = [0] * len(number_of)
    for number in variable_of:
        counts[number] += 1
    variables = tuple(
        OpVariable(
            op=graph.ops[op],
            rule=rule_of(graph.ops[op]),
            kind=indexed.kinds[op],
            work=works[op],
            count=counts[number],
            differentiable=any(value.requires_grad for value in graph.ops[op].outputs),
            pinned=pinned.get(graph.ops[op].name),
            own=own[op],
        )
        for op, number in number_of.items()
    )
    edges = _edges(graph, indexed, variable_of, variables, outputs, arrivals)
    return SearchProblem(variables, edges, variable_of, indexed)


def _alike(op: Op, work: Work, pinned: Mapping[str, Cuts], outputs: Outputs) -> Hashable:
    """What makes an operator like another beside its rule."""
    cuts = pinned.get(op.name)
    pin = None if cuts is None else tuple(cuts.items())
    grads = tuple(value.requires_grad for value in (*op.inputs, *op.outputs))
    return id(work), grads, pin, outputs.get(op.name)


def _own_parameters(graph: Graph, indexed: IndexedGraph) -> list[tuple[int, ...]]:
    return [
        tuple(
            place
            for place, value in enumerate(op.inputs)
            if value.kind is Kind.PARAMETER and len(indexed.consumers[read[place]]) == 1
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
    outcomes = whole_outputs(graph)
    whole = outcomes | {value for _, value in graph.updates}
    edges: dict[Hashable, tuple[TensorEdge, int]] = {}
    for number, value in enumerate(graph.values()):
        consumers = indexed.consumers[number]
        parameter = value.kind is Kind.PARAMETER
        if (parameter and len(consumers) < 2) or not (consumers or value in whole):
            continue
        readers = tuple(sorted({(variable_of[op], place) for op, place in consumers}))
        producer, source = indexed.producer[number], None
        if producer is None:
            axes: CutAxes | None = arrivals.get(value.name, ((),) * len(value.shape))
        else:
            op, place = producer
            source = (variable_of[op], place)
            axes = outputs.get(graph.ops[op].name, (None,) * (place + 1))[place]
        back = value.requires_grad and (
            value in outcomes or any(variables[reader].differentiable for reader, _ in readers)
        )
        edge = TensorEdge(value, source, axes, readers, value in whole, back, parameter, 0)
        key: Hashable = (source, axes, readers, value in whole, value.shape, value.dtype, back)
        if source is None:
            key = (key, number)
        first, count = edges.get(key, (edge, 0))
        edges[key] = (first, count + 1)
    return tuple(replace(edge, count=count) for edge, count in edges.values())


FEWEST = 4
"""Fewer blocks in a row are decided one by one."""


@dataclass(frozen=True)
class BlockRun:
    """Equal blocks in a row: `blocks` of them, each of `period` operators, from `start` on."""

    start: int
    period: int
    blocks: int


def representatives(indexed: IndexedGraph, alike: Sequence[Hashable]) -> list[int]:
    """For each operator the one that is decided for it.

    Args:
        alike: for each operator what else must be equal for it to be decided like another.
    """
    decided_by = list(range(len(indexed.names)))
    for run in block_runs(indexed, alike):
        for block in range(2, run.blocks - 1):
            first = run.start + block * run.period
            for place in range(run.period):
                decided_by[first + place] = run.start + run.period + place
    return decided_by


def block_runs(indexed: IndexedGraph, alike: Sequence[Hashable]) -> list[BlockRun]:
    """The rows of at least `FEWEST` equal blocks, none overlapping another."""
    numbers: dict[Hashable, int] = {}
    keys = np.array(
        [
            numbers.setdefault((id(kind), also), len(numbers))
            for kind, also in zip(indexed.kinds, alike, strict=True)
        ],
        dtype=np.int64,
    )
    runs: list[BlockRun] = []
    pieces = [(0, len(keys))]
    while pieces:
        start, stop = pieces.pop()
        run = _longest(indexed, keys, start, stop)
        if run is not None:
            runs.append(run)
            pieces += [(start, run.start), (run.start + run.period * run.blocks, stop)]
    return runs


def _longest(
    indexed: IndexedGraph, keys: np.ndarray[tuple[int], np.dtype[np.int64]], start: int, stop: int
) -> BlockRun | None:
    """The longest row of equal blocks among operators `start` to `stop`."""
    best, length = (0, 0), 0
    part = keys[start:stop]
    for period in range(1, (stop - start) // FEWEST + 1):
        if length >= stop - start - period:
            break
        equal = part[period:] == part[:-period]
        first, size = _stretch(equal)
        if size > length:
            best, length = (start + first, period), size
    if not length or length < (FEWEST - 1) * best[1]:
        return None
    first, period = best
    reads = np.array([_reads_alike(indexed, op, period) for op in range(first, first + length)])
    offset, size = _stretch(reads)
    blocks = size // period + 1
    return BlockRun(first + offset, period, blocks) if blocks >= FEWEST else None


def _stretch(flags: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> tuple[int, int]:
    """Start and length of the longest stretch of true flags, the first of equal ones."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False])).astype(np.int8)))
    if not len(edges):
        return 0, 0
    lengths = edges[1::2] - edges[::2]
    longest = int(lengths.argmax())
    return int(edges[2 * longest]), int(lengths[longest])


def _reads_alike(indexed: IndexedGraph, op: int, period: int) -> bool:
    """Whether the operator one period after `op` reads as it does: values made as long before, the
    same ones, or a parameter or constant that its own block reads likewise."""
    for value, later in zip(indexed.inputs[op], indexed.inputs[op + period], strict=True):
        if value == later:
            continue
        source, again = indexed.producer[value], indexed.producer[later]
        if source is None and again is None:
            uses = [(reader + period, place) for reader, place in indexed.consumers[value]]
            if uses != list(indexed.consumers[later]):
                return False
        elif source is None or again is None or (again[0] - period, again[1]) != source:
            return False
    return True
