"""Run operators on DTensors for which DTensor has no sharding strategy.

In-place elementwise operators compute on shards if all DTensors have equal layouts. Other operators
gather their arguments, compute on full tensors on every rank, and write the shards of arguments
that they change. Random numbers are drawn on the first rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from shardwright.core.runtime.sent_dtypes import broadcast
from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.dtensor import local_tensor, spec_of
from shardwright.core.torch_internals.dtensor_dispatch import have_same_layout
from shardwright.core.torch_internals.operators import (
    OpOverload,
    operator_name,
    schema_of,
    written_arguments,
)


def can_compute_on_full_tensors(operator: OpOverload) -> bool:
    """Whether all results of an operator are new tensors, or arguments written in place.

    Excludes views, which would refer to a gathered copy, and in-place changes of shape.
    """
    if torch.Tag.inplace_view in operator.tags:
        return False
    # A view would be of the gathered copy, and later writes into it would not reach the DTensor.
    returns = schema_of(operator).returns
    return all(r.alias_info is None or r.alias_info.is_write for r in returns)


def is_random_operator(operator: OpOverload) -> bool:
    """Whether an operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in operator.tags


def broadcast_from_first_rank(tensor: Tensor, mesh: DeviceMesh) -> None:
    """Broadcast a tensor from the first rank of the mesh to all ranks, once per mesh axis."""
    # Axis after axis, so that in the end all ranks have the tensor of the rank at coordinates 0.
    for dim in range(mesh.ndim):
        broadcast(tensor, mesh.get_group(dim), 0)


