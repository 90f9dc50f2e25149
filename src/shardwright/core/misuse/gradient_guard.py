"""Detect losses outside the model that differ between ranks.

If each rank passes a local batch, an output without samples, such as the loss, is computed from the
global batch, so its gradient must be equal on all ranks. Checksums of the gradient are compared
where a backward pass enters the model, in the first backward passes and periodically in later
backward passes.
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
from shardwright.core.runtime.devices import Devices
from shardwright.core.torch_internals import pytree
from shardwright.errors import DataError

TOLERANCE = 1e-3
"""Maximum difference between the checksums of two ranks, relative to the sum of the gradient's
absolute values; not zero, because kernels add in varying order."""


class WatchGradient(Protocol):
    """Function that registers a comparison between ranks of the gradient of an output."""

    def __call__(self, output: Tensor, name: str) -> None: ...


def output_names(model: str, structure: pytree.TreeSpec) -> list[str]:
    """Return the name of each output of a call, for errors.

    Args:
        model: name of the model.
        structure: the structure of the outputs.
    """
    leaves = pytree.tree_unflatten(range(structure.num_leaves), structure)
    paths = (pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(leaves)[0])
    return [f"output {path} of {model}" if path else f"the output of {model}" for path in paths]


class GradientGuard:
    """Guard that compares the gradients of outputs between ranks."""

    def __init__(self, devices: Devices) -> None:
        # A rehearsal has fake ranks, with which nothing can be compared.
        self._active = devices.is_distributed and has_other_ranks()
        self._passes, self._device = 0, devices.device

    def watch(self, output: Tensor, name: str) -> None:
        """Compare the gradient of `output` between ranks in later backward passes.

        A backward pass raises `DataError`, with the output's `name`, if gradients differ.
        """
        if self._active and output.requires_grad:
            hook = partial(self._compare_gradient_between_ranks, name)
            output.register_hook(hook)  # type: ignore[no-untyped-call]

    def _compare_gradient_between_ranks(self, name: str, gradient: Tensor | None) -> None:
        self._passes += 1
        if not is_due(self._passes, FIRST_CALLS, PERIOD):
            return
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
            rank = int(is_different.nonzero()[0])
            with delay_data_errors():
                raise DataError(
                    f"rank {rank} and rank 0 train {name} with different losses, but this output"
                    " does not consist of samples of the local batch: it is computed from the"
                    " global batch, so a loss of it must be the same on all ranks\nput the loss"
                    " into the model (`sw.WithLoss`, or return it from `forward`), or gather the"
                    " labels of all ranks (`torch.distributed.all_gather`)"
                )


def _compute_gradient_checksums(gradient: Tensor) -> Tensor:
    """Return three sums of a gradient's elements: plain, of absolute values, and weighted by
    position, which detects permutations; shape (3,), float32."""
    numbers = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    numbers = numbers.to_dense() if numbers.is_sparse else numbers
    flat = numbers.reshape(-1).float()
    # Cosines of the positions: bounded weights without a period in the integers.
    weights = torch.arange(1, 1 + len(flat), device=flat.device, dtype=torch.float32).cos()
    return torch.stack([flat.sum(), flat.abs().sum(), flat @ weights])
