"""The training loop for modules that return their loss, parallelized or not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from time import perf_counter

import torch
from torch import Tensor, nn

from shardwright.core.checkpoint.position import BEGINNING, Position
from shardwright.core.parallel.module import ParallelModule
from shardwright.core.runtime.exposed_communication import WaitTimer
from shardwright.run.data.data import Batches
from shardwright.run.data.evaluation import Evaluation
from shardwright.run.loop.non_finite import NonFinite, NonFiniteGuard, is_finite
from shardwright.run.loop.step_log import StepRecord


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
    after_step: Callable[[Position], bool | None] | None = None,
    rate: Callable[[int], float] | None = None,
    clip_norm: float | None = None,
    non_finite: NonFinite = "stop",
    evaluation: Evaluation | None = None,
) -> None:
    """Train `net` for `epochs` epochs.

    Args:
        net: a module that returns the loss of a batch; a `ParallelModule` runs its pipeline
            schedule and micro-batches.
        batches: the training data.
        device: the device to which batches are moved.
        on_step: called after every step with its record.
        max_steps: total number of steps, over all epochs and including those before `start`.
        start: position of the first batch; after a restart, the position of the checkpoint.
        after_step: called after `on_step` with the new position; the run stops if it returns True.
        rate: maps a step, counted from 0, to its learning rate; by default the optimizer's own.
        clip_norm: maximum global norm of the gradients; None for no clipping.
        non_finite: `stop` the run at a step whose loss or gradient norm is not finite, or `skip`
            the step.
        evaluation: periodic evaluation, whose loss is added to the step record.

    Raises:
        NonFiniteError: on every rank, if a loss or gradient norm is not finite and `non_finite` is
            `stop`, or if parameters are not finite; names the step and the operator.
    """
    net.train()
    # `islice` rejects a negative number, as of a checkpoint beyond `max_steps`.
    remaining = None if max_steps is None else max(0, max_steps - start.step)
    guard = NonFiniteGuard(net, optimizer, non_finite)
    waits = net.execution.devices.waits if isinstance(net, ParallelModule) else WaitTimer()
    for position, batch in islice(_iterate_remaining_batches(batches, epochs, start), remaining):
        # Resets the timer: waits in an evaluation or a checkpoint do not belong to the step.
        waits.take_seconds()
        started = perf_counter()
        inputs = [tensor.to(device) for tensor in batch]
        # Before the forward pass, which updates buffers and draws random numbers.
        guard.save_state()
        finite, loss, norm = is_finite(*_run_forward_backward(net, inputs, clip_norm))
        if finite:
            if rate is not None:
                for group in optimizer.param_groups:
                    group["lr"] = rate(position.step)
            optimizer.step()
            optimizer.zero_grad()
        else:
            guard.undo(inputs, loss, norm, _describe_step(batches, position))
        # `is_finite` has waited for forward and backward; the optimizer's kernels count in the next
        # step.
        speed, exposed = batches.batch_size / (perf_counter() - started), waits.take_seconds()
        next_position = batches.position_after(position)
        evaluation_loss = (
            None if evaluation is None else evaluation.loss_if_due(next_position.step, net, device)
        )
        learning_rate = float(optimizer.param_groups[0]["lr"])
        record = StepRecord(
            position.epoch, position.batch, loss, speed, evaluation_loss, learning_rate
        )
        on_step(replace(record, exposed_communication=exposed))
        if after_step is not None and after_step(next_position):
            break


def _run_forward_backward(
    net: nn.Module, batch: Sequence[Tensor], clip_norm: float | None
) -> tuple[Tensor, Tensor]:
    """Run forward and backward, and clip gradients.

    Returns:
        The loss, and the global gradient norm before clipping.
    """
    # Without clipping too, the norm tells whether the gradients are finite.
    max_norm = math.inf if clip_norm is None else clip_norm
    if isinstance(net, ParallelModule):
        return net.train_step(*batch), net.clip_grad_norm_(max_norm)
    loss: Tensor = net(*batch)
    loss.backward()  # type: ignore[no-untyped-call]
    return loss, nn.utils.clip_grad_norm_(net.parameters(), max_norm)


def _describe_step(batches: Batches, position: Position) -> str:
    first = batches.first_sample(position)
    last = first + batches.batch_size - 1
    return (
        f"step {position.step + 1} (epoch {position.epoch}, batch {position.batch}: samples {first}"
        f" to {last} of the epoch's order)"
    )


def _iterate_remaining_batches(
    batches: Batches, epochs: int, start: Position
) -> Iterator[tuple[Position, tuple[Tensor, ...]]]:
    position = start
    for epoch in range(start.epoch, epochs):
        # The epoch in which the run resumed may have no full batch left, and so never advances
        # `position` to the next epoch.
        if position.epoch < epoch:
            position = Position(position.step, epoch)
        for batch in batches.epoch(epoch, batches.first_sample(position)):
            yield position, batch
            position = batches.position_after(position)


class MeanAbsoluteError(nn.Module):
    """Mean of |output - target|, with the target reshaped to the output's shape."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        # `l1_loss` would broadcast a target [n] against an output [n, 1] to [n, n].
        return nn.functional.l1_loss(output, target.to(output.dtype).view(output.shape))


class MeanSquaredError(nn.Module):
    """Mean of (output - target)², with the target reshaped to the output's shape."""

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, target.to(output.dtype).view(output.shape))


LOSSES: dict[str, type[nn.Module]] = {
    "cross_entropy": nn.CrossEntropyLoss,
    "mae": MeanAbsoluteError,
    "mse": MeanSquaredError,
}
