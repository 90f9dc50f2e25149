"""Capture of batch norms with `momentum=None`, whose running statistics average all batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_STATISTICS = ("running_mean", "running_var")


def average_on_tensors(twin: nn.Module) -> None:
    """Make batch norms with `momentum=None` update their statistics by tensor operators only.

    PyTorch converts `num_batches_tracked` to a Python number, which is unknown during tracing.

    Args:
        twin: the copy of the model to trace, modified in place.
    """
    for norm in (child for child in twin.modules() if isinstance(child, _NORMS)):
        if norm.momentum is None and norm.training and norm.running_mean is not None:
            norm.momentum = 1.0  # Statistics become those of the batch.
            _update_averages_in_hooks(norm)


def _update_averages_in_hooks(norm: nn.Module) -> None:
    before: list[Tensor] = []

    def keep(*_: Any) -> None:
        # Clones, because `forward` updates the statistics in place.
        before[:] = [getattr(norm, name).clone() for name in _STATISTICS]

    @torch.no_grad()
    def average(*_: Any) -> None:
        for name, old in zip(_STATISTICS, before, strict=True):
            new = getattr(norm, name)
            # Mean of n batches: m_n = m_(n-1) + (x_n - m_(n-1)) / n; `forward` has already counted
            # batch n.
            new.copy_(old + (new - old) / norm.get_buffer("num_batches_tracked"))

    norm.register_forward_pre_hook(keep)
    norm.register_forward_hook(average)
