"""Detect losses outside the model that differ between ranks.

If ranks pass the global batch, the gradients of all outputs must be equal on all ranks, or the
replicas of parameters drift apart. If each rank passes a local batch, this applies only to outputs
without a batch dimension, such as the loss, which are computed from the global batch. Checksums of
the gradient are compared where a backward pass enters the model, in the first backward passes and
periodically in later backward passes.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.core.agreement.collective import has_other_ranks
from shardwright.core.misuse.batch_guard import FIRST_CALLS, PERIOD
from shardwright.core.misuse.ranks import delay_data_errors, is_due
from shardwright.core.runtime.counted_calls import begin_backward
from shardwright.core.runtime.devices import Devices
from shardwright.errors import DataError

TOLERANCE = 1e-3
"""Maximum difference between the checksums of two ranks, relative to the sum of the gradient's
absolute values; not zero, because kernels add in varying order."""

MAX_ELEMENTS = 2**20
"""Number of elements of a gradient above which only a sample of about this size is compared."""


class WatchGradient(Protocol):
    """Function that registers a comparison of an output's gradient between ranks."""

    def __call__(self, output: Tensor, name: str) -> None: ...


class GradientGuard:
    """Guard that compares the gradients of outputs between ranks.

    Args:
        devices: this rank's view of the devices.
        has_local_batches: whether each rank passes a local batch instead of the global batch.
    """

    def __init__(self, devices: Devices, *, has_local_batches: bool) -> None:
        self._passes, self._device = 0, devices.device
        self._has_local_batches = has_local_batches

    @staticmethod
    def of(devices: Devices, *, has_local_batches: bool) -> GradientGuard | None:
        """Return a guard, or None if there are no other ranks with which to compare."""
        if not devices.is_distributed or not has_other_ranks():
            return None
        return GradientGuard(devices, has_local_batches=has_local_batches)

    def watch(self, output: Tensor, name: str) -> None:
        """Compare the gradient of `output` between ranks in later backward passes.

        A backward pass raises `DataError`, with the output's `name`, if gradients differ.
        """
        if output.requires_grad:
            hook = partial(self._compare_gradient_between_ranks, name)
            output.register_hook(hook)  # type: ignore[no-untyped-call]

    def _compare_gradient_between_ranks(self, name: str, gradient: Tensor | None) -> None:
        self._passes += 1
        if not is_due(self._passes, FIRST_CALLS, PERIOD):
            return
        # First, so that a rank that calls alone is named by its backward pass.
        begin_backward()
        with torch.no_grad():
            # None for a loss that does not depend on this output, perhaps only on this rank.
            sums = torch.zeros(3, device=self._device)
            if gradient is not None:
                sums = _compute_gradient_checksums(gradient.detach())
            # Other rows are zero, so the sum of the tables gathers the rows.
            table = sums.new_zeros(dist.get_world_size(), len(sums))
            table[dist.get_rank()] = sums
            dist.all_reduce(table)
            # Relative to the largest sum of absolute values, as the plain sum may cancel to zero.
            is_different = (table - table[0]).abs().amax(-1) > TOLERANCE * table[:, 1].max()
        # Infinite gradients may come from a loss scaler. All ranks have one table, so all raise or
        # none.
        if bool(table.isfinite().all()) and bool(is_different.any()):
            with delay_data_errors():
                raise self._make_gradient_difference_error(int(is_different.nonzero()[0]), name)

    def _make_gradient_difference_error(self, rank: int, name: str) -> DataError:
        if self._has_local_batches:
            return DataError(
                f"rank {rank} and rank 0 train {name} with different losses, but this output"
                " does not consist of samples of the local batch: it is computed from the"
                " global batch, so a loss of it must be the same on all ranks\nput the loss"
                " into the model (`sw.WithLoss`, or return it from `forward`), or gather the"
                " labels of all ranks (`torch.distributed.all_gather`)"
            )
        return DataError(
            f"rank {rank} and rank 0 train {name} with different losses, but every rank passes the"
            " global batch, so the loss must be the same on all ranks\nuse the same labels,"
            " weights and factors of the loss on every rank; to pass a local batch on each rank,"
            " plan with `dataset_strategy='data_parallel'`"
        )


def _compute_gradient_checksums(gradient: Tensor) -> Tensor:
    """Return three sums over a gradient's elements, shape (3,), float32.

    They are the plain sum, the sum of absolute values, and a sum weighted by position, which
    detects permutations.
    """
    numbers = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    numbers = numbers.to_dense() if numbers.is_sparse else numbers
    flat = numbers.reshape(-1)
    # An odd stride meets all columns; a float32 copy and weights of all elements would take memory.
    flat = flat[:: len(flat) // MAX_ELEMENTS | 1].float()
    # Cosines of the positions: bounded weights without a period in the integers.
    weights = torch.arange(1, 1 + len(flat), device=flat.device, dtype=torch.float32).cos()
    return torch.stack([flat.sum(), flat.abs().sum(), flat @ weights])
