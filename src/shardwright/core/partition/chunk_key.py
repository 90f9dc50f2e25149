"""Hashable keys of chunks; the keys of chunks that differ only in names are equal.

A key has two parts: the structure of the chunk's graph, which is described once for all plans, and
the decisions of a plan. Both name values and operators by their position in the graph.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from shardwright.core.graph.graph import Graph, Op, Origin, Value
from shardwright.core.partition.chunk import Chunk
from shardwright.core.partition.decisions import CutAxes, Recompute


def chunk_key(chunk: Chunk) -> ChunkKey:
    """Return a key of all properties of a chunk on which its memory and time depend."""
    graph, decisions = chunk.graph, chunk.decisions
    structure = _structure_of(graph)
    position_of = structure.position_of
    cuts, outputs = decisions.cuts, decisions.outputs
    # Received, sent and returned values stay alive longer than other activations.
    borders = (chunk.arriving, chunk.leaving, chunk.returned, graph.output_values)
    return ChunkKey(
        structure.description,
        (
            # Gradients of inputs are computed only if there is a previous chunk.
            *(decisions.sharding, decisions.bucket_bytes, chunk.number > 0),
            tuple([decisions.storage.get(value.name) for value in graph.parameters]),
            _axes_by_position(position_of, decisions.arrivals),
            _axes_by_position(position_of, decisions.departures),
            _axes_by_position(position_of, decisions.local_outputs),
            # A factor that is cut over no axes equals a factor without an entry.
            tuple(
                [
                    tuple([(factor, tuple(axes)) for factor, axes in cuts[name].items() if axes])
                    if name in cuts
                    else ()
                    for name in structure.op_names
                ]
            ),
            tuple([outputs.get(name) for name in structure.op_names]) if outputs else (),
            _number_segments(structure.op_names, decisions.recompute),
            tuple([tuple([position_of[value.name] for value in values]) for values in borders]),
        ),
    )


class ChunkKey:
    """A key with a stored hash, as its tuples are long and caches look it up several times."""

    __slots__ = ("_compared", "_hash")

    def __init__(self, description: object, decisions: object) -> None:
        self._compared = description, decisions
        self._hash = hash(self._compared)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, ChunkKey)
            and self._hash == other._hash
            and self._compared == other._compared
        )


@dataclass(frozen=True)
class _GraphStructure:
    """A graph without names.

    Args:
        description: hashable description, equal for graphs that differ only in names.
        position_of: position of each value in order of first appearance, by name.
        op_names: names of the operators, in order.
    """

    description: ChunkKey
    position_of: Mapping[str, int]
    op_names: tuple[str, ...]


_STRUCTURES: WeakKeyDictionary[Graph, _GraphStructure] = WeakKeyDictionary()
"""Structure of each graph. Plans with equal stages share the graphs of their chunks."""


def _structure_of(graph: Graph) -> _GraphStructure:
    structure = _STRUCTURES.get(graph)
    if structure is None:
        structure = _STRUCTURES[graph] = _describe_graph(graph)
    return structure


def _describe_graph(graph: Graph) -> _GraphStructure:
    # Only values without a producer; activations are described by the operators that compute them.
    initial_values: tuple[tuple[Value, ...], ...] = (
        graph.input_values,
        graph.parameters,
        graph.buffers,
        tuple(graph.constants),
    )
    position_of: dict[str, int] = {}
    for value in (
        *(value for values in initial_values for value in values),
        *(value for op in graph.ops for value in op.outputs),
    ):
        position_of.setdefault(value.name, len(position_of))
    description = (
        graph.loss is None,
        tuple(tuple(map(_describe_value, values)) for values in initial_values),
        tuple(_describe_op(op, position_of) for op in graph.ops),
        tuple((position_of[old.name], position_of[new.name]) for old, new in graph.updates),
    )
    names = tuple(op.name for op in graph.ops)
    return _GraphStructure(ChunkKey(description, ()), position_of, names)


def _describe_value(value: Value) -> tuple[object, ...]:
    return (
        *(value.shape, value.dtype, value.stored_dtype, value.requires_grad),
        value.origin is Origin.PARAMETER,
    )


def _describe_op(op: Op, position_of: Mapping[str, int]) -> tuple[object, ...]:
    return (
        op.target,
        op.structure,
        tuple(position_of[value.name] for value in op.inputs),
        tuple(map(_describe_value, op.outputs)),
    )


def _axes_by_position(
    position_of: Mapping[str, int], axes_by_name: Mapping[str, CutAxes]
) -> tuple[tuple[int, CutAxes], ...]:
    """Return the entries of the values of a graph, as (position, axes)."""
    entries = axes_by_name.items()
    return tuple(sorted((position_of[name], axes) for name, axes in entries if name in position_of))


def _number_segments(
    op_names: tuple[str, ...], recompute: Mapping[str, Recompute]
) -> tuple[tuple[int, bool] | None, ...]:
    """Return, for each operator, the number of its recomputed segment in order of first appearance
    and whether communication is repeated; None for an operator that is not recomputed."""
    if not recompute:
        return ()
    numbers: dict[str, int] = {}
    return tuple(
        None
        if (each := recompute.get(name)) is None
        else (numbers.setdefault(each.segment, len(numbers)), each.communication)
        for name in op_names
    )
