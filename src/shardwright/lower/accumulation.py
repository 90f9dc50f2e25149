"""A training step of one pipeline stage: forward and backward, micro-batch after micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardwright.decided import Decided
from shardwright.errors import PlanError
from shardwright.graph.graph import Graph
from shardwright.lower.collectives import wait
from shardwright.lower.devices import Devices
from shardwright.lower.loss_weights import LossWeights, arrival_axes
from shardwright.lower.micro_batches import micro_batch
from shardwright.lower.program import lower
from shardwright.lower.random import seed_of
from shardwright.lower.residents import Residents
from shardwright.pipelining import Pipelining


class Accumulation:
    """Runs the micro-batches of a batch and adds up their gradients.

    Args:
        graph: the model's, for one micro-batch.

    Raises:
        PlanError: if the model has no loss.
    """

    def __init__(
        self, graph: Graph, devices: Devices, decided: Decided, pipeline: Pipelining
    ) -> None:
        if graph.loss is None:
            raise PlanError("the model returns no loss, one number that a gradient starts from")
        self.graph = graph
        self.micro_batches = pipeline.micro_batches
        resident = self.micro_batches > 1
        self.program = lower(graph, devices, decided, resident, pending_loss=True)
        self.residents = Residents(self.program)
        self._weights = LossWeights(graph, devices, arrival_axes(graph, decided))
        self._sums = pipeline.loss_reduction == "sum"
        self._place = next(i for i, value in enumerate(graph.outputs) if value is graph.loss)

    def compile(self, compiler: Callable[..., Any]) -> None:
        """Runs the program as `compiler` makes it of its function."""
        self.program = replace(self.program, function=compiler(self.program.function))

    def train(
        self,
        shards: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        leaves: Sequence[Any],
        seed: int,
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """Forward and backward over all micro-batches, and what is reduced once after them.

        Args:
            shards: by name this rank's part of each parameter, as it is stored.
            buffers: by name.
            leaves: of the call's arguments, with the whole batch.
            seed: of the step.

        Returns:
            The loss of the batch; the gradients of the stored shards; the new values of buffers.
        """
        loss, changed = self.run(shards, buffers, leaves, seed)
        return loss, self.residents.end(), changed

    def run(
        self,
        shards: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        leaves: Sequence[Any],
        seed: int,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """As `train`, but leaves the gradients for `residents.end()` to hand out."""
        count = self.micro_batches
        pieces = [micro_batch(leaves, number, count) for number in range(count)]
        self.residents.begin(shards)
        weights = [1.0] * count if self._sums else self._weights(pieces)
        state, losses = dict(buffers), []
        for number, (piece, weight) in enumerate(zip(pieces, weights, strict=True)):
            parameters = self.residents.tensors()
            outputs, updates = self.program(parameters, state, piece, seed_of(seed, number))
            loss: Tensor = outputs[self._place]
            # Others, such as logits, need not stay through the backward pass.
            del outputs
            if loss.requires_grad:
                loss.backward(torch.ones_like(loss) * weight)  # type: ignore[no-untyped-call]
            losses.append((loss.detach(), weight))
            state.update((b.name, t) for (b, _), t in zip(self.graph.updates, updates, strict=True))
        changed = {name: tensor for name, tensor in state.items() if tensor is not buffers[name]}
        # All ranks meet here first: no backward pass waits for the loss of others.
        return torch.stack([wait(loss) * weight for loss, weight in losses]).sum(), changed
