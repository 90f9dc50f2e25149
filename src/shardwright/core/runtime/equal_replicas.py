"""Compares the first results of user code that runs as it is, on ranks that must hold the same."""

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
"""Of a difference, relative to the sum of magnitudes: atomic additions on an accelerator reorder
sums, and other values on another rank differ by more."""

_SAMPLE = 1 << 16
"""First elements of a tensor whose order counts."""


@dataclass
class EqualReplicas:
    """A function whose results must be equal on all ranks of a group; the first call checks it.

    Args:
        function: returns a tensor or a tuple of tensors.
        name: names it in the error.
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
        """
        Raises:
            CaptureError: on every rank of the group, if results differ.
        """
        if any(r.is_meta or by_rank(r) is not None for r in results):
            return
        digests = torch.stack([_digest(result.detach()) for result in results])
        gathered = [torch.empty_like(digests) for _ in range(self.group.size)]
        dist.all_gather(gathered, digests, group=group_named(self.group.name))
        for number in range(len(results)):
            first = gathered[0][number]
            for rank, digest in enumerate(gathered):
                if ((digest[number] - first).abs() > TOLERANCE * first[1].abs()).any():
                    raise CaptureError(
                        f"local_map {self.name!r}: result {number} differs between ranks that hold"
                        f" the same shard (0 and {rank} of {self.group.size}): it depends on more"
                        " than its inputs\nif it draws random numbers from `torch`, write "
                        "`random=True`; draw others, and read what differs between ranks, outside"
                    )


def _digest(result: Tensor) -> Tensor:
    """A few numbers that are equal for equal tensors: sums, of magnitudes and of some elements by
    their places."""
    values = torch.view_as_real(result) if result.is_complex() else result
    values = values.nan_to_num() if values.is_floating_point() else values.long()
    flat = values.flatten()[:_SAMPLE].double()
    places = torch.linspace(1, 2, len(flat), dtype=torch.float64, device=flat.device)
    sums = values.sum(dtype=torch.float64), values.abs().sum(dtype=torch.float64)
    return torch.stack([*sums, (flat * places).sum()])
