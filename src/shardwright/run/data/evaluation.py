"""Periodic evaluation: the loss of a model on held-out data."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import torch
from torch import nn

from shardwright.run.data.data import Batches


@dataclass(frozen=True)
class Evaluation:
    """Evaluation data and interval; each evaluation uses the same batches.

    Args:
        every: number of training steps between two evaluations.
        max_batches: number of batches per evaluation; None for all.
    """

    batches: Batches
    every: int
    max_batches: int | None = None

    @torch.no_grad()
    def loss_if_due(self, step: int, net: nn.Module, device: torch.device) -> float | None:
        """Compute the mean loss if `step` is a multiple of the interval; otherwise return None.

        Args:
            step: number of finished training steps.
            net: a module that returns the loss of a batch; in training mode afterwards.
            device: the device to which batches are moved.
        """
        if step % self.every:
            return None
        net.eval()
        # The order of epoch 0 each time, so that `max_batches` selects the same samples.
        losses = [
            float(net(*(tensor.to(device) for tensor in batch)))
            for batch in islice(self.batches.epoch(0), self.max_batches)
        ]
        net.train()
        # Batches have equal sizes, so the mean over batches is the mean over samples.
        return sum(losses) / len(losses)
