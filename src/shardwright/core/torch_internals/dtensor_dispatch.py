"""Hooks into DTensor dispatch: custom handlers, fallbacks where PyTorch raises an error, and a fast
path for elementwise operators."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial, partialmethod, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from shardwright.core.torch_internals.compiled import is_compiling
from shardwright.core.torch_internals.dtensor import DTensorSpec, with_spec
from shardwright.core.torch_internals.operators import (
    OpOverload,
    operators_in_namespace,
    operators_of_several_tensors,
    written_arguments,
)

MIXED_TENSORS = "got mixed torch.Tensor and DTensor"
"""Substring of PyTorch's error for an operator called with both DTensors and ordinary tensors."""

Fallback = Callable[[OpOverload, tuple[Any, ...], dict[str, Any], Exception | None], Any]
"""Function that returns an operator's results or raises an error. Arguments: operator, positional
arguments, keyword arguments, and PyTorch's error (None if PyTorch has not run the operator)."""


def change_results(operator: OpOverload, change: Callable[[Any, Sequence[Any]], Any]) -> None:
    """Postprocess the results of an operator on DTensors.

    The change is permanent for the process; a second call for the same operator is ignored.

    Args:
        operator: the ATen operator.
        change: called with the results and the positional arguments; returns the new results.
    """

    def handler(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return change(operator(*args, **kwargs), args)

    set_operator_handler(operator, handler)


def set_operator_handler(
    operator: OpOverload, call: Callable[[tuple[Any, ...], dict[str, Any]], Any]
) -> None:
    """Replace the implementation of an operator for DTensors.

    The change is permanent for the process; a second handler of the same operator is ignored.

    Args:
        operator: the ATen operator.
        call: called with the positional and the keyword arguments. While it runs, the operator has
            PyTorch's own implementation.
    """
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers

    def handler(called: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        handlers.pop(called, None)
        try:
            return call(args, kwargs)
        finally:
            handlers[called] = handler

    # The handlers that PyTorch itself has registered stay, such as those of convolutions.
    handlers.setdefault(operator, handler)


def _convert_gradients_to_full(tensor: Tensor) -> None:
    """Register a hook that converts a DTensor gradient of an ordinary tensor to a full tensor."""
    # One hook for each tensor, however many operators read it.
    if tensor.requires_grad and not hasattr(tensor, "converts_gradients"):
        tensor.converts_gradients = True  # type: ignore[attr-defined]
        tensor.register_hook(  # type: ignore[no-untyped-call]
            # None leaves the gradient as it is.
            lambda g: g.full_tensor() if isinstance(g, DTensor) else None
        )


def handle_mixed_tensors(fallback: Fallback) -> None:
    """Call `fallback` for operators that mix DTensors and ordinary tensors.

    Ordinary tensors of one element, such as a loss, can be mixed with DTensors if the operator does
    not write to them; their gradients are ordinary tensors. The change is permanent for the
    process.
    """
    for operator in operators_of_several_tensors():
        set_operator_handler(operator, partial(run_unless_mixed, operator, fallback))


def run_unless_mixed(
    operator: OpOverload, fallback: Fallback, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run an operator, or `fallback` if PyTorch does not support mixing DTensors with the ordinary
    tensors among the arguments."""
    if torch.is_grad_enabled():
        for argument in args:
            for leaf in argument if isinstance(argument, list | tuple) else (argument,):
                if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor):
                    _convert_gradients_to_full(leaf)
    # PyTorch would write the local shard of a result into an ordinary tensor of one element.
    written = written_arguments(operator)
    if written and any(_iterate_ordinary_tensor_writes(written, args, kwargs)):
        return fallback(operator, args, kwargs, None)
    try:
        return operator(*args, **kwargs)
    except RuntimeError as mixed:
        # Other errors are those of the operator itself.
        if MIXED_TENSORS not in str(mixed):
            raise
        return fallback(operator, args, kwargs, mixed)


def _iterate_ordinary_tensor_writes(
    written: Sequence[tuple[int, str]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[bool]:
    """Yield True for each written argument of an operator that is an ordinary tensor.

    Args:
        written: (position, name) of each argument that the operator writes to.
        args, kwargs: the operator's arguments.
    """
    for index, name in written:
        argument = args[index] if index < len(args) else kwargs.get(name)
        for leaf in argument if isinstance(argument, list | tuple) else (argument,):
            if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor):
                yield True


def handle_collectives(call: Callable[..., Any]) -> None:
    """Replace `c10d` operators (`torch.distributed` functions) on DTensors. The change is permanent
    for the process.

    Args:
        call: called with the operator, positional and keyword arguments; returns the results.
    """
    for operator in operators_in_namespace("c10d"):
        set_operator_handler(operator, partial(call, operator))


def handle_unsupported_operators(fallback: Fallback) -> None:
    """Call `fallback` for operators on DTensors whose sharding propagation fails in PyTorch.

    The operator has not computed or communicated when `fallback` is called. Inside
    `without_torch_function_of_subclasses`, PyTorch's error is raised instead, for callers that
    handle this error. The change is permanent for the process; a second fallback is ignored.
    """
    propagate = DTensor._op_dispatcher._propagate_op_sharding_dispatch_slow_path

    @wraps(propagate)
    def propagate_or_fall_back(
        operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], *options: Any
    ) -> Any:
        try:
            return propagate(operator, args, kwargs, *options)
        # Sharding strategies raise errors of any type for arguments that they do not expect.
        except Exception as error:
            if is_compiling() or not torch._C._is_torch_function_enabled():
                raise
            return fallback(operator, args, kwargs, error)

    # An attribute of the dispatcher hides the method of its class.
    vars(DTensor._op_dispatcher).setdefault(propagate.__name__, propagate_or_fall_back)


def handle_assigned_data(assign: Callable[[DTensor, Any], None]) -> None:
    """Call `assign(tensor, value)` for `tensor.data = value` of DTensors; PyTorch would change the
    wrapper only, and not the local tensor. The change is permanent for the process.

    An ordinary parameter gets the full tensor of a DTensor; PyTorch would end the process by a
    segmentation fault at its next use.
    """
    data: Any = Tensor.data

    def set_or_assign(tensor: DTensor, value: Any) -> None:
        if is_compiling() or type(tensor) is not DTensor:
            data.__set__(tensor, value)
        elif not isinstance(value, Tensor):
            raise TypeError(
                f"`.data` of a DTensor was assigned a {type(value).__name__}\nassign a tensor"
            )
        else:
            assign(tensor, value)

    def set_full(parameter: nn.Parameter, value: Any) -> None:
        is_gathered = isinstance(value, DTensor) and not is_compiling()
        data.__set__(parameter, value.full_tensor() if is_gathered else value)

    setattr(DTensor, "data", property(data.__get__, set_or_assign))  # noqa: B010
    setattr(nn.Parameter, "data", property(data.__get__, set_full))  # noqa: B010


def refuse_methods(names: Collection[str], error: Callable[[str], Exception]) -> None:
    """Make methods of DTensors raise an error. The change is permanent for the process.

    Args:
        names: names of the methods, such as "numpy".
        error: makes the error, given the name of the method.
    """

    def refuse(name: str, *_: object, **__: object) -> Any:
        raise error(name)

    for name in names:
        setattr(DTensor, name, partialmethod(partial(refuse, name)))


def format_values() -> None:
    """Support format specifications for scalar DTensors, such as `f"{p.norm():.3f}"`, as for
    ordinary tensors. The change is permanent for the process."""

    def format_value(tensor: DTensor, specification: str) -> str:
        if tensor.ndim or not specification:
            # PyTorch formats only `Tensor` itself as a number, and other scalars as objects, for
            # which a specification is an error.
            return object.__format__(tensor, specification)
        return format(tensor.full_tensor().item(), specification)

    setattr(DTensor, "__format__", format_value)  # noqa: B010


def compute_on_local_tensors(names: Collection[str]) -> None:
    """Make elementwise methods of DTensors compute on local tensors if all layouts are equal.

    This is faster than DTensor's dispatch. The change is permanent for the process.

    Args:
        names: names of the methods, such as "add_".
    """
    for name in names:
        method = getattr(Tensor, name)
        setattr(DTensor, name, _make_method_on_local_tensors(method))


def _make_method_on_local_tensors(method: Callable[..., Any]) -> Callable[..., Any]:
    # A function, since `torch.compile` cannot trace other callables.
    @wraps(method)
    def run_on_local_tensors(tensor: DTensor, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return method(tensor, *args, **kwargs)
        local_args = _convert_arguments_to_local(tensor, args, kwargs)
        if local_args is None:
            return method(tensor, *args, **kwargs)
        return _wrap_result_as_dtensor(tensor, method(*local_args, **kwargs))

    return run_on_local_tensors


def _convert_arguments_to_local(
    tensor: DTensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Any] | None:
    """Return the positional arguments of an elementwise method as local tensors; None if the method
    needs DTensor's dispatch.

    Local tensors give the same result if all tensors have the same layout, none is a partial sum,
    and autograd does not record.

    Args:
        tensor: the DTensor whose method is called.
        args, kwargs: the other arguments.
    """
    spec, local = tensor._spec, tensor._local_tensor
    # Autograd must record the operator on DTensors, and inference tensors count no versions.
    if torch.is_grad_enabled() or tensor.is_inference():
        return None
    # Subclasses and simulated ranks have a dispatch of their own.
    if type(tensor) is not DTensor or type(local) is not Tensor:
        return None
    # An elementwise function of terms is not the terms of that function of their sum.
    if any(placement.is_partial() for placement in spec.placements):
        return None
    # Integers may be promoted, and a tensor by keyword, such as `out`, would need a layout too.
    if not local.is_floating_point() or any(isinstance(v, Tensor) for v in kwargs.values()):
        return None
    local_args: list[Any] = [local]
    for argument in args:
        if isinstance(argument, DTensor) and have_same_layout(argument._spec, spec):
            argument = argument._local_tensor
            # Type promotion could give a result of another dtype.
            if argument.dtype != local.dtype:
                return None
        elif isinstance(argument, Tensor):
            return None
        local_args.append(argument)
    return local_args


def have_same_layout(first: DTensorSpec, second: DTensorSpec) -> bool:
    """Whether two DTensor specs have the same mesh, placements and global shape."""
    return first is second or (
        first.mesh is second.mesh
        and first.placements == second.placements
        and first.shape == second.shape
    )


def _wrap_result_as_dtensor(tensor: DTensor, result: Tensor) -> Any:
    """Return a local result as a DTensor with the layout of `tensor`, or `tensor` itself after an
    in-place method."""
    if result is tensor._local_tensor:
        # The method has changed the version of the local tensor only.
        increment_version(tensor)
        return tensor
    return with_spec(result, tensor._spec)
