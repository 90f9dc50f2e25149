"""Clip gradients by their norm over all devices and pipeline stages."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.core.runtime.devices import Devices
from shardwright.core.runtime.dtensor import stored_shards
from shardwright.core.torch_internals.tensors import norms_of_each, scale_all_


def clip_grad_norm_(
    named: Iterable[tuple[str, nn.Parameter]],
    max_norm: float,
    devices: Devices,
    counted_elsewhere: Collection[str] = (),
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Scale gradients so that their 2-norm over all devices and stages is at most `max_norm`.

    Every device sums the squares of its local shards, each divided by the number of devices that
    have the same shard, so one all-reduce gives the norm for any placements.

    Args:
        named: names and parameters of this rank's stage.
        max_norm: the largest norm; infinite to leave gradients unchanged.
        devices: the devices of the model.
        counted_elsewhere: names of tied parameters that an earlier stage counts.
        dtype: dtype of the norm; by default that of the gradients, but a stage may have none.

    Returns:
        The norm before clipping, equal on every rank.
    """
    gradients = {name: p.grad for name, p in named if p.grad is not None}
    shards = stored_shards(gradients)
    counted = [name for name in gradients if name not in counted_elsewhere]
    # In float64: squares of many gradients would overflow or lose digits in the dtype of gradients.
    squares = torch.zeros((), dtype=torch.float64, device=devices.device)
    if counted:
        norms = torch.stack(norms_of_each([shards[name] for name in counted]))
        replicas = [_num_replicas(gradients[name]) for name in counted]
        weights = torch.tensor(replicas, dtype=torch.float64, device=norms.device)
        squares = (norms.double().square() / weights).sum()
    if devices.is_distributed:
        with devices.waits.measure():
            # Over the full world: devices of a stage and all stages at once.
            dist.all_reduce(squares)
    gradient_dtype = next((gradient.dtype for gradient in shards.values()), torch.float32)
    norm = squares.sqrt().to(dtype or gradient_dtype)
    if shards and math.isfinite(max_norm):
        # As `torch.nn.utils.clip_grad_norm_` does, whose epsilon this is: to scale by 1 costs less
        # than to wait for the device to know whether the norm is exceeded.
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        scale_all_(list(shards.values()), scale)
    return norm


def _num_replicas(gradient: Tensor) -> int:
    """Number of devices of the stage that have the same shard of a gradient."""
    if not isinstance(gradient, DTensor):
        return 1
    mesh = gradient.device_mesh
    return math.prod(mesh.size(i) for i, p in enumerate(gradient.placements) if p.is_replicate())
