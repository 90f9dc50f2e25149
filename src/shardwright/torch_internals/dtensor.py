"""DTensors without the autograd and the checks of their public functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import _StridedShard

from shardwright.torch_internals.operators import OpOverload
from shardwright.torch_internals.tensors import as_subclass

__all__ = [
    "DTensorSpec",
    "StridedShard",
    "change_results",
    "counting_with_shard",
    "held_chunks",
    "local_tensor",
    "spec_of",
    "with_spec",
]

StridedShard = _StridedShard
"""The placement of a dimension that axes further right cut first: its blocks are `split_factor`
apart. Without it a `DeviceMesh` could cut a dimension from left to right only."""


def local_tensor(tensor: DTensor) -> Tensor:
    """This rank's part, which `to_local()` gives through an autograd function."""
    return tensor._local_tensor


def spec_of(tensor: DTensor) -> DTensorSpec:
    """Mesh, placements, shape, strides and dtype."""
    return tensor._spec


def with_spec(local: Tensor, spec: DTensorSpec) -> DTensor:
    """A DTensor without gradient whose part on this rank is `local`; `DTensor.from_local` would
    take longer than small operators."""
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def held_chunks(tensor: DTensor) -> list[ChunkStorageMetadata]:
    """Offsets and sizes, in the whole tensor, of what this rank holds."""
    return tensor.__create_chunk_list__()  # type: ignore[no-any-return,no-untyped-call]


def counting_with_shard(parameter: DTensor) -> nn.Parameter:
    """The parameter, as one tensor with its part on this rank to autograd: a change of one in place
    counts as one of the other, so that a backward pass refuses parts that were saved before."""
    local = parameter._local_tensor
    if type(local) is not Tensor:  # of simulated ranks
        return cast(nn.Parameter, parameter)
    result = as_subclass(DTensor, local)
    result.data = parameter
    result._local_tensor, result._spec = local, parameter._spec
    result.requires_grad_(parameter.requires_grad)._is_param = True
    return cast(nn.Parameter, result)


def change_results(operator: OpOverload, change: Callable[[Any, Sequence[Any]], Any]) -> None:
    """Lets every DTensor of the process return `change(results, args)` from an operator; the first
    change of an operator stays."""

    def handler(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return change(operator(*args, **kwargs), args)

    handle(operator, handler)


def handle(operator: OpOverload, call: Callable[[tuple[Any, ...], dict[str, Any]], Any]) -> None:
    """Lets `call` compute an operator of every DTensor of the process; inside, the operator does
    what it always does. The first handler of an operator stays."""
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers

    def handler(called: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        handlers.pop(called, None)
        try:
            return call(args, kwargs)
        finally:
            handlers[called] = handler

    handlers.setdefault(operator, handler)