def compute_on_shards(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Run an in-place operator on local tensors if the result equals that of the full tensors.

    Returns:
        Whether the operator has run.
    """
    if not _writes_elementwise(operator, args) or not _have_equal_layouts(
        [*args, *kwargs.values()]
    ):
        return False
    local_args, local_kwargs = pytree.tree_map_only(DTensor, local_tensor, (args, kwargs))
    operator(*local_args, **local_kwargs)
    return True


def _writes_elementwise(operator: OpOverload, args: tuple[Any, ...]) -> bool:
    name = operator_name(operator)
    # Replicas of one shard would draw different numbers.
    if not written_arguments(operator) or is_random_operator(operator):
        return False
    if name == "index_put_":
        return _assigns_scalar_by_mask(*args)
    # Foreach and fused operators of optimizers are elementwise, whether or not PyTorch tags them.
    return torch.Tag.pointwise in operator.tags or name.startswith(("_foreach_", "_fused_"))


def _assigns_scalar_by_mask(
    tensor: Tensor, indices: Sequence[Tensor | None], value: Tensor, accumulate: bool = False
) -> bool:
    """Whether `tensor[indices] = value` is elementwise: assigns a scalar by a mask of the tensor's
    shape."""
    # Row indices would select other rows of each shard; a mask is sharded like the tensor.
    mask = indices[0]
    is_mask = mask is not None and mask.dtype == torch.bool and mask.shape == tensor.shape
    return is_mask and len(indices) == 1 and value.numel() == 1 and not accumulate


def _have_equal_layouts(arguments: Sequence[Any]) -> bool:
    """Whether an operator can run on shards: its DTensors have equal layouts without partial sums,
    and its ordinary tensors one element.

    Only tensors at equal positions of list arguments need equal layouts, as in `torch._foreach_*`.
    """
    lists = [list(each) for each in arguments if isinstance(each, list | tuple)]
    if lists and all(isinstance(tensor, DTensor) for tensor in arguments[:1]):
        # The indices of `index_put_`: they belong to the tensor itself.
        return _have_combinable_layouts([*arguments, *(leaf for each in lists for leaf in each)])
    return _have_combinable_layouts(arguments) and all(
        map(_have_combinable_layouts, _group_tensors_by_list_position(lists))
    )


def _group_tensors_by_list_position(lists: Sequence[Sequence[Any]]) -> Iterator[list[Any]]:
    for index in range(max(map(len, lists), default=0)):
        yield [each[index] for each in lists if index < len(each)]


def _have_combinable_layouts(tensors: Sequence[Any]) -> bool:
    specs = [spec_of(leaf) for leaf in tensors if isinstance(leaf, DTensor)]
    ordinary = (x for x in tensors if isinstance(x, Tensor) and not isinstance(x, DTensor))
    return (
        all(have_same_layout(spec, specs[0]) for spec in specs)
        # For terms of a sum, f(a) + f(b) is not f(a + b) in general.
        and not any(placement.is_partial() for spec in specs for placement in spec.placements)
        # A larger ordinary tensor has the full shape, which does not fit a shard.
        and all(tensor.numel() == 1 for tensor in ordinary)
    )


def compute_on_full_tensors(
    operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Gather the arguments of an operator on all ranks, and run the operator on full tensors.

    Returns:
        The results as replicated DTensors; arguments that were changed in place as themselves.
    """
    gathered: dict[int, tuple[DTensor, Tensor]] = {}

    def gather(tensor: DTensor) -> Tensor:
        # Once per tensor, so that an argument that is passed twice is one tensor, as on one device.
        if id(tensor) not in gathered:
            gathered[id(tensor)] = tensor, _copy_full_tensor(tensor)
        return gathered[id(tensor)][1]

    full_args, full_kwargs = pytree.tree_map_only(DTensor, gather, (args, kwargs))
    results = operator(*full_args, **full_kwargs)
    mesh = next(iter(gathered.values()))[0].device_mesh
    writes = written_arguments(operator)
    written = [args[i] if i < len(args) else kwargs.get(name) for i, name in writes]
    if is_random_operator(operator):
        # Every rank has drawn its own numbers; those of the first rank are used.
        for tensor in pytree.tree_leaves((results, pytree.tree_map_only(DTensor, gather, written))):
            broadcast_from_first_rank(tensor, mesh)
    by_id: dict[int, Tensor] = {}
    for tensor in pytree.tree_leaves(written):
        if isinstance(tensor, DTensor):
            by_id[id(gather(tensor))] = tensor
            _write_full_tensor_to_shards(tensor, gather(tensor))
        elif isinstance(tensor, Tensor):
            by_id[id(tensor)] = tensor
    replicated = (Replicate(),) * mesh.ndim

    def as_result(tensor: Tensor) -> Tensor:
        # An in-place operator returns its argument itself.
        if id(tensor) in by_id:
            return by_id[id(tensor)]
        return DTensor.from_local(tensor, mesh, replicated, run_check=False)

    return pytree.tree_map_only(Tensor, as_result, results)


def _copy_full_tensor(tensor: DTensor) -> Tensor:
    """Return the full tensor as a copy that shares no memory with the DTensor."""
    full: Tensor = tensor.full_tensor().detach()
    return full.clone() if full.data_ptr() == local_tensor(tensor).data_ptr() else full


def _write_full_tensor_to_shards(tensor: DTensor, full: Tensor) -> None:
    """Write `full`, equal on all ranks, into the shards of a DTensor."""
    mesh = tensor.device_mesh
    replicated = DTensor.from_local(full, mesh, (Replicate(),) * mesh.ndim, run_check=False)
    # A partial placement is written below: the value on the first rank, and on the others the
    # number that does not change the reduction.
    sharded = [Replicate() if p.is_partial() else p for p in tensor.placements]
    shard = local_tensor(replicated.redistribute(placements=sharded))
    coordinates = mesh.get_coordinate() or ()
    # DTensor has no partial placements of several reductions, so these are equal numbers.
    neutral_numbers = [
        _NEUTRAL_NUMBERS[placement.reduce_op]
        for placement, coordinate in zip(tensor.placements, coordinates, strict=True)
        if isinstance(placement, Partial)
        and coordinate > 0
        and placement.reduce_op in _NEUTRAL_NUMBERS
    ]
    local_tensor(tensor).copy_(
        torch.full_like(shard, neutral_numbers[0]) if neutral_numbers else shard
    )


_NEUTRAL_NUMBERS = {"sum": 0, "product": 1}
"""Neutral elements of reductions, by the name of the reduction in `Partial`. `avg`, `max` and `min`
need none: they reduce equal values on all ranks to that value."""
