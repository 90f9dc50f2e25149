"""New values of buffers in a step with several micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from shardwright.core.graph.graph import Graph, SampleReduction, WholeBatch


class BufferUpdates:
    """Buffers during a step with several micro-batches.

    A buffer that the model updates once per batch keeps its value until the step ends, as several
    micro-batches may be in flight. Running statistics of batch norms per micro-batch are updated by
    one micro-batch after another, as in gradient accumulation.

    Args:
        graph: the graph of a micro-batch.
        buffers: the values before the step, by name.

    Attributes:
        values: the values that the next micro-batch reads, by name.
    """

    def __init__(self, graph: Graph, buffers: Mapping[str, Tensor]) -> None:
        whole_batch = graph.whole_batch
        self._reductions: dict[str, SampleReduction | None] = (
            dict(whole_batch.updates) if isinstance(whole_batch, WholeBatch) else {}
        )
        self._before = buffers
        self.values = dict(buffers)
        self._of_micro_batches: dict[str, list[Tensor]] = {}

    def add(self, updates: Iterable[tuple[str, Tensor]]) -> None:
        """Add the new values of buffers that one micro-batch has computed, by name."""
        for name, tensor in updates:
            if name in self._reductions:
                self._of_micro_batches.setdefault(name, []).append(tensor)
            else:
                self.values[name] = tensor

    def end_step(self) -> dict[str, Tensor]:
        """Return the new values of the buffers that the step has updated, by name."""
        for name, tensors in self._of_micro_batches.items():
            self.values[name] = reduce_micro_batches(tensors, self._reductions[name])
        # By identity: a program returns a new tensor for each buffer that it updates.
        return {n: t for n, t in self.values.items() if t is not self._before.get(n)}


def reduce_micro_batches(tensors: list[Tensor], reduction: SampleReduction | None) -> Tensor:
    """Return the mean or sum of the tensors of all micro-batches; the first tensor if `reduction`
    is None, as all are equal then."""
    if reduction is None:
        return tensors[0]
    # `sum` returns int64 for smaller integers.
    total = torch.stack(tensors).sum(0, dtype=tensors[0].dtype)
    return total / len(tensors) if reduction == "mean" else total
