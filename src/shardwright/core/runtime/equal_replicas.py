"""Check, in the first call of a `local_map`, that ranks with equal shards return equal results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.core.runtime.devices import Group
from shardwright.core.torch_internals.distributed import group_named
from shardwright.core.torch_internals.local_tensors import tensors_by_rank
from shardwright.errors import CaptureError

TOLERANCE = 1e-4
"""Maximum difference between the sums of a result on two ranks, relative to the sum of its absolute
values. Above 0, because atomic additions on accelerators run in varying order and so round
differently."""

_SAMPLE = 1 << 16
"""Number of elements in the position-weighted sum of a result, which detects permuted elements."""


@dataclass
class EqualReplicas:
    """A function whose results must be equal on all ranks of a group, which its first call checks.

    Args:
        function: function that returns a tensor or a tuple of tensors.
        group: the ranks with the same shard.
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
            self._check_equal_results(result if isinstance(result, tuple) else (result,))
        return result

    def _check_equal_results(self, results: Sequence[Tensor]) -> None:
        """Check by digests that `results` are equal on all ranks of the group.

        Raises:
            CaptureError: on every rank of the group, if results differ.
        """
        # A dry run has no values, and simulated ranks run the function once for each rank.
        if any(r.is_meta or tensors_by_rank(r) is not None for r in results):
            return
        digests = torch.stack([result_digest(result.detach()) for result in results])
        gathered = [torch.empty_like(digests) for _ in range(self.group.size)]
        dist.all_gather(gathered, digests, group=group_named(self.group.name))
        # All ranks of the group compare all digests, so that all raise the error and none hangs.
        for number in range(len(results)):
            first = gathered[0][number]
            for rank, digest in enumerate(gathered):
                # Entry 1 is the sum of absolute values; the sum itself may cancel to nearly 0.
                if ((digest[number] - first).abs() > TOLERANCE * first[1].abs()).any():
                    raise CaptureError(
                        f"local_map {self.name!r}: result {number} differs between ranks with the"
                        f" same shard (0 and {rank} of {self.group.size}), so it depends on more"
                        " than the inputs\npass `random=True` if the function draws random numbers"
                        " from `torch`; compute other values that differ between ranks outside the"
                        " function, and pass them as inputs"
                    )


def result_digest(result: Tensor) -> Tensor:
    """Return three sums of `result`: of elements, of absolute values, and of its first
    65,536 elements weighted by position; shape (3,), float64."""
    values = torch.view_as_real(result) if result.is_complex() else result
    # NaN would compare unequal, and one-byte integers would overflow their sum.
    values = values.nan_to_num() if values.is_floating_point() else values.long()
    flat = values.flatten()[:_SAMPLE].double()
    # All different and of one magnitude, so that each element counts, and each by its position.
    weights = torch.linspace(1, 2, len(flat), dtype=torch.float64, device=flat.device)
    # Permuted results have equal sums, but different weighted sums.
    sums = values.sum(dtype=torch.float64), values.abs().sum(dtype=torch.float64)
    return torch.stack([*sums, (flat * weights).sum()])
