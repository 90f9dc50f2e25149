"""Where every custom autograd function is applied, and every backward pass begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
from torch._functorch.autograd_function import custom_function_call
from torch.autograd import Function, forward_ad, graph
from torch.autograd import function as functions
from torch.autograd.function import _SingleLevelFunction

Apply = Callable[[type[Function], tuple[Any, ...], dict[str, Any], Callable[[], Any]], Any]
"""Applies a custom autograd function to positional and keyword arguments. The last argument does
what PyTorch would do."""


@contextmanager
def functions_applied_by(apply: Apply) -> Iterator[None]:
    """A context in which `apply` applies all custom autograd functions.

    A name that is bound to `STE.apply` holds the Python function `Function.apply`, so a replacement
    of that attribute does not reach it. What is replaced are the two functions that it calls: one
    outside and one inside of transforms of `torch.func`.
    """

    def applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
        original = super(_SingleLevelFunction, cls).apply
        return apply(cls, args, kwargs, lambda: original(*args, **kwargs))

    def applied_in_transform(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return apply(cls, args, kwargs, lambda: custom_function_call(cls, *args, **kwargs))

    with (
        patch.object(_SingleLevelFunction, "apply", classmethod(applied)),
        patch.object(functions, "custom_function_call", applied_in_transform),
    ):
        yield


def sets_up_context(function: type[Function]) -> bool:
    """Whether `forward` of a function takes no context, which `setup_context` fills instead."""
    return function.setup_context is not _SingleLevelFunction.setup_context


def in_differentiating_transform() -> bool:
    """Whether derivatives are taken by a transform of `torch.func` or in forward mode."""
    stack = torch._C._functorch.get_interpreter_stack() or []
    kinds = (torch._C._functorch.TransformType.Grad, torch._C._functorch.TransformType.Jvp)
    return forward_ad._current_level >= 0 or any(each.key() in kinds for each in stack)


def edge_of(tensor: Any) -> tuple[Any, int]:
    """The autograd node that made a tensor, None for a leaf, and the number of its output; or those
    of a `GradientEdge`."""
    if isinstance(tensor, graph.GradientEdge):
        return tensor.node, tensor.output_nr
    return tensor.grad_fn, tensor.output_nr


def before_gradients_of(check: Callable[[Sequence[Any], Sequence[Any]], None]) -> None:
    """From now on lets `torch.autograd.grad`, and `backward` with `inputs`, first call `check` with
    the outputs and inputs: tensors and `GradientEdge`s."""
    run: Callable[..., Any] = graph._engine_run_backward

    @wraps(run)
    def checked(outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        inputs = args[3] if len(args) > 3 else kwargs.get("inputs", ())
        if inputs:
            check(outputs, inputs)
        return run(outputs, *args, **kwargs)

    for module in (graph, torch.autograd):
        vars(module)["_engine_run_backward"] = checked
