"""A model with a given loss, and its graph of a micro-batch, interpreted."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.core.graph.graph import Graph, WholeBatch
from shardwright.core.graph.interpreter import interpret
from shardwright.core.micro_batches.whole_batch import with_whole_batch
from shardwright.core.parallel.whole_batch_values import GlobalBatchValues
from shardwright.core.partition.decisions import Decisions
from shardwright.core.partition.partitioned import Partitioned
from shardwright.core.partition.pipeline_spec import PipelineSpec
from shardwright.core.runtime.devices import Devices

Loss = Callable[[nn.ModuleDict, Tensor, Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(
            {
                "linear": nn.Linear(6, 6),
                "norm": nn.LayerNorm(6),
                "batch_norm": nn.BatchNorm1d(6, track_running_stats=False),
                "attention": nn.MultiheadAttention(6, 2, batch_first=True),
            }
        )
        self.token = nn.Parameter(torch.randn(1, 1, 6))
        self.loss = loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.parts, self.parts["linear"](x), y)


def rows(h: Tensor) -> Tensor:
    return h.mean(1)


def token(h: Tensor, token: Tensor) -> Tensor:
    return torch.cat([token.expand(h.shape[0], 1, 6), h], 1)


CLASSES, ONES = torch.arange(1.0, 7), torch.ones(6).double()


def with_gradient(model: Model, x: Tensor, y: Tensor) -> Tensor:
    """The loss of a batch and the gradient of a parameter."""
    loss = model(x, y)
    (gradient,) = torch.autograd.grad(loss, model.parts["linear"].weight)
    return torch.cat([loss.detach().reshape(1), gradient.flatten()])


def in_micro_batches(graph: Graph, model: nn.Module, leaves: list[Tensor], count: int) -> Tensor:
    """Loss and gradient from the graph of a micro-batch, interpreted."""
    layout = sw.Layout((1,), ("d",))
    pipeline = PipelineSpec(micro_batches=count)
    partitioned = Partitioned(graph, layout, Decisions({}, {}), pipeline)
    of_batch = GlobalBatchValues(partitioned, Devices.of_rank(layout, 0))(leaves, {})
    parameters, total = dict(model.named_parameters()), torch.zeros(1, dtype=torch.float64)
    assert isinstance(graph.whole_batch, WholeBatch)
    weight = 1 / count if graph.whole_batch.reduction == "mean" else 1.0
    for number, values in enumerate(of_batch):
        piece = tuple(leaf.chunk(count)[number] for leaf in leaves)
        loss, _ = interpret(graph, parameters, values, piece)
        (gradient,) = torch.autograd.grad(loss, parameters["parts.linear.weight"])
        total = total + torch.cat([loss.detach().reshape(1), gradient.flatten()]) * weight
    return total


def batch(samples: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 3, 6), torch.tensor([0, 1, 2, 3, 4, 5, 0, 0])[:samples]


def of_micro_batch(model: nn.Module, samples: int) -> Graph:
    """The graph of a micro-batch of so many of 8 samples."""

    def captured(count: int) -> Graph:
        return graph_of(model, count * samples)

    return with_whole_batch(captured(1), 8 // samples, captured)


def graph_of(model: nn.Module, samples: int) -> Graph:
    x, y = batch(samples)
    return sw.capture(model, (x.to(next(model.parameters()).dtype), y))
