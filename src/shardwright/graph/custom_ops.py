"""Shardwright's own operators, which replace ATen operators whose form prevents sharding.

All are pure functions of tensors and run in eager mode and under `torch.compile`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

MEAN = 1
"""`reduction` of the losses, as ATen numbers it: 0 none, 1 mean, 2 sum."""

_REDUCTIONS = {0: "none", MEAN: "mean", 2: "sum"}


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """The cross entropy of `torch.nn.functional`, but always with the class dimension last.

    Args:
        logits: `[..., classes]`.
        target: class indices `[...]`, or probabilities `[..., classes]` of a floating dtype.
        weight: of each class, `[classes]`.
        reduction: 0 none (the result is `[...]`), 1 mean, 2 sum.
    """
    rows = logits.shape[:-1]
    classes = logits.shape[-1]
    probabilities = target.is_floating_point()
    loss = F.cross_entropy(
        logits.reshape(-1, classes),
        target.reshape(-1, classes) if probabilities else target.reshape(-1),
        weight,
        reduction=_REDUCTIONS[reduction],
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
    )
    return loss if reduction else loss.reshape(rows)


def batch_norm_train(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor] | Tensor:
    """Batch normalization with batch statistics that does not modify the running ones.

    Args:
        x: `[n, c, ...]`, normalized over all dimensions but `c`.
        weight, bias, running_mean, running_var: `[c]` each or None.

    Returns:
        The normalized `x`, and the new running statistics (without gradient) if there are any.
    """
    if running_mean is None or running_var is None:
        return F.batch_norm(x, None, None, weight, bias, True, momentum, eps)
    mean, variance = running_mean.detach().clone(), running_var.detach().clone()
    y = F.batch_norm(x, mean, variance, weight, bias, True, momentum, eps)
    return y, mean, variance


def instance_norm_train(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Instance normalization of `x` `[n, c, ...]` that does not modify the running statistics.

    Returns:
        The normalized `x` and the new running statistics `[c]` (without gradient).
    """
    mean, variance = running_mean.detach().clone(), running_var.detach().clone()
    y = F.instance_norm(x, mean, variance, weight, bias, True, momentum, eps)
    return y, mean, variance


class _Assigned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def assigned(parameter: Tensor, value: Tensor) -> Tensor:
    """What a parameter is after a change that autograd did not record: `value`, whose gradient is
    the parameter's. All have the same shape."""
    result: Tensor = _Assigned.apply(parameter, value)  # type: ignore[no-untyped-call]
    return result
