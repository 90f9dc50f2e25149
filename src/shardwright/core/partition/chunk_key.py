"""Hashable keys of chunks that are equal for chunks that differ only in names."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.core.graph.graph import Kind, Op, Value
from shardwright.core.partition.chunk import Chunk


def chunk_key(chunk: Chunk) -> tuple[object, ...]:
    """Key of everything that memory and time of a chunk depend on. Names of values and operators
    are replaced by numbers in order of first appearance."""
    return tuple(_NamelessChunk(chunk).lines())


class _NamelessChunk:
    """Describes a chunk with numbers instead of names."""

    def __init__(self, chunk: Chunk) -> None:
        self.chunk, self.decisions = chunk, chunk.decisions
        self._numbers: dict[object, int] = {}

    def lines(self) -> Iterator[object]:
        chunk, graph, decisions = self.chunk, self.chunk.graph, self.decisions
        # Whether there is a chunk before decides whether gradients of inputs are computed.
        yield decisions.sharding, decisions.bucket_bytes, chunk.number > 0, graph.loss is None
        read = (graph.input_values, graph.parameters, graph.buffers, tuple(graph.constants))
        for values in read:
            yield tuple(map(self._value, values))
        for op in graph.ops:
            yield self._op(op)
        yield tuple((self._number(old), self._number(new)) for old, new in graph.updates)
        for values in (chunk.arriving, chunk.leaving, chunk.returned, graph.output_values):
            yield tuple(map(self._number, values))

    def _number(self, named_object: object) -> int:
        return self._numbers.setdefault(named_object, len(self._numbers))

    def _value(self, value: Value) -> tuple[object, ...]:
        name, decisions = value.name, self.decisions
        return (
            self._number(value),
            *(value.shape, value.dtype, value.stored_dtype, value.requires_grad),
            decisions.storage.get(name) if value.kind is Kind.PARAMETER else None,
            *(decisions.arrivals.get(name), decisions.departures.get(name)),
        )

    def _op(self, op: Op) -> tuple[object, ...]:
        decisions, recompute = self.decisions, self.decisions.recompute.get(op.name)
        cuts = decisions.cuts.get(op.name, {})
        return (
            op.target,
            op.structure,
            tuple(map(self._number, op.inputs)),
            tuple(map(self._value, op.outputs)),
            tuple((factor, tuple(axes)) for factor, axes in cuts.items() if axes),
            decisions.outputs.get(op.name),
            None
            if recompute is None
            else (self._number(recompute.segment), recompute.communication),
        )
