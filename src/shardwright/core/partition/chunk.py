"""What one pipeline stage runs of a model; without stages, the whole model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

from shardwright.core.graph.graph import Graph, Value
from shardwright.core.layout.layout import DeviceMatrix, TensorLayout
from shardwright.core.partition.communication import Communication, communication
from shardwright.core.partition.decisions import CutAxes, Decisions
from shardwright.core.partition.overlap import Overlap, overlaps
from shardwright.core.partition.transfer import Transfer


@dataclass(frozen=True, eq=False)
class Chunk:
    """What one stage runs of a model, for one micro-batch.

    Args:
        number: in the order in which chunks run.
        stage: that owns it.
        graph: its operators; see `GraphChunk`.
        mesh: the device matrix of its stage.
        decisions: of the whole model, with how values arrive from the chunk before and how they are
            left for the next.
        arriving, leaving: the values that are received and sent.
        returned: outputs of the model that are computed here.
        splits_backward: whether its backward pass comes in two halves, gradients of inputs first.
    """

    number: int
    stage: int
    graph: Graph
    mesh: DeviceMatrix
    decisions: Decisions
    arriving: tuple[Value, ...] = ()
    leaving: tuple[Value, ...] = ()
    returned: tuple[Value, ...] = ()
    splits_backward: bool = False

    @cached_property
    def communication(self) -> Communication:
        """All that its devices send each other; everybody who asks reads the same."""
        return communication(self.graph, self.mesh, self.decisions)

    @cached_property
    def overlaps(self) -> dict[Transfer, Overlap]:
        """What its programs compute beside redistributions."""
        return overlaps(self.graph, self.communication, delays=not self.splits_backward)

    @property
    def border_bytes(self) -> tuple[int, int]:
        """Bytes that one device sends to the next chunk, and as gradients to the one before."""
        departures, arrivals = self.decisions.departures, self.decisions.arrivals
        gradients = [value for value in self.arriving if value.requires_grad]
        forward = sum(self._local_bytes(v, departures[v.name]) for v in self.leaving)
        return forward, sum(self._local_bytes(v, arrivals[v.name]) for v in gradients)

    def _local_bytes(self, value: Value, axes: CutAxes) -> int:
        return prod(TensorLayout(self.mesh, axes).shard_shape(value.shape)) * value.itemsize
