"""The training loop. It knows nothing of devices: `net` may be any module that returns a loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from time import perf_counter

import torch
from torch import Tensor, nn

from shardwright.train.data import Batches
from shardwright.train.steps import Step


def train(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Batches,
    *,
    epochs: int,
    device: torch.device,
    on_step: Callable[[Step], None],
    max_steps: int | None = None,
) -> None:
    """Train `net`, which returns the loss of a batch, for `epochs` epochs.

    Args:
        device: where the batches go before `net` reads them.
        on_step: called after every step.
        max_steps: stop after that many steps, counted over all epochs.
    """
    net.train()
    for epoch, step, batch in islice(_steps(batches, epochs), max_steps):
        started = perf_counter()
        loss = net(*(tensor.to(device) for tensor in batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        on_step(Step(epoch, step, loss.item(), batches.batch_size / (perf_counter() - started)))


def _steps(batches: Batches, epochs: int) -> Iterator[tuple[int, int, tuple[Tensor, ...]]]:
    for epoch in range(epochs):
        for step, batch in enumerate(batches.epoch(epoch)):
            yield epoch, step, batch
