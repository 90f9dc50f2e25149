"""Custom autograd functions (`torch.autograd.Function`), captured with the gradients of their
`backward`.

Export traces only the operators of `forward`, and would differentiate these operators instead of
calling `backward`. A trial on random numbers finds which of two methods gives the gradients of
`backward`:

- **Factor.** The gradient of an input is the gradient of the output times an elementwise factor, as
  for activations, straight-through estimators and gradient reversal. The captured operator
  `with_gradient_of(x * factor, y)` has the value `y` and this gradient.
- **Operators.** `backward` computes the derivative of `forward`, for example with less memory. Then
  the operators of `forward` are differentiated like other operators of the model.

If neither method applies, every device computes the function in full (`functions_in_full`).
Functions that change an input in place, or take objects with parameters, raise CaptureError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.checkpoint import CheckpointFunction

from shardwright.core.capture.annotations import tagging_checkpoint
from shardwright.core.capture.function_trials import CHANGES_INPUT, FACTOR, OPERATORS, called, trial
from shardwright.core.capture.functions_in_full import traced_in_full
from shardwright.core.graph.custom_ops import with_gradient_of
from shardwright.core.torch_internals.autograd import (
    functions_applied_by,
    in_differentiating_transform,
)
from shardwright.core.torch_internals.dispatch import in_transform
from shardwright.errors import CaptureError

CUSTOM_GRADIENT = "custom_gradient"
"""Metadata key with the name of a function whose first but not second derivative was captured."""

_REMEDY = (
    "write the function with differentiable operators, or register it as an operator "
    "(`torch.library.custom_op` with `register_autograd`)"
)


@contextmanager
def trace_custom_backward() -> Iterator[None]:
    """Return a context that traces custom autograd functions with the gradients of `backward`.

    Reentrant checkpointing is a custom autograd function of PyTorch; the operators of a
    checkpointed function are tagged for recomputation.

    Raises:
        CaptureError: for a function whose gradients cannot be captured.
    """
    with functions_applied_by(_trace_autograd_function):
        yield


def _trace_autograd_function(
    function: type[Function],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    original: Callable[[], Any],
) -> Any:
    if function is CheckpointFunction:
        return _run_checkpointed(args)
    # Functions of PyTorch and Shardwright themselves: the trace records the operators they call.
    if function.__module__.partition(".")[0] in ("torch", "shardwright"):
        return original()
    differentiable = any(isinstance(arg, Tensor) and arg.requires_grad for arg in args)
    # Inside a function transform, `requires_grad` is False for what an outer one differentiates.
    if torch.is_grad_enabled() and (differentiable or in_transform()):
        return traced(function, args, kwargs)
    # `apply` runs `forward` without autograd: tensors that it reads from a closure get no gradient.
    with torch.no_grad():
        return original()


def _run_checkpointed(args: tuple[Any, ...]) -> Any:
    function, _, *inputs = args
    trained = any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
    if torch.is_grad_enabled() and not trained:
        raise CaptureError(
            "`checkpoint(…, use_reentrant=True)` gives no gradients to the parameters of a "
            "function whose inputs require no gradient\npass `use_reentrant=False`"
        )
    with tagging_checkpoint():
        return function(*inputs)


def traced(function: type[Function], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the result of a custom autograd function, with the gradients of its `backward`.

    Raises:
        CaptureError: if the gradients cannot be captured.
    """
    types = [(a.shape, a.dtype) if isinstance(a, Tensor) else None for a in args]
    # In a new thread, where no dispatch or function mode of the capture is active.
    with ThreadPoolExecutor(1) as thread:
        tried = thread.submit(trial, function, args, kwargs, types).result()
    if tried.method == OPERATORS:
        return _differentiate_operators(function, args, kwargs)
    if tried.method != FACTOR:
        result, problem = None, tried.problem
        # The replicated operator mutates no argument, and has no rule for function transforms.
        if problem != CHANGES_INPUT and not in_transform():
            result, problem = traced_in_full(function, args, kwargs)
        if problem:
            raise CaptureError(
                f"cannot capture the custom backward of the autograd function "
                f"`{function.__qualname__}`: {problem}\n{_REMEDY}"
            )
        return result
    # The factor is detached, so a second derivative would miss its dependence on the input.
    if tried.is_curved and in_differentiating_transform():
        raise CaptureError(second_derivative(function.__qualname__))
    result = _multiply_by_factor(function, args, kwargs)
    mode = get_proxy_mode()
    if tried.is_curved and mode is not None:
        last = next(iter(reversed(mode.tracer.graph.nodes)))
        # `gradients` refuses a second derivative through this node.
        last.meta[CUSTOM_GRADIENT] = function.__qualname__
    return result


def second_derivative(name: str) -> str:
    """Return the error message for a second derivative of the autograd function `name`."""
    return (
        f"`forward` computes gradients through the autograd function `{name}`, and the derivative "
        f"of its `backward` cannot be captured\n{_REMEDY}"
    )


def _multiply_by_factor(
    function: type[Function], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Tensor:
    # Detached: the gradient flows through the factors alone.
    detached = [a.detach() if isinstance(a, Tensor) else a for a in args]
    output, backward, _ = called(function, detached, kwargs)
    y: Tensor = output
    products = [
        # With the derivative `factor` with respect to `x`.
        (x * factor.detach()).to(y.dtype)
        for x, factor in zip(args, backward(torch.ones_like(y)), strict=True)
        if factor is not None
    ]
    if not products:
        return y
    source: Tensor = sum(products[1:], products[0])
    if not in_transform():
        result: Tensor = with_gradient_of(source, y)
        return result
    # Transforms have no rules for that operator. The difference is 0, or NaN if `source` is not
    # finite; the gradient of `where` is then 0.
    difference = source - source.detach()
    return y + torch.where(difference == 0, difference, 0)


def _differentiate_operators(
    function: type[Function], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    result, _, context = called(function, args, kwargs)

    def constant(output: Any) -> Any:
        return output.detach() if context.is_constant(output) else output

    return tuple(map(constant, result)) if isinstance(result, tuple) else constant(result)
