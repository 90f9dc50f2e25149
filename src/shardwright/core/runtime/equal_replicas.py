"""Check that the first results of a `local_map` are equal on all ranks that hold the same shard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.core.runtime.devices import Group
from shardwright.core.torch_internals.distributed import by_rank, group_named
from shardwright.errors import CaptureError

TOLERANCE = 1e-4
"""Largest difference relative to the sum of absolute values. Atomic additions on an accelerator
reorder sums; results that really differ between ranks differ by more."""

_SAMPLE = 1 << 16
"""Number of leading elements that are summed with weights, so that a permutation is found."""


@dataclass
class EqualReplicas:
    """A function whose results must be equal on all ranks of a group; the first call checks it.

    Args:
        function: returns a tensor or a tuple of tensors.
        name: name of the function for errors.
    """

    function: Callable[..., Any]
    group: Group
    name: str
    _is_checked: bool = field(default=False)

    def __call__(self, *args: Any) -> Any:
        result = self.function(*args)
        if not self._is_checked:
            self._is_checked = True
            self._check(result if isinstance(result, tuple) else (result,))
        return result

    def _check(self, results: Sequence[Tensor]) -> None:
        """Compare digests of the results over the group.

        Raises:
            CaptureError: on every rank of the group, if results differ.
        """
        # Nothing to compare in a dry run; simulated ranks run the function once for each rank.
        if any(r.is_meta or by_rank(r) is not None for r in results):
            return
        digests = torch.stack([_digest(result.detach()) for result in results])
        gathered = [torch.empty_like(digests) for _ in range(self.group.size)]
        dist.all_gather(gathered, digests, group=group_named(self.group.name))
        # All ranks of the group compare all digests, so that all raise the error, and none waits.
        for number in range(len(results)):
            first = gathered[0][number]
            for rank, digest in enumerate(gathered):
                if ((digest[number] - first).abs() > TOLERANCE * first[1].abs()).any():
                    raise CaptureError(
                        f"local_map {self.name!r}: result {number} differs between ranks that hold"
                        f" the same shard (0 and {rank} of {self.group.size}): it depends on more"
                        " than its inputs\npass `random=True` if it draws random numbers from"
                        " `torch`; compute everything else that differs between ranks outside of it"
                    )


def _digest(result: Tensor) -> Tensor:
    """The sum, the sum of absolute values, and a sum of leading elements weighted by position."""
    values = torch.view_as_real(result) if result.is_complex() else result
    # NaN is not equal to itself. Integers of one byte would overflow their sum.
    values = values.nan_to_num() if values.is_floating_point() else values.long()
    flat = values.flatten()[:_SAMPLE].double()
    weights = torch.linspace(1, 2, len(flat), dtype=torch.float64, device=flat.device)
    # Plain sums are equal for permuted results; the weighted one is not.
    sums = values.sum(dtype=torch.float64), values.abs().sum(dtype=torch.float64)
    return torch.stack([*sums, (flat * weights).sum()])
