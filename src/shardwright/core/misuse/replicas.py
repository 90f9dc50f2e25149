"""Checksums of parameters of which every rank has a replica, which must stay equal.

A gradient that one rank alone clips, scales or drops, or a parameter that it alone writes, makes
the replicas differ for the rest of the run. `training_guard` compares the checksums.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.core.runtime.dtensor import detached_local
from shardwright.core.runtime.training_record import are_planned_for_all_ranks

MAX_TENSORS, MAX_ELEMENTS = 64, 16
"""Number of parameters, and of elements of each, that are compared."""

_DTYPES = (torch.float32, torch.float64)  # rounding in fewer bits may differ between devices


def compute_checksum_of_replicas(parameters: Iterable[Tensor]) -> float:
    """Return a weighted sum of the absolute values of a sample; infinite if it is not finite, and 0
    without such parameters."""
    replicated = [p for p in parameters if p.dtype in _DTYPES and _is_on_every_rank(p)]
    local = [detached_local(parameter).flatten() for parameter in replicated[:MAX_TENSORS]]
    if not local:
        return 0.0
    sample = torch.cat([tensor[:MAX_ELEMENTS].double() for tensor in local]).abs()
    # The weights detect values that are exchanged; positive, so that the sum cannot cancel.
    weights = torch.linspace(1, 2, len(sample), dtype=sample.dtype, device=sample.device)
    total = float(sample @ weights)
    return total if math.isfinite(total) else math.inf


def _is_on_every_rank(parameter: Tensor) -> bool:
    # Stages and models for some ranks have parameters that others lack.
    if not isinstance(parameter, DTensor) or not are_planned_for_all_ranks([parameter]):
        return False
    return all(placement.is_replicate() for placement in parameter.placements)
