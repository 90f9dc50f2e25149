"""Intercept the functions of `torch.nn.utils` that compute one norm of several tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from functools import wraps
from inspect import getgeneratorlocals, isgenerator, signature
from types import CellType
from typing import Any

import torch
from torch import Tensor, nn

NormCheck = Callable[[str, Sequence[Tensor], "nn.Module | None"], None]
"""Called with the name of the function, its tensors, and the module whose `parameters()` they are,
or None if unknown."""

IMPLEMENTATION_VARIABLE = "func"
"""Free variable of a public function that contains its implementation."""


def before_norms(check: NormCheck) -> None:
    """Call `check` before `clip_grad_norm_` and `get_total_norm` of a list of tensors.

    Calls with a single tensor, and calls in compiled functions, are not checked. Permanent for the
    process; a second check is ignored.
    """
    # Whether the running call was checked: `clip_grad_norm_` calls `get_total_norm`.
    checked = ContextVar("checked", default=False)
    for function in (nn.utils.clip_grad_norm_, nn.utils.get_total_norm):
        cell = _implementation_cell(function)
        if not hasattr(cell.cell_contents, "checks_norms"):
            name = function.__name__.lstrip("_")
            cell.cell_contents = _with_check(cell.cell_contents, name, check, checked)


def _implementation_cell(function: Callable[..., Any]) -> CellType:
    """The closure cell with the implementation of a public function.

    Replacing its content also affects code that has already imported the function, unlike replacing
    the attribute of the module.
    """
    closure = function.__closure__
    assert closure is not None, f"{function} is expected to wrap another function"
    return closure[function.__code__.co_freevars.index(IMPLEMENTATION_VARIABLE)]


def _with_check(
    implementation: Callable[..., Any], name: str, check: NormCheck, checked: ContextVar[bool]
) -> Callable[..., Any]:
    """Wrap the implementation of the function `name`, so that it calls `check` first."""
    parameter = next(iter(signature(implementation).parameters))

    @wraps(implementation)
    def call(*args: Any, **kwargs: Any) -> Any:
        argument = args[0] if args else kwargs.get(parameter)
        # `clip_grad_norm_` calls `get_total_norm` with the gradients of checked parameters.
        if torch.compiler.is_compiling() or checked.get() or argument is None:
            return implementation(*args, **kwargs)
        if not isinstance(argument, Tensor):
            module, tensors = module_of_parameters(argument), list(argument)
            check(name, tensors, module)
            # Pass a generator if it was one: PyTorch warns about empty generators only.
            argument = (tensor for tensor in tensors) if isgenerator(argument) else tensors
        token = checked.set(True)
        try:
            if args:
                return implementation(argument, *args[1:], **kwargs)
            return implementation(**{**kwargs, parameter: argument})
        finally:
            checked.reset(token)

    vars(call)["checks_norms"] = True
    return call


def module_of_parameters(tensors: object) -> nn.Module | None:
    """Return the module of which `tensors` is the generator `parameters()`, with the parameters of
    its children; None for other objects."""
    if not isgenerator(tensors) or tensors.gi_code is not nn.Module.parameters.__code__:
        return None
    arguments = getgeneratorlocals(tensors)
    return arguments["self"] if arguments.get("recurse") else None
