"""A chunk: consecutive operators that a pipeline stage runs; the full model without stages."""

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
    """Consecutive operators of a model on one pipeline stage, for one micro-batch.

    Args:
        number: index of the chunk in model order.
        stage: index of the stage that runs the chunk.
        graph: operators of the chunk, as a graph.
        mesh: device matrix of the stage.
        decisions: decisions for the model, with the layouts of received and sent values.
        arriving: values that the chunk receives from the previous chunk.
        leaving: values that the chunk sends to the next chunk.
        returned: outputs of the model that the chunk computes.
        splits_backward: whether the schedule runs the backward pass in two passes: gradients of
            inputs, then of parameters.
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
        """Communication within the chunk, without point-to-point communication between chunks."""
        # `cached_property` writes into `__dict__`, past the `__setattr__` of a frozen dataclass.
        return communication(self.graph, self.mesh, self.decisions)

    @cached_property
    def overlaps(self) -> dict[Transfer, Overlap]:
        """Computation that overlaps each redistribution; no entry for a redistribution without
        overlap."""
        return overlaps(
            self.graph, self.communication, delay_weight_gradients=not self.splits_backward
        )

    @property
    def border_bytes(self) -> tuple[int, int]:
        """Bytes per micro-batch that one device sends to adjacent chunks: (outputs to the next
        chunk, gradients to the previous chunk)."""
        departures, arrivals = self.decisions.departures, self.decisions.arrivals
        # Values without a gradient, such as masks and targets, are sent forward only.
        gradients = [value for value in self.arriving if value.requires_grad]
        forward = sum(self._local_bytes(v, departures[v.name]) for v in self.leaving)
        return forward, sum(self._local_bytes(v, arrivals[v.name]) for v in gradients)

    @property
    def received_gradient_bytes(self) -> int:
        """Bytes per micro-batch of the gradients that one device receives from the next chunk."""
        # The gradient of a value arrives in the layout in which the value was sent.
        departures = self.decisions.departures
        return sum(
            self._local_bytes(v, departures[v.name]) for v in self.leaving if v.requires_grad
        )

    def _local_bytes(self, value: Value, axes: CutAxes) -> int:
        return prod(TensorLayout(self.mesh, axes).shard_shape(value.shape)) * value.itemsize
