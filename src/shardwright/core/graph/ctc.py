"""CTC (connectionist temporal classification) losses as an operator with static shapes.

ATen's operator is not used in graphs, as it saves a tensor for the backward pass whose shape
depends on the values of `target_lengths`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


@torch.library.custom_op("shardwright::ctc_losses", mutates_args=())
def ctc_losses(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    """Compute the loss of each sample, `[batch]`, like `torch.nn.functional.ctc_loss`.

    Args:
        log_probs: `[time, batch, classes]`.
        targets: class indices, `[batch, length]`, or concatenated, `[sum of lengths]`.
        input_lengths, target_lengths: number of time steps and of targets per sample, `[batch]`.
        blank: index of the blank class.
        zero_infinity: whether infinite losses, and their gradients, become 0.
    """
    lengths = input_lengths, target_lengths
    # Without the second result, log alpha, whose shape depends on the values of `target_lengths`.
    losses: Tensor = aten._ctc_loss(log_probs, targets, *lengths, blank, zero_infinity)[0]
    # `aten._ctc_loss` reads `zero_infinity` in the backward pass only.
    return torch.where(losses == torch.inf, 0, losses) if zero_infinity else losses


@torch.library.custom_op("shardwright::ctc_gradient", mutates_args=())
def ctc_gradient(
    gradient: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    """Compute the gradient of CTC losses with respect to `log_probs`, from the gradient of the
    losses, `[batch]`.

    Repeats the forward pass, since its intermediate results are not saved.
    """
    lengths = input_lengths, target_lengths
    forward = aten._ctc_loss(log_probs, targets, *lengths, blank, zero_infinity)
    result: Tensor = aten._ctc_loss_backward(
        gradient.contiguous(), log_probs, targets, *lengths, *forward, blank, zero_infinity
    )
    return result


CTC_LOSSES = torch.ops.shardwright.ctc_losses.default


@ctc_losses.register_fake
def _(log_probs: Tensor, *_: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1])


@ctc_gradient.register_fake
def _(gradient: Tensor, log_probs: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(log_probs)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.options = inputs[4:]


def _ctc_backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    # No gradients of targets, lengths and options.
    return ctc_gradient(gradient, *ctx.saved_tensors, *ctx.options), *(None,) * 5


ctc_losses.register_autograd(_ctc_backward, setup_context=_save_for_backward)
