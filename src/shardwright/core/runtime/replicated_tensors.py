"""Detect ordinary tensors that differ between the ranks of a device mesh."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwright.core.runtime.equal_replicas import TOLERANCE, result_digest


def differs_between_ranks(tensor: Tensor, mesh: DeviceMesh) -> bool:
    """Whether the digests of `tensor` differ between ranks of the mesh. Collective; all ranks
    return the same answer."""
    digest = result_digest(tensor.detach())
    # One reduction per mesh dimension reaches all ranks.
    # A minimum is the negated maximum of negated values, so one reduction gives both bounds.
    bounds = torch.stack([digest, -digest])
    for dim in range(mesh.ndim):
        dist.all_reduce(bounds, dist.ReduceOp.MAX, group=mesh.get_group(dim))
    largest, smallest = bounds[0], -bounds[1]
    # Entry 1 is the sum of absolute values, to which the tolerance is relative.
    return bool((largest - smallest > TOLERANCE * largest[1].abs()).any())
