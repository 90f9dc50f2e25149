"""What the search by time decides: operators, and the values that pass between them.

Operators that blocks repeat are one `OpVariable`, values that are made and read alike one
`TensorEdge`; both know how often they occur.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shardwright.cost.flops import Work, work_of
from shardwright.graph.graph import Graph, Kind, Op, Value
from shardwright.partition.decisions import NO_OUTPUTS, CutAxes, Outputs
from shardwright.rules import rule_of
from shardwright.rules.rule import Cuts, ShardingRule
from shardwright.search.indexed_graph import IndexedGraph, OpKind, index_graph


@dataclass(frozen=True, eq=False)
class OpVariable:
    """An operator to be decided.

    Args:
        count: how many operators are decided by it.
        differentiable: whether gradients pass through it.
        pinned: its cuts, if they are given.
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


@dataclass(frozen=True, eq=False)
class TensorEdge:
    """A value on its way from the operator that makes it to all that read it.

    Args:
        source: the node that makes it and the place among its outputs; None if it arrives.
        made: the axes that cut it where that is given: an input, or an output that is told.
        readers: the nodes that read it, each with the place among its inputs.
        returned: whether it is also returned whole.
        differentiable: whether a gradient comes back.
        stored: whether it is a parameter that several operators read.
        count: how many values are such.
    """

    value: Value
    source: tuple[int, int] | None
    made: CutAxes | None
    readers: tuple[tuple[int, int], ...]
    returned: bool
    differentiable: bool
    stored: bool
    count: int


@dataclass(frozen=True, eq=False)
class SearchProblem:
    """The nodes, the streams, and for each operator of the graph the node that decides it."""

    nodes: tuple[OpVariable, ...]
    streams: tuple[TensorEdge, ...]
    node_of: tuple[int, ...]
    indexed: IndexedGraph

    def streams_of(self) -> list[list[TensorEdge]]:
        """For each node the streams that it makes or reads."""
        found: list[dict[TensorEdge, None]] = [{} for _ in self.nodes]
        for stream in self.streams:
            ends = [node for node, _ in stream.readers]
            if stream.source is not None:
                ends.append(stream.source[0])
            for node in ends:
                found[node][stream] = None
        return [list(streams) for streams in found]


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
        outputs: for operators that are told how to leave their outputs, the axes of each.
        arrivals: for inputs that do not arrive whole, the axes that cut them.
        fold: whether blocks that repeat are decided once.
    """
    indexed = index_graph(graph)
    works = [work_of(op) for op in graph.ops]
    alike = [_alike(op, work, pinned, outputs) for op, work in zip(graph.ops, works, strict=True)]
    decided_by = representatives(indexed, alike) if fold else list(range(len(graph.ops)))
    number = {op: node for node, op in enumerate(sorted(set(decided_by)))}
    node_of = tuple(number[op] for op in decided_by)
    own = _own_parameters(graph, indexed)
    counts = [0] * len(number)
    for node in node_of:
        counts[node] += 1
    nodes = tuple(
        OpVariable(
            op=graph.ops[op],
            rule=rule_of(graph.ops[op]),
            kind=indexed.kinds[op],
            work=works[op],
            count=counts[node],
            differentiable=any(value.requires_grad for value in graph.ops[op].outputs),
            pinned=pinned.get(graph.ops[op].name),
            own=own[op],
        )
        for op, node in number.items()
    )
    streams = _streams(graph, indexed, node_of, nodes, outputs, arrivals or {})
    return SearchProblem(nodes, streams, node_of, indexed)


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


def _streams(
    graph: Graph,
    indexed: IndexedGraph,
    node_of: tuple[int, ...],
    nodes: tuple[OpVariable, ...],
    outputs: Outputs,
    arrivals: Mapping[str, CutAxes],
) -> tuple[TensorEdge, ...]:
    ends = {v for v in graph.output_values if graph.loss is None or v is graph.loss or not v.shape}
    whole = ends | {value for _, value in graph.updates}
    found: dict[Hashable, tuple[TensorEdge, int]] = {}
    for number, value in enumerate(graph.values()):
        consumers = indexed.consumers[number]
        parameter = value.kind is Kind.PARAMETER
        if (parameter and len(consumers) < 2) or not (consumers or value in whole):
            continue
        readers = tuple(sorted({(node_of[op], place) for op, place in consumers}))
        made, source, told = indexed.producer[number], None, arrivals.get(value.name)
        if made is not None:
            source = (node_of[made[0]], made[1])
            told = outputs.get(graph.ops[made[0]].name, (None,) * (made[1] + 1))[made[1]]
        back = value.requires_grad and (
            value in ends or any(nodes[node].differentiable for node, _ in readers)
        )
        stream = TensorEdge(value, source, told, readers, value in whole, back, parameter, 0)
        key: Hashable = (source, told, readers, value in whole, value.shape, value.dtype, back)
        if source is None:
            key = (key, number)
        first, count = found.get(key, (stream, 0))
        found[key] = (first, count + 1)
    return tuple(
        TensorEdge(
            *(one.value, one.source, one.made, one.readers, one.returned),
            *(one.differentiable, one.stored, count),
        )
        for one, count in found.values()
    )


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
    found = list(range(len(indexed.names)))
    for run in block_runs(indexed, alike):
        for block in range(2, run.blocks - 1):
            first = run.start + block * run.period
            for place in range(run.period):
                found[first + place] = run.start + run.period + place
    return found


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
    found: list[BlockRun] = []
    pieces = [(0, len(keys))]
    while pieces:
        start, stop = pieces.pop()
        run = _longest(indexed, keys, start, stop)
        if run is not None:
            found.append(run)
            pieces += [(start, run.start), (run.start + run.period * run.blocks, stop)]
    return found


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
    """Whether the operator one period after `op` reads as it does: what is made as long before, the
    same, or a parameter or constant that its own block reads likewise."""
    for mine, theirs in zip(indexed.inputs[op], indexed.inputs[op + period], strict=True):
        if mine == theirs:
            continue
        made, makes = indexed.producer[mine], indexed.producer[theirs]
        if made is None and makes is None:
            uses = [(reader + period, place) for reader, place in indexed.consumers[mine]]
            if uses != list(indexed.consumers[theirs]):
                return False
        elif made is None or makes is None or (makes[0] - period, makes[1]) != made:
            return False
    return True
