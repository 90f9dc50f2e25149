"""Clip gradients by their norm over all devices and pipeline stages."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.core.runtime.devices import Devices
from shardwright.core.runtime.dtensor import detached_local, stored_shards
from shardwright.core.runtime.training_record import training_record
from shardwright.core.torch_internals.tensors import norms_of_each, scale_all_


def clip_grad_norm_(
    named: Iterable[tuple[str, nn.Parameter]],
    max_norm: float,
    devices: Devices,
    counted_elsewhere: Collection[str] = (),
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Scale gradients so that their 2-norm over all devices and stages is at most `max_norm`.

    Args:
        named: names and parameters of this rank's stage.
        max_norm: maximum norm; infinite to leave gradients unchanged.
        devices: this rank's view of the devices.
        counted_elsewhere: names of tied parameters that an earlier stage includes in the norm.
        dtype: dtype of the norm; by default the dtype of the first gradient of this stage, or
            float32 if it has none.

    Returns:
        The norm before clipping, equal on every rank.
    """
    gradients = {name: p.grad for name, p in named if p.grad is not None}
    shards = stored_shards(gradients)
    counted = [g for name, g in gradients.items() if name not in counted_elsewhere]
    norm = norm_over_devices(counted, devices)
    gradient_dtype = next((gradient.dtype for gradient in shards.values()), torch.float32)
    norm = norm.to(dtype or gradient_dtype)
    # Compared between ranks in the next call: a rank that clips otherwise would diverge.
    if math.isfinite(max_norm):
        training_record().max_norm += max_norm
    if shards and math.isfinite(max_norm):
        # As in `torch.nn.utils.clip_grad_norm_`, with its epsilon: scaling by 1 costs less than a
        # synchronization with the device to know whether the norm is exceeded.
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        scale_all_(list(shards.values()), scale)
    return norm


def norm_over_devices(
    tensors: Sequence[Tensor], devices: Devices, norm_type: float = 2.0
) -> Tensor:
    """Return the norm of tensors over all devices and stages, in float64. Collective.

    Each device sums |x|^`norm_type` over its local shards, and divides the sum by the number of
    devices with the same shard. So one all-reduce gives the norm for any placements.

    Args:
        tensors: parameters or gradients of this rank's stage.
        devices: this rank's view of the devices.
        norm_type: order of the norm, positive or infinite.
    """
    # In float64: sums of powers would overflow or lose digits in the dtype of the tensors.
    total = torch.zeros((), dtype=torch.float64, device=devices.device)
    if tensors:
        shards = [detached_local(tensor) for tensor in tensors]
        norms = torch.stack(norms_of_each(shards, norm_type)).double()
        if math.isinf(norm_type):
            total = norms.max()
        else:
            replicas = [_count_replicas(tensor) for tensor in tensors]
            weights = torch.tensor(replicas, dtype=torch.float64, device=norms.device)
            total = (norms**norm_type / weights).sum()
    if devices.is_distributed:
        with devices.waits.measure():
            # Over the default process group: all devices of all stages at once.
            is_maximum = math.isinf(norm_type)
            dist.all_reduce(total, dist.ReduceOp.MAX if is_maximum else dist.ReduceOp.SUM)
    # After the all-reduce, since powers add up over ranks and norms do not.
    return total if math.isinf(norm_type) else total ** (1 / norm_type)


def _count_replicas(gradient: Tensor) -> int:
    """Return the number of devices of the stage that have the same shard of `gradient`."""
    if not isinstance(gradient, DTensor):
        return 1
    mesh = gradient.device_mesh
    return math.prod(mesh.size(i) for i, p in enumerate(gradient.placements) if p.is_replicate())
