"""Interception of the functions of `torch.nn.utils` that compute one norm of many tensors."""

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
"""Receives the name of the function, its tensors, and the module if the argument was a call of its
`parameters()`."""

WRAPPED = "func"
"""The free variable of a public function that holds its implementation."""


def before_norms(check: NormCheck) -> None:
    """Call `check` before `clip_grad_norm_` and `get_total_norm` of a list of tensors.

    Calls with a single tensor, and those in compiled functions, are not checked. Permanent for the
    process; a second check is ignored.
    """
    checked = ContextVar("checked", default=False)
    for function in (nn.utils.clip_grad_norm_, nn.utils.get_total_norm):
        cell = _implementation_cell(function)
        if not hasattr(cell.cell_contents, "checks_norms"):
            name = function.__name__.lstrip("_")
            cell.cell_contents = _checking(cell.cell_contents, name, check, checked)


def _implementation_cell(function: Callable[..., Any]) -> CellType:
    """The closure cell with the implementation of a public function.

    Replacing its content also affects code that has already imported the function, which replacing
    the attribute of the module would not.
    """
    closure = function.__closure__
    assert closure is not None, f"{function} is expected to wrap another function"
    return closure[function.__code__.co_freevars.index(WRAPPED)]


def _checking(
    implementation: Callable[..., Any], name: str, check: NormCheck, checked: ContextVar[bool]
) -> Callable[..., Any]:
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
            # Still a generator if it was one: PyTorch warns about empty generators.
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
    """Returns the module if `tensors` is the generator of its `parameters()`, children included."""
    if not isgenerator(tensors) or tensors.gi_code is not nn.Module.parameters.__code__:
        return None
    arguments = getgeneratorlocals(tensors)
    return arguments["self"] if arguments.get("recurse") else None
