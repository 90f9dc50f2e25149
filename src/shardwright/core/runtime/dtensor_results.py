"""Correct DTensor results that PyTorch gets wrong: `item()` of a partial sum, and random numbers
on CPUs."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardwright.core.runtime.full_tensors import (
    broadcast_from_first_rank,
    compute_on_full_tensors,
)
from shardwright.core.torch_internals.dtensor import local_part_of, local_tensor
from shardwright.core.torch_internals.dtensor_dispatch import set_operator_handler
from shardwright.core.torch_internals.operators import OpOverload, schema_of

aten = torch.ops.aten

RANDOM_OPERATORS = (
    *(aten.uniform_.default, aten.normal_.default, aten.exponential_.default),
    *(aten.bernoulli_.float, aten.log_normal_.default, aten.cauchy_.default),
    *(aten.random_.default, getattr(aten.random_, "from"), aten.random_.to),
    *(aten.rand_like.default, aten.randn_like.default, aten.geometric_.default),
    *(aten.randint_like.default, aten.randint_like.low_dtype),
)
"""In-place and `*_like` random operators, for which DTensor on CPUs draws the same random numbers
for all shards."""

DRAWS_FROM_VALUES = (
    *(aten.bernoulli.default, aten.bernoulli.p, aten.bernoulli.Tensor, aten.bernoulli_.Tensor),
    aten.native_dropout.default,
)
"""Random operators whose result depends on the values of an argument, and that DTensor supports."""


def correct_dtensor_results() -> None:
    """Correct `item()` of partial sums, and random numbers on CPUs, for all DTensors of this
    process."""
    set_operator_handler(aten._local_scalar_dense.default, _read_item_of_full_tensor)
    for operator in RANDOM_OPERATORS:
        set_operator_handler(operator, partial(_draw_full_tensor, operator))
    for operator in DRAWS_FROM_VALUES:
        set_operator_handler(operator, partial(_draw_from_gathered_arguments, operator))


def _read_item_of_full_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return `item()` of the full tensor; for a partial sum, PyTorch returns this rank's local
    value."""
    return args[0].full_tensor().item()


def _draw_full_tensor(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw the full tensor on the first rank of the mesh, as on one device; each rank keeps its
    shard."""
    tensor: DTensor = args[0]
    local, mesh = local_tensor(tensor), tensor.device_mesh
    # PyTorch's own result is right there, and needs no communication.
    if _draws_same_numbers_as_one_device(tensor):
        return operator(*args, **kwargs)
    # Every rank draws all numbers, so that the generators advance alike; the first rank's are used.
    full = operator(local.new_empty(tensor.shape), *args[1:], **kwargs)
    broadcast_from_first_rank(full, mesh)
    shard = local_part_of(full, tensor).contiguous()
    # `uniform_` fills its argument; `rand_like` returns a new DTensor.
    if schema_of(operator).is_mutable:
        local.copy_(shard)
        return tensor
    meta = torch.empty(tensor.shape, device="meta")
    # With the shape: `from_local` would otherwise assume that all shards have this size.
    return DTensor.from_local(
        *(shard, mesh, tensor.placements), shape=meta.shape, stride=meta.stride()
    )


def _draw_from_gathered_arguments(
    operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Gather the arguments of a random operator, run the operator on the first rank of the mesh,
    and broadcast the result."""
    if not isinstance(args[0], DTensor) or _draws_same_numbers_as_one_device(args[0]):
        return operator(*args, **kwargs)
    return compute_on_full_tensors(operator, args, kwargs)


def _draws_same_numbers_as_one_device(tensor: DTensor) -> bool:
    """Whether PyTorch draws the same numbers for the shards of `tensor` as one device for the full
    tensor."""
    # Generators of accelerators are counter-based (Philox), and DTensor sets their offset for each
    # shard. The generator of CPUs (Mersenne Twister) has no offset.
    return tensor.device_mesh.device_type != "cpu" or type(local_tensor(tensor)) is not Tensor
