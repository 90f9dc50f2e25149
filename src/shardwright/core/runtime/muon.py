"""`torch.optim.Muon` on DTensors, with the results of one device.

Orthogonalization needs full matrices, and rounds to bfloat16 in each product, so products of shards
would give other numbers. So n ranks with shards of the same matrices process n matrices at a time:
each rank receives the shards of one matrix, orthogonalizes it, and sends the shards back. Each
matrix is orthogonalized once. For n matrices of N elements, a rank sends 4 N (n - 1) / n bytes;
all-gathers would send 2 N (n - 1). Replicas orthogonalize the same matrices, without communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from shardwright.core.layout.layout import DeviceMatrix
from shardwright.core.runtime.dtensor import detached_local, from_placements
from shardwright.core.torch_internals.distributed import functional_collectives as c10d
from shardwright.core.torch_internals.distributed import group_timeout
from shardwright.core.torch_internals.dtensor import StridedShard
from shardwright.core.torch_internals.muon import (
    MuonStep,
    adjusted_rate,
    orthogonalize,
    replace_muon_step,
)

ShardSlices = tuple[slice, ...]


def orthogonalize_full_matrices() -> None:
    """Make `Muon` optimizers of this process orthogonalize the full matrices of DTensors."""
    replace_muon_step(_step_on_full_matrices)


@dataclass(frozen=True)
class _ShardingRanks:
    """The ranks over which a matrix is sharded.

    Args:
        group: process group of these ranks.
        rank: the position of this rank in `group`.
        slices: the shard of each rank, as slices of the matrix, in the order of `group`.
    """

    group: dist.ProcessGroup
    rank: int
    slices: tuple[ShardSlices, ...]


def _step_on_full_matrices(
    original: MuonStep,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    muon_momentum_bufs: Sequence[Tensor],
    **options: Any,
) -> None:
    """Run a step of `Muon`: PyTorch's function `original` updates matrices that are not sharded,
    `_update_shards_of_matrices` updates sharded matrices."""
    matrices = list(zip(params, grads, muon_momentum_bufs, strict=True))
    sharded = [each for each in matrices if _are_equally_sharded(*each)]
    sharded_ids = {id(param) for param, *_ in sharded}
    # Replicated matrices need no communication.
    others = [
        tuple(map(detached_local, each)) if _are_equally_replicated(*each) else each
        for each in matrices
        if id(each[0]) not in sharded_ids
    ]
    original(*map(list, zip(*others, strict=True)) if others else ([], [], []), **options)
    if sharded:
        _update_shards_of_matrices(sharded, **options)


def _are_equally_sharded(*matrix: Tensor) -> bool:
    return _have_equal_placements(matrix) and any(
        _is_shard_placement(placement) for placement in _get_placements(matrix[0])
    )


def _are_equally_replicated(*matrix: Tensor) -> bool:
    return _have_equal_placements(matrix) and all(
        placement.is_replicate() for placement in _get_placements(matrix[0])
    )


def _have_equal_placements(matrix: Sequence[Tensor]) -> bool:
    """Whether a parameter, its gradient and its momentum are DTensors with equal placements, none
    partial, and have real local tensors, unlike in the simulation of ranks."""
    return all(isinstance(x, DTensor) and type(detached_local(x)) is Tensor for x in matrix) and (
        len({_get_placements(tensor) for tensor in matrix}) == 1
        and not any(placement.is_partial() for placement in _get_placements(matrix[0]))
    )


def _get_placements(tensor: Tensor) -> tuple[Placement, ...]:
    assert isinstance(tensor, DTensor)
    return tuple(tensor.placements)


def _is_shard_placement(placement: Placement) -> bool:
    return isinstance(placement, Shard | StridedShard)


def _update_shards_of_matrices(
    matrices: Sequence[tuple[Tensor, ...]],
    *,
    lr: float,
    weight_decay: float,
    momentum: float,
    nesterov: bool,
    ns_coefficients: tuple[float, float, float],
    ns_steps: int,
    eps: float,
    adjust_lr_fn: str | None,
    **_: Any,
) -> None:
    rate = float(lr)
    by_group: dict[dist.ProcessGroup, list[tuple[Tensor, Tensor, _ShardingRanks]]] = {}
    for param, grad, buffer in matrices:
        local_grad, local_buffer = detached_local(grad), detached_local(buffer)
        # As in `torch.optim.Muon`: a moving average of gradients, with Nesterov's look-ahead.
        local_buffer.lerp_(local_grad, 1 - momentum)
        update = local_grad.lerp(local_buffer, momentum) if nesterov else local_buffer
        assert isinstance(param, DTensor)
        owners = _find_sharding_ranks(
            *(param.device_mesh, _get_placements(param), tuple(param.shape), _get_default_group())
        )
        # `torch.optim.Muon` orthogonalizes in bfloat16, so sending float32 would only double the
        # bytes.
        by_group.setdefault(owners.group, []).append((param, update.bfloat16(), owners))
    for group, group_matrices in by_group.items():
        # Matrices of similar sizes take equally long.
        # The sort is stable, so that all ranks process equal matrices together.
        group_matrices.sort(key=lambda each: -each[0].numel())
        size = dist.get_world_size(group)
        for first in range(0, len(group_matrices), size):
            # One matrix for each rank.
            concurrent = group_matrices[first : first + size]
            shards = _orthogonalize_shards(
                [(update, owners) for _, update, owners in concurrent],
                (ns_coefficients, ns_steps, eps),
            )
            for (param, *_state), shard in zip(concurrent, shards, strict=True):
                local = detached_local(param)
                # As in `torch.optim.Muon`: decoupled weight decay by the rate itself, then the
                # update.
                local.mul_(1 - rate * weight_decay)
                # Adjusted by the full shape, which a DTensor has as its own.
                local.add_(shard, alpha=-adjusted_rate(rate, adjust_lr_fn, param.shape))


def _orthogonalize_shards(
    matrices: Sequence[tuple[Tensor, _ShardingRanks]], options: tuple[Any, ...]
) -> list[Tensor]:
    """Return this rank's shards of orthogonalized matrices; each rank orthogonalizes one matrix.

    Args:
        matrices: (this rank's shard, ranks over which the matrix is sharded) of each matrix, at
            most one matrix per rank.
        options: arguments of `orthogonalize`.
    """
    owners = matrices[0][1]
    ranks, rank = len(owners.slices), owners.rank
    updates = [update for update, _ in matrices]
    flat = torch.cat([update.flatten() for update in updates])
    sent = [update.numel() for update in updates] + [0] * (ranks - len(updates))
    # All shards of a matrix have one size; 0 for a rank beyond the number of matrices.
    received = [sent[rank]] * ranks
    blocks = _exchange_elements(flat, sent, received, owners.group)
    if rank < len(updates):
        blocks = _orthogonalize_blocks(blocks, *matrices[rank], options)
    # Also by ranks without a matrix: the exchange is collective.
    returned = _exchange_elements(blocks, received, sent, owners.group)
    shards = torch.split(returned, [size for size in sent if size])
    return [shard.view(u.shape) for shard, u in zip(shards, updates, strict=True)]


def _orthogonalize_blocks(
    blocks: Tensor, shard: Tensor, owners: _ShardingRanks, options: tuple[Any, ...]
) -> Tensor:
    """Orthogonalize a matrix given as its shards in the order of ranks; return the shards of the
    result."""
    # The last end of any shard along a dimension is the full size.
    stops = zip(*([each.stop for each in slices] for slices in owners.slices), strict=True)
    full = blocks.new_empty([max(each) for each in stops])
    for slices, block in zip(owners.slices, torch.split(blocks, shard.numel()), strict=True):
        full[slices] = block.view(shard.shape)
    orthogonal = orthogonalize(full, *options)
    return torch.cat([orthogonal[slices].flatten() for slices in owners.slices])


def _exchange_elements(
    flat: Tensor, sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """Exchange elements of a flat tensor between the ranks of a group, and return the received
    elements.

    Args:
        flat: the elements to send, ordered by destination rank; 1-D.
        sent, received: number of elements sent to, and received from, each rank.
        group: the process group.
    """
    sending = c10d.all_to_all_single(flat, list(received), list(sent), group.group_name)
    result: Tensor = c10d.wait_tensor(sending)
    return result


@cache
def _find_sharding_ranks(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
    world: dist.ProcessGroup,
) -> _ShardingRanks:
    """Return the ranks over which a matrix is sharded. Collective for these ranks at the first
    call.

    Args:
        mesh: the mesh of the matrix, a DTensor.
        placements: the placements of the matrix.
        shape: the full shape of the matrix.
        world: the default process group, as part of the cache key.
    """
    sizes = tuple(mesh.shape)
    matrix = DeviceMatrix(sizes, tuple(f"axis{number}" for number in range(len(sizes))))
    layout = from_placements(placements, matrix, len(shape))
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    # Along other axes there are replicas, whose ranks do the same among themselves.
    ranges = [
        range(size) if _is_shard_placement(placement) else (index,)
        for size, placement, index in zip(sizes, placements, coordinate, strict=True)
    ]
    coordinates = {int(mesh.mesh[each]): each for each in product(*ranges)}
    dims = [dim for dim, placement in enumerate(placements) if _is_shard_placement(placement)]
    # The mesh has one group per axis, and none over several axes.
    group = (
        mesh.get_group(dims[0])
        if len(dims) == 1
        else _create_process_group(tuple(sorted(coordinates)), world)
    )
    # A process group orders its ranks by number. Along the axes of a mesh numbers may decrease.
    slices = tuple(
        layout.slices(_compute_mesh_position(coordinates[rank], sizes), shape)
        for rank in dist.get_process_group_ranks(group)
    )
    return _ShardingRanks(group, dist.get_group_rank(group, dist.get_rank()), slices)


def _compute_mesh_position(coordinate: tuple[int, ...], sizes: tuple[int, ...]) -> int:
    return sum(c * prod(sizes[dim + 1 :]) for dim, c in enumerate(coordinate))


@cache
def _create_process_group(ranks: tuple[int, ...], world: dist.ProcessGroup) -> dist.ProcessGroup:
    """Create the process group of this rank over several mesh axes. Collective for its ranks."""
    # A communicator takes memory and seconds, so that of all ranks is used again.
    if len(ranks) == world.size():
        return world
    group: dist.ProcessGroup = dist.new_group(
        list(ranks), timeout=group_timeout(world), use_local_synchronization=True
    )
    return group


def _get_default_group() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group
