"""Calls of `torch.nn.utils` that compute one norm of many tensors."""

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
"""Receives the name of the called function, its tensors, and the module whose `parameters()` they
are, if that call was the argument."""

WRAPPED = "func"
"""The free variable in which a public function keeps its implementation."""


def before_norms(check: NormCheck) -> None:
    """Calls `check` before `torch.nn.utils` computes one norm of a list of tensors.

    The norm of one tensor that is not in a list, and calls inside of `torch.compile`, are not
    checked. The first check of the process stays.
    """
    checked = ContextVar("checked", default=False)
    for function in (nn.utils.clip_grad_norm_, nn.utils.get_total_norm):
        cell = _implementation_cell(function)
        if not hasattr(cell.cell_contents, "checks_norms"):
            name = function.__name__.lstrip("_")
            cell.cell_contents = _checking(cell.cell_contents, name, check, checked)


def _implementation_cell(function: Callable[..., Any]) -> CellType:
    """The cell that holds the implementation of a public function. It is shared by everyone who
    has imported the function, unlike the name in a module."""
    closure = function.__closure__
    assert closure is not None, f"{function} is expected to wrap another function"
    return closure[function.__code__.co_freevars.index(WRAPPED)]


def _checking(
    implementation: Callable[..., Any], name: str, check: NormCheck, checked: ContextVar[bool]
) -> Callable[..., Any]:
    parameter = next(iter(signature(implementation).parameters))

    @wraps(implementation)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else kwargs.get(parameter)
        # `clip_grad_norm_` calls `get_total_norm` with the gradients of checked parameters.
        if torch.compiler.is_compiling() or checked.get() or given is None:
            return implementation(*args, **kwargs)
        if not isinstance(given, Tensor):
            module, tensors = module_of_parameters(given), list(given)
            check(name, tensors, module)
            # PyTorch warns about empty generators.
            given = (tensor for tensor in tensors) if isgenerator(given) else tensors
        token = checked.set(True)
        try:
            if args:
                return implementation(given, *args[1:], **kwargs)
            return implementation(**{**kwargs, parameter: given})
        finally:
            checked.reset(token)

    vars(call)["checks_norms"] = True
    return call


def module_of_parameters(tensors: object) -> nn.Module | None:
    """The module if `tensors` is what its `parameters()` returned, with those of its children."""
    if not isgenerator(tensors) or tensors.gi_code is not nn.Module.parameters.__code__:
        return None
    arguments = getgeneratorlocals(tensors)
    return arguments["self"] if arguments.get("recurse") else None
