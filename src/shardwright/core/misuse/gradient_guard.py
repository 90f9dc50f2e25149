"""Finds losses outside of a model that are not those of the whole batch on every rank.

Where each rank gives its own part of a batch and an output is of all of it, the gradient of the
output must be the same on all ranks. Sums of it are compared where a backward pass enters the
model, in the first passes and some later ones.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.core.agreement.collective import has_other_ranks
from shardwright.core.misuse.batch_guard import EVERY, FIRST_CALLS
from shardwright.core.misuse.ranks import found_by_all, is_due
from shardwright.core.runtime.devices import Devices
from shardwright.errors import DataError

TOLERANCE = 1e-3
"""Of the sum of absolute values: kernels may add in another order each time."""


class GradientGuard:
    """Compares the gradients of outputs on all ranks."""

    def __init__(self, devices: Devices) -> None:
        self._active = devices.several and has_other_ranks()
        self._passes = 0

    def watch(self, output: Tensor, name: str) -> None:
        """Compares the gradients that this output gets.

        A backward pass raises a `DataError` on every rank if they differ.
        """
        if self._active and output.requires_grad:
            output.register_hook(partial(self._compare, name))  # type: ignore[no-untyped-call]

    def _compare(self, name: str, gradient: Tensor) -> None:
        self._passes += 1
        if not is_due(self._passes, FIRST_CALLS, EVERY):
            return
        with torch.no_grad():
            sums = _sums(gradient.detach())
            table = sums.new_zeros(dist.get_world_size(), len(sums))
            table[dist.get_rank()] = sums
            dist.all_reduce(table)
            differences = (table - table[0]).abs().amax(-1) > TOLERANCE * table[:, 1].max()
        if bool(table.isfinite().all()) and bool(differences.any()):
            rank = int(differences.nonzero()[0])
            with found_by_all():
                raise DataError(
                    f"rank {rank} and rank 0 train {name} by other losses: by dataset_strategy each"
                    " rank gives its own part of the batch, but outputs are of all of it, and what"
                    " is computed from them outside of the model must be the same on all ranks: put"
                    " the loss into the model (`sw.WithLoss`, or return it from `forward`), or"
                    " gather the labels of all ranks (`torch.distributed.all_gather`)"
                )


def _sums(gradient: Tensor) -> Tensor:
    """Its sum, that of absolute values, and one in which each place counts differently."""
    numbers = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    numbers = numbers.to_dense() if numbers.is_sparse else numbers
    flat = numbers.reshape(-1).float()
    weights = torch.arange(1, 1 + len(flat), device=flat.device, dtype=torch.float32).cos()
    return torch.stack([flat.sum(), flat.abs().sum(), flat @ weights])
