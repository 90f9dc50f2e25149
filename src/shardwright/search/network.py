"""What the search by time decides: operators, and the values that stream between them.

Operators that blocks repeat are one `Node`, values that are made and read alike one `Stream`; both
know how often they occur.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from shardwright.cost.flops import Work, work_of
from shardwright.decided import NO_OUTPUTS, CutAxes, Outputs
from shardwright.graph.graph import Graph, Kind, Op, Value
from shardwright.rules import rule_of
from shardwright.rules.rule import Cuts, ShardingRule
from shardwright.search.blocks import representatives
from shardwright.search.indexed import IndexedGraph, OpKind, index_graph


@dataclass(frozen=True, eq=False)
class Node:
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
class Stream:
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
class Network:
    """The nodes, the streams, and for each operator of the graph the node that decides it."""

    nodes: tuple[Node, ...]
    streams: tuple[Stream, ...]
    node_of: tuple[int, ...]
    indexed: IndexedGraph

    def streams_of(self) -> list[list[Stream]]:
        """For each node the streams that it makes or reads."""
        found: list[dict[Stream, None]] = [{} for _ in self.nodes]
        for stream in self.streams:
            ends = [node for node, _ in stream.readers]
            if stream.source is not None:
                ends.append(stream.source[0])
            for node in ends:
                found[node][stream] = None
        return [list(streams) for streams in found]


def network(
    graph: Graph,
    pinned: Mapping[str, Cuts],
    outputs: Outputs = NO_OUTPUTS,
    arrivals: Mapping[str, CutAxes] | None = None,
    fold: bool = True,
) -> Network:
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
        Node(
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
    return Network(nodes, streams, node_of, indexed)


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
    nodes: tuple[Node, ...],
    outputs: Outputs,
    arrivals: Mapping[str, CutAxes],
) -> tuple[Stream, ...]:
    ends = {v for v in graph.output_values if graph.loss is None or v is graph.loss or not v.shape}
    whole = ends | {value for _, value in graph.updates}
    found: dict[Hashable, tuple[Stream, int]] = {}
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
        stream = Stream(value, source, told, readers, value in whole, back, parameter, 0)
        key: Hashable = (source, told, readers, value in whole, value.shape, value.dtype, back)
        if source is None:
            key = (key, number)
        first, count = found.get(key, (stream, 0))
        found[key] = (first, count + 1)
    return tuple(
        Stream(
            *(one.value, one.source, one.made, one.readers, one.returned),
            *(one.differentiable, one.stored, count),
        )
        for one, count in found.values()
    )
