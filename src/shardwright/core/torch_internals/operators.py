"""Operators of PyTorch's dispatcher, and the graph nodes that call them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import FunctionSchema, fx
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch.library import Library

assert_tensor = torch._assert
"""`torch._assert`: `assert` as a function, which function modes intercept."""

pack_padded_sequence = torch._pack_padded_sequence
"""Function that implements `torch.nn.utils.rnn.pack_padded_sequence` and `pack_sequence`."""


def schema_of(overload: OpOverload) -> FunctionSchema:
    """Return the schema of an operator: names, types, defaults, aliasing and mutation of its
    arguments."""
    return overload._schema


def operator_name(overload: OpOverload) -> str:
    """Return the name of an operator without namespace and overload: `mean` for `aten.mean.dim`."""
    return overload._opname


def overload_name(overload: OpOverload) -> str:
    """Return the name of an operator's overload: `dim` for `aten.mean.dim`."""
    return overload._overloadname


def is_composite(overload: OpOverload) -> bool:
    """Whether an operator returns new tensors and has a `CompositeImplicitAutograd` kernel, which
    calls other operators and needs no derivative formula."""
    name = overload.name()  # type: ignore[no-untyped-call]
    key = DispatchKey.CompositeImplicitAutograd
    schema = schema_of(overload)
    # `item` is composite too, and returns a number.
    returns_tensors = all("Tensor" in str(each.type) for each in schema.returns)
    is_new = returns_tensors and not schema.is_mutable
    return is_new and torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def call_composite(overload: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run the composite kernel of an operator, which calls other operators.

    Raises:
        NotImplementedError: if the operator has no composite kernel.
    """
    name = overload.name()  # type: ignore[no-untyped-call]
    for key in (DispatchKey.CompositeImplicitAutograd, DispatchKey.CompositeExplicitAutograd):
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, key):
            # Function modes, such as that of `make_fx`, would record the operator itself.
            with torch._C.DisableTorchFunction():
                return overload._op_dk(key, *args, **kwargs)
    raise NotImplementedError(f"operator {overload} has no composite kernel")


def has_kernel(name: str, device_type: str) -> bool:
    """Whether an operator, such as `aten::_fused_adamw_`, has a kernel for a type of device."""
    # The look-up by key raises for an operator that is not registered.
    if not torch._C._dispatch_has_kernel(name):
        return False
    key = torch._C._dispatch_key_for_device(device_type)
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


@cache
def operators_in_namespace(namespace: str) -> tuple[OpOverload, ...]:
    """Return all operators of a namespace, such as `aten`."""
    operators = []
    for name in torch._C._dispatch_get_all_op_names():
        # Names are like `aten::mean.dim`.
        of, _, qualified = name.partition("::")
        packet, _, overload = qualified.partition(".")
        if of == namespace:
            packets = getattr(torch.ops, namespace)
            # The overload without a name is called `default` in Python.
            operators.append(getattr(getattr(packets, packet), overload or "default"))
    return tuple(operators)


@cache
def operators_of_several_tensors() -> tuple[OpOverload, ...]:
    """Return the ATen operators that can take more than one tensor, as arguments or in a list."""
    operators = []
    for operator in operators_in_namespace("aten"):
        types = [str(argument.type) for argument in schema_of(operator).arguments]
        # A list may hold several tensors.
        count = sum(2 if "List[" in name else 1 for name in types if "Tensor" in name)
        if count > 1:
            operators.append(operator)
    return tuple(operators)


@cache
def written_arguments(overload: OpOverload) -> tuple[tuple[int, str], ...]:
    """Return the positions and names of the arguments that an operator writes to."""
    return tuple(
        (index, argument.name)
        for index, argument in enumerate(schema_of(overload).arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def unregister(library: Library) -> None:
    """Remove all kernels that were registered through `library`."""
    # PyTorch itself removes them when the library is collected, which may be later.
    library._destroy()  # type: ignore[no-untyped-call]


def is_erased(node: fx.Node) -> bool:
    """Whether a node has been erased from its graph."""
    return node._erased
