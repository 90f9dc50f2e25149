"""The loss of a model on data that it is not trained on."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import torch
from torch import nn

from shardwright.run.data.data import Batches


@dataclass(frozen=True)
class Evaluation:
    """The mean loss of the same batches, every so many steps.

    Args:
        every: steps from one to the next.
        most: how many batches; None for all.
    """

    batches: Batches
    every: int
    most: int | None = None

    @torch.no_grad()
    def after(self, step: int, net: nn.Module, device: torch.device) -> float | None:
        """The mean loss after so many steps, if it is due; `net` is in training before and after.

        Args:
            net: returns the loss of a batch.
        """
        if step % self.every:
            return None
        net.eval()
        losses = [
            float(net(*(tensor.to(device) for tensor in batch)))
            for batch in islice(self.batches.epoch(0), self.most)
        ]
        net.train()
        return sum(losses) / len(losses)
