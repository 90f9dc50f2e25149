"""Access to DTensors without the autograd functions and checks of the public API."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial, partialmethod, wraps
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
from torch.distributed.tensor.placement_types import _StridedShard

from shardwright.core.torch_internals.operators import (
    OpOverload,
    operator_name,
    operators_of_several_tensors,
)
from shardwright.core.torch_internals.tensors import as_subclass

StridedShard = _StridedShard
"""Placement of a mesh axis that shards a dimension after an axis further right: the blocks of a
rank are `split_factor` apart. `Shard` can only express that axes shard from left to right."""


MIXED_TENSORS = "got mixed torch.Tensor and DTensor"
"""Part of PyTorch's error for an operator that gets both DTensors and ordinary tensors."""


def local_tensor(tensor: DTensor) -> Tensor:
    """Return the local tensor; `to_local()` would add an autograd node."""
    return tensor._local_tensor


def spec_of(tensor: DTensor) -> DTensorSpec:
    """Return the mesh, the placements, and the global shape, strides and dtype of a DTensor."""
    return tensor._spec


def with_spec(local: Tensor, spec: DTensorSpec) -> DTensor:
    """Make a DTensor without gradient from a local tensor.

    Much faster than `DTensor.from_local`, which takes longer than a small operator.
    """
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def local_chunks(tensor: DTensor) -> list[ChunkStorageMetadata]:
    """Return the offsets and sizes of the local chunks in the full tensor."""
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


def share_version_counter(parameter: DTensor) -> nn.Parameter:
    """Make a copy of a DTensor parameter that shares the version counter of its local tensor.

    An in-place change of the parameter then also changes the version of the local tensor, so that a
    backward pass raises if the parameter was changed after its local tensor was saved.
    """
    local = parameter._local_tensor
    if type(local) is not Tensor:  # simulated ranks
        return cast(nn.Parameter, parameter)
    result = as_subclass(DTensor, local)
    result.data = parameter
    result._local_tensor, result._spec = local, parameter._spec
    result.requires_grad_(parameter.requires_grad)._is_param = True
    return cast(nn.Parameter, result)


def dtensor_of_class(tensor_class: type[DTensor], local: Tensor, spec: DTensorSpec) -> DTensor:
    """Make a tensor of a subclass of `DTensor` from a local tensor."""
    result = with_spec(local, spec)
    result.__class__ = tensor_class
    return result


