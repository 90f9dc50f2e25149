"""Intercept custom autograd functions and backward passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch._functorch.autograd_function import custom_function_call
from torch.autograd import Function, forward_ad, graph
from torch.autograd import function as functions
from torch.autograd.function import _SingleLevelFunction

Apply = Callable[[type[Function], tuple[Any, ...], dict[str, Any], Callable[[], Any]], Any]
"""Signature of a replacement of `Function.apply`. Arguments: subclass of `Function`, positional
arguments, keyword arguments, and a callable that runs PyTorch's own implementation."""


@contextmanager
def functions_applied_by(apply: Apply) -> Iterator[None]:
    """Context manager in which `apply` handles all calls of custom autograd functions.

    Replacing `Function.apply` would miss names bound earlier (`ste = STE.apply`). So the two
    functions that `Function.apply` calls are replaced: one for calls outside and one for calls
    inside of `torch.func` transforms.
    """

    def apply_outside(cls: Any, *args: Any, **kwargs: Any) -> Any:
        # The implementation in C++, of the base class of `_SingleLevelFunction`.
        original = super(_SingleLevelFunction, cls).apply
        return apply(cls, args, kwargs, lambda: original(*args, **kwargs))

    def apply_in_transform(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return apply(cls, args, kwargs, lambda: custom_function_call(cls, *args, **kwargs))

    with (
        patch.object(_SingleLevelFunction, "apply", classmethod(apply_outside)),
        patch.object(functions, "custom_function_call", apply_in_transform),
    ):
        yield


def sets_up_context(function: type[Function]) -> bool:
    """Whether an autograd function defines `setup_context`, so that `forward` takes no `ctx`."""
    # The base class has a `setup_context` too, which only raises an error.
    return function.setup_context is not _SingleLevelFunction.setup_context


def in_differentiating_transform() -> bool:
    """Whether a differentiating `torch.func` transform or forward-mode AD is active."""
    # None outside of all transforms.
    stack = torch._C._functorch.get_interpreter_stack() or []
    types = (torch._C._functorch.TransformType.Grad, torch._C._functorch.TransformType.Jvp)
    # The level is -1 outside of forward-mode AD.
    return forward_ad._current_level >= 0 or any(each.key() in types for each in stack)


def gradient_edge_of(tensor: Any) -> tuple[Any, int]:
    """Return the autograd node (None for a leaf) and output index of a tensor or `GradientEdge`."""
    if isinstance(tensor, graph.GradientEdge):
        return tensor.node, tensor.output_nr
    return tensor.grad_fn, tensor.output_nr


def check_before_grad(check: Callable[[Sequence[Any], Sequence[Any]], None]) -> None:
    """Call `check` before every `torch.autograd.grad` and every `backward(inputs=…)`.

    The change is permanent for the process.

    Args:
        check: called with the outputs and the inputs, which are tensors or `GradientEdge`s.
    """
    _wrap_engine_backward(lambda run_backward: _check_arguments_before_run(run_backward, check))


def around_backward(context: Callable[[], AbstractContextManager[None]]) -> None:
    """Run every backward pass inside a new context manager. The change is permanent for the
    process.

    Args:
        context: makes the context manager of each backward pass.
    """

    def wrap(run_backward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(run_backward)
        def run(*args: Any, **kwargs: Any) -> Any:
            with context():
                return run_backward(*args, **kwargs)

        return run

    _wrap_engine_backward(wrap)


def _check_arguments_before_run(
    run_backward: Callable[..., Any], check: Callable[[Sequence[Any], Sequence[Any]], None]
) -> Callable[..., Any]:
    @wraps(run_backward)
    def check_and_run(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        # Of `_engine_run_backward`, after the gradients, `retain_graph` and `create_graph`.
        inputs = args[3] if len(args) > 3 else kwargs.get("inputs", ())
        # Without inputs `backward()` accumulates into all leaves: the caller has chosen none.
        if inputs:
            check(outputs, inputs)
        return run_backward(outputs, *args, **kwargs)

    return check_and_run


def _wrap_engine_backward(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the function through which Python starts backward passes in the autograd engine."""
    wrapped = wrap(graph._engine_run_backward)
    # `torch.autograd` has imported the function by name.
    for module in (graph, torch.autograd):
        vars(module)["_engine_run_backward"] = wrapped
