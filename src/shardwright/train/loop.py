"""The training loop, for what `parallelize` returns and for any module that returns a loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from time import perf_counter

import torch
from torch import Tensor, nn

from shardwright.parallel.module import ParallelModule
from shardwright.train.data import Batches
from shardwright.train.position import BEGINNING, Position
from shardwright.train.step_log import StepRecord


def train(
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Batches,
    *,
    epochs: int,
    device: torch.device,
    on_step: Callable[[StepRecord], None],
    max_steps: int | None = None,
    start: Position = BEGINNING,
    after_step: Callable[[Position], None] | None = None,
    rate: Callable[[int], float] | None = None,
    clip_norm: float | None = None,
) -> None:
    """Train `net`, which returns the loss of a batch, for `epochs` epochs.

    Args:
        device: where the batches go before `net` reads them.
        on_step: called after every step.
        max_steps: stop after that many steps, counted over all epochs and from the very first.
        start: where to go on.
        after_step: called after `on_step` with the place that the run has come to.
        rate: gives the learning rate of each step, by default that of the optimizer.
        clip_norm: norm of all gradients together above which they are scaled down to it.
    """
    net.train()
    left = None if max_steps is None else max(0, max_steps - start.step)
    for place, batch in islice(_steps(batches, epochs, start), left):
        started = perf_counter()
        loss = _with_gradients(net, [tensor.to(device) for tensor in batch], clip_norm)
        if rate is not None:
            for group in optimizer.param_groups:
                group["lr"] = rate(place.step)
        optimizer.step()
        optimizer.zero_grad()
        speed = batches.batch_size / (perf_counter() - started)
        on_step(StepRecord(place.epoch, place.batch, loss.item(), speed))
        if after_step is not None:
            after_step(place.next(len(batches)))


def _with_gradients(net: nn.Module, batch: Sequence[Tensor], clip_norm: float | None) -> Tensor:
    """The loss of a batch, with its gradients in the parameters; over all micro-batches and stages
    where the net is run as planned."""
    if isinstance(net, ParallelModule):
        planned = net.train_step(*batch)
        if clip_norm is not None:
            net.clip_grad_norm_(clip_norm)
        return planned
    loss: Tensor = net(*batch)
    loss.backward()  # type: ignore[no-untyped-call]
    if clip_norm is not None:
        nn.utils.clip_grad_norm_(net.parameters(), clip_norm)
    return loss


def _steps(
    batches: Batches, epochs: int, start: Position
) -> Iterator[tuple[Position, tuple[Tensor, ...]]]:
    place = start
    while place.epoch < epochs:
        for batch in batches.epoch(place.epoch, place.batch):
            yield place, batch
            place = place.next(len(batches))


class MeanAbsoluteError(nn.Module):
    """Mean of |output - target|; a target such as [batch] is compared with outputs [batch, 1]."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.l1_loss(output, target.to(output.dtype).view(output.shape))


class MeanSquaredError(nn.Module):
    """Mean of (output - target)²; a target such as [batch] is compared with outputs [batch, 1]."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, target.to(output.dtype).view(output.shape))


LOSSES: dict[str, type[nn.Module]] = {
    "cross_entropy": nn.CrossEntropyLoss,
    "mae": MeanAbsoluteError,
    "mse": MeanSquaredError,
}