def change_results(operator: OpOverload, change: Callable[[Any, Sequence[Any]], Any]) -> None:
    """Change the results of an operator when it is called with DTensors.

    Permanent for the process; a second change of the same operator is ignored.

    Args:
        operator: the ATen operator.
        change: function from the results and the positional arguments to the new results.
    """

    def handler(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return change(operator(*args, **kwargs), args)

    set_operator_handler(operator, handler)


def set_operator_handler(
    operator: OpOverload, call: Callable[[tuple[Any, ...], dict[str, Any]], Any]
) -> None:
    """Replace the implementation of an operator for DTensors.

    Permanent for the process; a second handler of the same operator is ignored.

    Args:
        operator: the ATen operator.
        call: function of the positional and the keyword arguments. While it runs, the operator has
            PyTorch's own implementation.
    """
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers

    def handler(called: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        handlers.pop(called, None)
        try:
            return call(args, kwargs)
        finally:
            handlers[called] = handler

    handlers.setdefault(operator, handler)


def refuse_pickling(check: Callable[[DTensor], None]) -> None:
    """Call `check` before a DTensor is pickled or saved as safetensors.

    `copy.copy` and `copy.deepcopy` do not call it. Permanent for the process; a second check is
    ignored.

    Args:
        check: function of the tensor, which may raise an error.
    """
    reduce: Any = DTensor.__reduce_ex__
    if hasattr(reduce, "checks_pickling"):
        return

    def check_and_reduce(tensor: DTensor, protocol: Any) -> Any:
        check(tensor)
        return reduce(tensor, protocol)

    def copy(tensor: DTensor) -> Any:
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


def _convert_gradients_to_full(tensor: Tensor) -> None:
    """Convert the gradient of an ordinary tensor to a full tensor if it is a DTensor."""
    if tensor.requires_grad and not hasattr(tensor, "converts_gradients"):
        tensor.converts_gradients = True  # type: ignore[attr-defined]
        tensor.register_hook(  # type: ignore[no-untyped-call]
            lambda g: g.full_tensor() if isinstance(g, DTensor) else None
        )


def explain_mixing(
    error: Callable[[OpOverload | str], Exception], *, except_in: Collection[str]
) -> None:
    """Replace PyTorch's error for operators that mix DTensors and ordinary tensors.

    An operator raises `error(operator)` if the ordinary tensor has more than one element, and
    `numpy` and `tolist` of a DTensor raise `error(name)`. Tensors of one element, such as a loss,
    can be mixed with DTensors; their gradient is an ordinary tensor. Permanent for the process.

    Args:
        error: function from an operator, or the name of a method, to the error to raise.
        except_in: names of frequent operators that a handler would slow down: only their methods
            are replaced, and compute on local tensors if all tensors have equal layouts.
    """

    def run_explained(operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.is_grad_enabled():
            for argument in args:
                for leaf in argument if isinstance(argument, list | tuple) else (argument,):
                    if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor):
                        _convert_gradients_to_full(leaf)
        try:
            return operator(*args, **kwargs)
        except RuntimeError as mixed:
            if MIXED_TENSORS not in str(mixed):
                raise
            raise error(operator) from mixed

    for operator in operators_of_several_tensors():
        if operator_name(operator) not in except_in:
            set_operator_handler(operator, partial(run_explained, operator))

    def refuse(name: str, *_: object, **__: object) -> Any:
        raise error(name)

    for name in ("numpy", "tolist"):
        setattr(DTensor, name, partialmethod(partial(refuse, name)))
    for name in (*except_in, "__iadd__", "__imul__", "__truediv__", "sqrt"):
        setattr(DTensor, name, _make_explained_method(name, error))
    _explain_in_place_mixing(error)


def _explain_in_place_mixing(error: Callable[[OpOverload], Exception]) -> None:
    """Raise `error(operator)` if an in-place operator of an ordinary tensor gets a DTensor."""
    tail = DTensor._op_dispatcher._dispatch_fast_path_python_tail

    @wraps(tail)
    def run_explained(operator: OpOverload, args: tuple[Any, ...], *rest: Any) -> Any:
        in_place = rest[-2]
        if in_place and not isinstance(args[0], DTensor | list | tuple):
            raise error(operator)
        return tail(operator, args, *rest)

    vars(DTensor._op_dispatcher).setdefault(tail.__name__, run_explained)


def _make_explained_method(name: str, error: Callable[[str], Exception]) -> Callable[..., Any]:
    """Make a replacement of a method that raises `error(name)` if tensors are mixed."""
    method = getattr(Tensor, name)

    # A function, since `torch.compile` cannot trace other callables.
    @wraps(method)
    def run_explained(tensor: DTensor, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return method(tensor, *args, **kwargs)
        local_args = _local_arguments(tensor, args, kwargs)
        if local_args is not None:
            return _with_local_result(tensor, method(*local_args, **kwargs))
        try:
            return method(tensor, *args, **kwargs)
        except RuntimeError as mixed:
            if MIXED_TENSORS not in str(mixed):
                raise
            raise error(name) from mixed

    return run_explained


def _local_arguments(
    tensor: DTensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Any] | None:
    """Return the arguments of an elementwise operator as local tensors; None if the operator needs
    DTensor's dispatch.

    Computing on local tensors is faster, and gives the same result if all tensors have the same
    layout, none is a partial sum, and autograd does not record.
    """
    spec, local = tensor._spec, tensor._local_tensor
    if torch.is_grad_enabled() or tensor.is_inference():
        return None
    if type(tensor) is not DTensor or type(local) is not Tensor:
        return None
    if any(placement.is_partial() for placement in spec.placements):
        return None
    if not local.is_floating_point() or any(isinstance(v, Tensor) for v in kwargs.values()):
        return None
    local_args: list[Any] = [local]
    for argument in args:
        if isinstance(argument, DTensor) and _have_same_layout(argument._spec, spec):
            argument = argument._local_tensor
            if argument.dtype != local.dtype:
                return None
        elif isinstance(argument, Tensor):
            return None
        local_args.append(argument)
    return local_args


def _have_same_layout(first: DTensorSpec, second: DTensorSpec) -> bool:
    return first is second or (
        first.mesh is second.mesh
        and first.placements == second.placements
        and first.shape == second.shape
    )


def _with_local_result(tensor: DTensor, result: Tensor) -> Any:
    """Convert a local result to a DTensor with the layout of `tensor`; returns `tensor` itself
    after an in-place operator."""
    if result is tensor._local_tensor:
        increment_version(tensor)
        return tensor
    return with_spec(result, tensor._spec)
