"""Detect losses outside the model that differ between ranks.

If ranks pass the global batch, the gradients of all outputs must be equal on all ranks, or the
replicas of parameters drift apart. If each rank passes a local batch, so must the gradients of
outputs without samples, such as the loss, which are computed from the global batch. Checksums of
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
from shardwright.core.runtime.devices import Devices
from shardwright.core.runtime.rank_calls import begin_backward
from shardwright.core.torch_internals import pytree
from shardwright.errors import DataError

TOLERANCE = 1e-3
"""Maximum difference between the checksums of two ranks, as a fraction of the sum of the gradient's
absolute values; not zero, because kernels add in varying order."""


GLOBAL_BATCH = (
    "every rank passes the global batch, so the loss must be the same on all ranks",
    "use the same labels, weights and factors of the loss on every rank; to pass a local batch on"
    " each rank, plan with `dataset_strategy='data_parallel'`",
)
LOCAL_BATCH = (
    "this output does not consist of samples of the local batch: it is computed from the global"
    " batch, so a loss of it must be the same on all ranks",
    "put the loss into the model (`sw.WithLoss`, or return it from `forward`), or gather the labels"
    " of all ranks (`torch.distributed.all_gather`)",
)


MAX_ELEMENTS = 2**20
"""Number of elements of a gradient above which only a sample of about this size is compared."""


class WatchGradient(Protocol):
    """Function that registers the check of an output's gradients."""

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
    """Guard that compares the gradients of outputs between ranks.

    Args:
        devices: this rank's view of the devices.
        has_local_batches: whether each rank passes a local batch instead of the global batch.
    """

    def __init__(self, devices: Devices, *, has_local_batches: bool) -> None:
        self._passes, self._device = 0, devices.device
        self._reason, self._remedy = LOCAL_BATCH if has_local_batches else GLOBAL_BATCH

    @staticmethod
    def of(devices: Devices, *, has_local_batches: bool) -> GradientGuard | None:
        """Return a guard; None without other ranks."""
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
                sums = _checksums_of_gradient(gradient.detach())
            table = sums.new_zeros(dist.get_world_size(), len(sums))
            table[dist.get_rank()] = sums
            dist.all_reduce(table)
            is_different = (table - table[0]).abs().amax(-1) > TOLERANCE * table[:, 1].max()
        if bool(table.isfinite().all()) and bool(is_different.any()):
            rank = int(is_different.nonzero()[0])
            with delay_data_errors():
                raise DataError(
                    f"rank {rank} and rank 0 train {name} with different losses, but {self._reason}"
                    f"\n{self._remedy}"
                )


def _checksums_of_gradient(gradient: Tensor) -> Tensor:
    """Return the sum, the sum of absolute values, and a sum weighted by position, which detects
    permutations, of the gradient's elements; shape (3,), float32."""
    numbers = torch.view_as_real(gradient) if gradient.is_complex() else gradient
    numbers = numbers.to_dense() if numbers.is_sparse else numbers
    flat = numbers.reshape(-1)
    # An odd stride meets all columns; floats and weights of all elements would take memory.
    flat = flat[:: len(flat) // MAX_ELEMENTS | 1].float()
    weights = torch.arange(1, 1 + len(flat), device=flat.device, dtype=torch.float32).cos()
    return torch.stack([flat.sum(), flat.abs().sum(), flat @ weights])
