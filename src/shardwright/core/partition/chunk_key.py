"""Hashable keys of chunks; the keys of chunks that differ only in names are equal."""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.core.graph.graph import Op, Origin, Value
from shardwright.core.partition.chunk import Chunk


def chunk_key(chunk: Chunk) -> tuple[object, ...]:
    """Return a key of all properties of a chunk on which its memory and time depend.

    Values and segments are numbered in order of first appearance.
    """
    return tuple(_ChunkDescription(chunk).describe_chunk())


class _ChunkDescription:
    """Hashable description of a pipeline chunk, in which values and recomputed segments have
    indices instead of names."""

    def __init__(self, chunk: Chunk) -> None:
        self.chunk, self.decisions = chunk, chunk.decisions
        self._numbers: dict[object, int] = {}

    def describe_chunk(self) -> Iterator[object]:
        chunk, graph, decisions = self.chunk, self.chunk.graph, self.decisions
        # Gradients of inputs are computed only if there is a previous chunk.
        yield decisions.sharding, decisions.bucket_bytes, chunk.number > 0, graph.loss is None
        # Only values without a producer; activations are described by the operators that compute
        # them.
        initial_values = (
            graph.input_values,
            graph.parameters,
            graph.buffers,
            tuple(graph.constants),
        )
        for values in initial_values:
            yield tuple(map(self._describe_value, values))
        for op in graph.ops:
            yield self._describe_op(op)
        yield tuple(
            (self._number_by_first_occurrence(old), self._number_by_first_occurrence(new))
            for old, new in graph.updates
        )
        # Received, sent and returned values stay alive longer than other activations.
        for values in (chunk.arriving, chunk.leaving, chunk.returned, graph.output_values):
            yield tuple(map(self._number_by_first_occurrence, values))

    def _number_by_first_occurrence(self, value_or_segment: object) -> int:
        """Return the index of a value or of a segment name in the order of first appearance."""
        # Repeated layers have different names, but first appearances in the same order.
        return self._numbers.setdefault(value_or_segment, len(self._numbers))

    def _describe_value(self, value: Value) -> tuple[object, ...]:
        name, decisions = value.name, self.decisions
        return (
            self._number_by_first_occurrence(value),
            *(value.shape, value.dtype, value.stored_dtype, value.requires_grad),
            decisions.storage.get(name) if value.origin is Origin.PARAMETER else None,
            *(decisions.arrivals.get(name), decisions.departures.get(name)),
            decisions.local_outputs.get(name),
        )

    def _describe_op(self, op: Op) -> tuple[object, ...]:
        decisions, recompute = self.decisions, self.decisions.recompute.get(op.name)
        cuts = decisions.cuts.get(op.name, {})
        return (
            op.target,
            op.structure,
            tuple(map(self._number_by_first_occurrence, op.inputs)),
            tuple(map(self._describe_value, op.outputs)),
            # A factor that is cut over no axes equals a factor without an entry.
            tuple((factor, tuple(axes)) for factor, axes in cuts.items() if axes),
            decisions.outputs.get(op.name),
            None
            if recompute is None
            else (self._number_by_first_occurrence(recompute.segment), recompute.communication),
        )
