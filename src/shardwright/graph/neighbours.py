"""Parts of operators that nobody named: those of their neighbours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shardwright.graph.graph import Graph, Op, Value


def with_neighbours(graph: Graph, anchored: Mapping[str, int]) -> dict[str, int]:
    """The part of every operator: as named, or the latest of what it reads, or else the earliest of
    what reads it."""
    part_of: dict[str, int] = {}

    def producer_parts(op: Op) -> list[int]:
        makers = (graph.producer.get(value) for value in op.inputs)
        return [part_of[maker.name] for maker in makers if maker and maker.name in part_of]

    def readers(values: Iterable[Value]) -> list[int]:
        names = (op.name for value in values for op, _ in graph.consumers[value])
        return [part_of[name] for name in names if name in part_of]

    for op in graph.ops:
        if op.name in anchored:
            part_of[op.name] = anchored[op.name]
        elif found := producer_parts(op):
            part_of[op.name] = max(found)
    for op in reversed(graph.ops):
        if op.name not in part_of:
            part_of[op.name] = min(readers(op.outputs), default=0)
    return part_of
