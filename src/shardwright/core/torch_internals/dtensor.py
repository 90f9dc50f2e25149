"""Access to DTensors without the autograd functions and checks of the public API."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, cast

from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor, _api, _dispatch, _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
from torch.distributed.tensor.placement_types import _StridedShard

from shardwright.core.torch_internals.tensors import as_subclass

StridedShard = _StridedShard
"""DTensor's placement for two mesh axes that shard one dimension in reverse order of the mesh.

`Shard` can only express sharding in order of the mesh axes.
"""


def local_tensor(tensor: DTensor) -> Tensor:
    """Return the local tensor of a DTensor, without the autograd node of `to_local()`."""
    return tensor._local_tensor


def spec_of(tensor: DTensor) -> DTensorSpec:
    """Return the spec of a DTensor: its mesh, placements, and global shape, strides and dtype."""
    return tensor._spec


def with_spec(local: Tensor, spec: DTensorSpec) -> DTensor:
    """Make a DTensor that requires no gradient from a local tensor.

    This is much faster than `DTensor.from_local`, which takes longer than a small operator.

    Args:
        local: the local tensor.
        spec: mesh, placements and global shape of the DTensor.
    """
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def local_chunks(tensor: DTensor) -> list[ChunkStorageMetadata]:
    """Return the offsets and sizes of this rank's chunks in the full tensor."""
    return tensor.__create_chunk_list__()  # type: ignore[no-any-return,no-untyped-call]


def local_part_of(full: Tensor, tensor: Tensor) -> Tensor:
    """Slice a full tensor to this rank's shard of `tensor`, without communication.

    Returns the full tensor if `tensor` is not a DTensor.
    """
    if not isinstance(tensor, DTensor):
        return full
    (chunk,) = local_chunks(tensor)
    ranges = zip(chunk.offsets, chunk.sizes, strict=True)
    return full[tuple(slice(offset, offset + size) for offset, size in ranges)]


def set_data(tensor: Tensor, value: Tensor) -> None:
    """Assign `tensor.data`: share the memory of `value`, and keep the version counter.

    For a DTensor, only the wrapper changes, not the local tensor.
    """
    cast(Any, Tensor.data).__set__(tensor, value)


def share_local_memory(tensor: DTensor, value: DTensor) -> None:
    """Make a DTensor share the local memory of another DTensor with an equal layout, as assigning
    `.data` does for ordinary tensors. A pending backward pass that needs the old values then raises
    an error."""
    if type(tensor._local_tensor) is Tensor:
        set_data(tensor._local_tensor, value._local_tensor)
    else:  # simulated ranks
        tensor._local_tensor = value._local_tensor
    # Inference tensors have no version counter.
    if not tensor.is_inference():
        increment_version(tensor)


def assign_dtensor(tensor: DTensor, value: DTensor) -> None:
    """Give a DTensor the shape, the layout and the local tensor of another DTensor."""
    # `.data` gives the wrapper its sizes and dtype, but does not change the attributes below.
    set_data(tensor, value)
    tensor._local_tensor, tensor._spec = value._local_tensor, value._spec


def share_version_counter(parameter: DTensor) -> nn.Parameter:
    """Make a copy of a DTensor parameter that shares the version counter of its local tensor.

    In-place changes of the parameter then increment the version of the local tensor too. So a
    backward pass raises an error if the parameter has changed since its local tensor was saved.
    """
    local = parameter._local_tensor
    if type(local) is not Tensor:  # simulated ranks
        return cast(nn.Parameter, parameter)
    # Made of the local tensor, whose version counter it keeps when `.data` is assigned.
    result = as_subclass(DTensor, local)
    set_data(result, parameter)
    result._local_tensor, result._spec = local, parameter._spec
    # `isinstance(result, nn.Parameter)` is true for a subclass with this flag.
    result.requires_grad_(parameter.requires_grad)._is_param = True
    return cast(nn.Parameter, result)


def dtensor_of_class(tensor_class: type[DTensor], local: Tensor, spec: DTensorSpec) -> DTensor:
    """Make a DTensor of the subclass `tensor_class` from a local tensor and a spec."""
    result = with_spec(local, spec)
    result.__class__ = tensor_class
    return result


def around_redistributions(context: Callable[[DeviceMesh], AbstractContextManager[None]]) -> None:
    """Run each redistribution of a DTensor that communicates inside a new context manager.

    Implicit redistributions are included (`p.norm().item()`). The change is permanent for the
    process; a second call is ignored.

    Args:
        context: makes the context manager, given the mesh of the DTensor.
    """
    redistribute = _redistribute.redistribute_local_tensor

    @wraps(redistribute)
    def call(local: Tensor, source: DTensorSpec, target: DTensorSpec, **options: Any) -> Tensor:
        # From a replicated tensor each rank takes its shard locally.
        pairs = zip(source.placements, target.placements, strict=True)
        communicates = any(old != new and not old.is_replicate() for old, new in pairs)
        # Other classes are those of tracing, and of simulated ranks.
        if not communicates or type(local) not in (Tensor, nn.Parameter):
            return redistribute(local, source, target, **options)
        with context(source.mesh):
            return redistribute(local, source, target, **options)

    if not hasattr(redistribute, "__wrapped__"):
        # Each of these modules has imported the function by name.
        for module in (_api, _dispatch, _redistribute):
            vars(module)[redistribute.__name__] = call


def before_fully_shard(check: Callable[[Tensor], None]) -> None:
    """Call `check` for each parameter before `fully_shard` replaces it.

    The change is permanent for the process; a second check is ignored.

    Args:
        check: function that takes the parameter, and may raise an error.
    """
    initialize: Any = FSDPParam.__init__

    @wraps(initialize)
    def check_and_initialize(fsdp: FSDPParam, param: Tensor, *args: Any, **options: Any) -> None:
        check(param)
        initialize(fsdp, param, *args, **options)

    if not hasattr(initialize, "checks_parameters"):
        vars(check_and_initialize)["checks_parameters"] = True
        setattr(FSDPParam, initialize.__name__, check_and_initialize)


def check_before_pickling(check: Callable[[DTensor], None]) -> None:
    """Call `check` before a DTensor is pickled or saved as safetensors.

    `copy.copy` and `copy.deepcopy` do not call `check`. The change is permanent for the process; a
    second check is ignored.

    Args:
        check: called with the tensor; raises an error to refuse the pickling.
    """
    reduce: Any = DTensor.__reduce_ex__
    if hasattr(reduce, "checks_pickling"):
        return

    def check_and_reduce(tensor: DTensor, protocol: Any) -> Any:
        check(tensor)
        return reduce(tensor, protocol)

    # `copy.copy` would call `__reduce_ex__`, and so `check`.
    def copy(tensor: DTensor) -> Any:
        # `copy.copy` uses protocol 4.
        rebuild, arguments = reduce(tensor, 4)
        return rebuild(*arguments)

    def storage(tensor: DTensor) -> Any:
        check(tensor)
        return Tensor.storage(tensor)  # type: ignore[no-untyped-call]

    vars(check_and_reduce)["checks_pickling"] = True
    # safetensors calls `storage` if `untyped_storage()` has no memory.
    methods = {"__reduce_ex__": check_and_reduce, "__copy__": copy, "storage": storage}
    for name, method in methods.items():
        setattr(DTensor, name, method)
