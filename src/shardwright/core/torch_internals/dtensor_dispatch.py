"""Hooks into the dispatch of operators on DTensors: other implementations, fallbacks where PyTorch
raises an error, and a shortcut for elementwise operators."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial, partialmethod, wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from shardwright.core.torch_internals.dtensor import DTensorSpec, with_spec
from shardwright.core.torch_internals.operators import (
    OpOverload,
    operators_in_namespace,
    operators_of_several_tensors,
    written_arguments,
)

MIXED_TENSORS = "got mixed torch.Tensor and DTensor"
"""Part of PyTorch's error for an operator that gets both DTensors and ordinary tensors."""

Fallback = Callable[[OpOverload, tuple[Any, ...], dict[str, Any], Exception | None], Any]
"""Called with an operator, its arguments, and PyTorch's error, None if PyTorch was not asked.
Returns the results, or raises an error."""


def change_results(operator: OpOverload, change: Callable[[Any, Sequence[Any]], Any]) -> None:
    """Change the results of an operator when it is called with DTensors.

    Permanent for the process; a second change of the same operator is ignored.

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

    Permanent for the process; a second handler of the same operator is ignored.

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

    handlers.setdefault(operator, handler)


def _convert_gradients_to_full(tensor: Tensor) -> None:
    """Convert the gradient of an ordinary tensor to a full tensor if it is a DTensor."""
    if tensor.requires_grad and not hasattr(tensor, "converts_gradients"):
        tensor.converts_gradients = True  # type: ignore[attr-defined]
        tensor.register_hook(  # type: ignore[no-untyped-call]
            lambda g: g.full_tensor() if isinstance(g, DTensor) else None
        )


def handle_mixed_tensors(fallback: Fallback) -> None:
    """Call `fallback` for operators that mix DTensors and ordinary tensors.

    Tensors of one element, such as a loss, can be mixed with DTensors if they are not written to;
    their gradient is an ordinary tensor. Permanent for the process.
    """
    for operator in operators_of_several_tensors():
        set_operator_handler(operator, partial(run_unless_mixed, operator, fallback))


def run_unless_mixed(
    operator: OpOverload, fallback: Fallback, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run an operator on DTensors, or `fallback` if PyTorch refuses to mix them with others."""
    if torch.is_grad_enabled():
        for argument in args:
            for leaf in argument if isinstance(argument, list | tuple) else (argument,):
                if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor):
                    _convert_gradients_to_full(leaf)
    # PyTorch would write this rank's part of a result into an ordinary tensor of one element.
    written = written_arguments(operator)
    if written and any(_ordinary_tensors(written, args, kwargs)):
        return fallback(operator, args, kwargs, None)
    try:
        return operator(*args, **kwargs)
    except RuntimeError as mixed:
        if MIXED_TENSORS not in str(mixed):
            raise
        return fallback(operator, args, kwargs, mixed)


def _ordinary_tensors(
    written: Sequence[tuple[int, str]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[bool]:
    """True for each ordinary tensor that an operator writes to."""
    for index, name in written:
        argument = args[index] if index < len(args) else kwargs.get(name)
        for leaf in argument if isinstance(argument, list | tuple) else (argument,):
            if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor):
                yield True


def handle_collectives(call: Callable[..., Any]) -> None:
    """Call `call(operator, args, kwargs)` for operators of `torch.distributed` on DTensors.

    Permanent for the process.
    """
    for operator in operators_in_namespace("c10d"):
        set_operator_handler(operator, partial(call, operator))


def handle_unsupported_operators(fallback: Fallback) -> None:
    """Call `fallback` for operators on DTensors that PyTorch does not support.

    Nothing has been computed or sent by then. Not called within
    `without_torch_function_of_subclasses`, for whose code PyTorch's error is an answer. Permanent
    for the process; a second fallback is ignored.
    """
    propagate = DTensor._op_dispatcher._propagate_op_sharding_dispatch_slow_path

    @wraps(propagate)
    def propagate_or_fall_back(
        operator: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], *rest: Any
    ) -> Any:
        try:
            return propagate(operator, args, kwargs, *rest)
        except Exception as error:
            if torch.compiler.is_compiling() or not torch._C._is_torch_function_enabled():
                raise
            return fallback(operator, args, kwargs, error)

    vars(DTensor._op_dispatcher).setdefault(propagate.__name__, propagate_or_fall_back)


def handle_assigned_data(assign: Callable[[DTensor, Any], None]) -> None:
    """Call `assign(tensor, value)` for `tensor.data = value` of DTensors; PyTorch would change the
    wrapper only, and not the local tensor. Permanent for the process."""
    data: Any = Tensor.data

    def set_or_assign(tensor: DTensor, value: Any) -> None:
        if torch.compiler.is_compiling() or type(tensor) is not DTensor:
            data.__set__(tensor, value)
        elif not isinstance(value, Tensor):
            raise TypeError(f"`.data` of a tensor is assigned a {type(value).__name__}")
        else:
            assign(tensor, value)

    setattr(DTensor, "data", property(data.__get__, set_or_assign))  # noqa: B010


def refuse_methods(names: Collection[str], error: Callable[[str], Exception]) -> None:
    """Make methods of DTensors, such as `numpy`, raise `error(name)`. Permanent for the process."""

    def refuse(name: str, *_: object, **__: object) -> Any:
        raise error(name)

    for name in names:
        setattr(DTensor, name, partialmethod(partial(refuse, name)))


def format_values() -> None:
    """Format DTensors of one element with a format as their number (`f"{p.norm():.3f}"`), as
    ordinary tensors are. Permanent for the process."""

    def format_value(tensor: DTensor, specification: str) -> str:
        if tensor.ndim or not specification:
            return object.__format__(tensor, specification)
        return format(tensor.full_tensor().item(), specification)

    setattr(DTensor, "__format__", format_value)  # noqa: B010


def compute_on_local_tensors(names: Collection[str]) -> None:
    """Make elementwise methods of DTensors compute on local tensors where all have equal layouts.

    Faster than DTensor's dispatch. Permanent for the process.
    """
    for name in names:
        method = getattr(Tensor, name)
        setattr(DTensor, name, _make_local_method(method))


def _make_local_method(method: Callable[..., Any]) -> Callable[..., Any]:
    # A function, since `torch.compile` cannot trace other callables.
    @wraps(method)
    def run_on_local_tensors(tensor: DTensor, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return method(tensor, *args, **kwargs)
        local_args = _local_arguments(tensor, args, kwargs)
        if local_args is None:
            return method(tensor, *args, **kwargs)
        return _with_local_result(tensor, method(*local_args, **kwargs))

    return run_on_local_tensors


def _local_arguments(
    tensor: DTensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Any] | None:
    """The arguments of an elementwise operator as local tensors; None if it needs DTensor's
    dispatch.

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
        if isinstance(argument, DTensor) and have_same_layout(argument._spec, spec):
            argument = argument._local_tensor
            if argument.dtype != local.dtype:
                return None
        elif isinstance(argument, Tensor):
            return None
        local_args.append(argument)
    return local_args


def have_same_layout(first: DTensorSpec, second: DTensorSpec) -> bool:
    """Whether two DTensors have the same mesh, placements and shape, by their specs."""
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
