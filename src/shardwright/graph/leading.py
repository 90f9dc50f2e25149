"""What can be computed before any parameter is needed."""

from __future__ import annotations

from collections.abc import Iterable

from shardwright.graph.graph import Graph, Kind, Op, Value


def made_of_inputs(graph: Graph, values: Iterable[Value]) -> list[Op] | None:
    """The operators that make `values` of the model's inputs; None if they depend on parameters or
    buffers."""
    needed, found = set(values), list[Op]()
    for op in reversed(graph.ops):
        if needed.intersection(op.outputs):
            found.append(op)
            needed.update(op.inputs)
    if any(value.kind in (Kind.PARAMETER, Kind.BUFFER) for value in needed):
        return None
    return found[::-1]
