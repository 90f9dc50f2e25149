"""Batch norms with `momentum=None`, whose statistics are the averages of all batches so far."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_STATISTICS = ("running_mean", "running_var")


def average_on_tensors(twin: nn.Module) -> None:
    """Lets those of a module that is about to be traced divide by the number of batches as a
    tensor: they make a Python number of it, which is unknown then."""
    for norm in (child for child in twin.modules() if isinstance(child, _NORMS)):
        if norm.momentum is None and norm.training and norm.running_mean is not None:
            norm.momentum = 1.0  # Statistics become those of the batch.
            _average(norm)


def _average(norm: nn.Module) -> None:
    before: list[Tensor] = []

    def keep(*_: Any) -> None:
        before[:] = [getattr(norm, name).clone() for name in _STATISTICS]

    @torch.no_grad()
    def average(*_: Any) -> None:
        for name, old in zip(_STATISTICS, before, strict=True):
            new = getattr(norm, name)
            new.copy_(old + (new - old) / norm.get_buffer("num_batches_tracked"))

    norm.register_forward_pre_hook(keep)
    norm.register_forward_hook(average)
