"""A small pipeline, to measure what its passes and steps take beside operators."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardwright.capture.capture import capture
from shardwright.graph.graph import Graph
from shardwright.graph.split import assign_neighbors
from shardwright.layout.layout import Layout
from shardwright.parallel.module import parallel_module
from shardwright.partition.communication import storage_as_used
from shardwright.partition.decisions import Decisions
from shardwright.partition.fold_axes import dtensor_axes
from shardwright.partition.partitioned import Partitioned
from shardwright.partition.pipeline_spec import PipelineSpec
from shardwright.runtime.devices import Devices

ROWS, WIDTH = 8, 64
"""Of each layer and micro-batch."""


class SmallPipeline:
    """Linear layers and a loss, parallelized as any model: each process is a stage with a layer.

    Args:
        stages: processes of the running process group.
        micro_batches: of each step.
    """

    OPERATORS = 2
    """Of a pass of a stage on average, as the time model counts them: one forward, and gradients of
    inputs and of weights."""

    def __init__(self, stages: int, device: torch.device, micro_batches: int) -> None:
        # All processes are given the same batch.
        torch.manual_seed(0)
        graph = capture(_Layers(stages), _batch(1))
        mesh = Layout((1,), ("dp",))
        decisions = Decisions({}, storage_as_used(graph, mesh, {}))
        partitioned = Partitioned(graph, mesh, decisions, _pipeline(graph, stages, micro_batches))
        devices = Devices.of_process(mesh, device, stages, dtensor_axes(partitioned))
        self._module = parallel_module(_Layers(stages), partitioned, devices)
        self._whole = _batch(micro_batches)

    def train(self) -> None:
        """Forward and backward through all stages, of all micro-batches."""
        self._module.train_step(*self._whole)
        self._module.zero_grad()


def _batch(micro_batches: int) -> tuple[Tensor, Tensor]:
    rows = micro_batches * ROWS
    return torch.ones(rows, WIDTH), torch.zeros(rows, dtype=torch.int64)


class _Layers(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(x, labels)


def _pipeline(graph: Graph, stages: int, micro_batches: int) -> PipelineSpec:
    numbers = {op.name: int(op.module.removeprefix("layers.")) for op in graph.ops if op.module}
    return PipelineSpec(stages, micro_batches, chunk_of=assign_neighbors(graph, numbers))
