"""The norm of all gradients, over all devices and stages."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.lower.devices import Devices


def clip_grad_norm_(
    named: Iterable[tuple[str, nn.Parameter]],
    max_norm: float,
    devices: Devices,
    counted_elsewhere: Collection[str] = (),
) -> Tensor:
    """Scales gradients so that their 2-norm over all devices and stages is at most `max_norm`.

    Args:
        named: the parameters of this rank's stage.
        counted_elsewhere: names of those that an earlier stage holds too and counts.

    Returns:
        The norm before, the same on every rank.
    """
    parameters = dict(named)
    gradients = [
        parameter.grad
        for name, parameter in parameters.items()
        if parameter.grad is not None and name not in counted_elsewhere
    ]
    norm = torch.nn.utils.get_total_norm(gradients)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    norm = norm.to(devices.device)
    if devices.across is not None:
        # A stage without gradients has a norm of another dtype than the others.
        squares = norm.to(torch.float64).square()
        dist.all_reduce(squares, group=devices.across)
        norm = squares.sqrt().to(_dtype(parameters.values(), norm))
    torch.nn.utils.clip_grads_with_norm_(parameters.values(), max_norm, norm)
    return norm


def _dtype(parameters: Iterable[Tensor], norm: Tensor) -> torch.dtype:
    return next((parameter.dtype for parameter in parameters), norm.dtype)
