"""Custom autograd functions that compute element by element.

Export traces the operators of a function's forward pass only. Where the gradient of an input is
that of the output times a factor for each element, as of activations, straight-through estimators
and reversed gradients, operators can have both: `y + (x - x.detach()) * factor` is `y`, and its
gradient is the function's. Whether it is so is tried on random numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from shardwright.errors import CaptureError

MOST_ELEMENTS = 1 << 24
"""Of the tensors on which a function is tried."""


class FunctionContext:
    """What `forward` and `backward` of a function hand over."""

    saved_tensors: tuple[Tensor | None, ...] = ()

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """Without effect, as the one output always has a gradient."""


def traced(function: type[Function], args: Sequence[Any]) -> Tensor:
    """The output of a function, of operators whose gradients are what its `backward` says.

    Raises:
        CaptureError: if its gradients are not of that kind.
    """
    kinds = [(a.shape, a.dtype) if isinstance(a, Tensor) else None for a in args]
    # In a thread of its own none of the modes of a capture is active.
    with ThreadPoolExecutor(1) as thread:
        problem = thread.submit(_problem, function, args, kinds).result()
    if problem is not None:
        raise CaptureError(
            f"cannot capture the custom backward of the autograd function "
            f"`{function.__qualname__}`: {problem}. Write it with differentiable operators, or "
            f"register it as an operator (`torch.library.custom_op` with `register_autograd`)."
        )
    y, backward = _called(function, [a.detach() if isinstance(a, Tensor) else a for a in args])
    zeros = [
        ((x - x.detach()) * factor.detach()).to(y.dtype)
        for x, factor in zip(args, backward(torch.ones_like(y)), strict=True)
        if factor is not None
    ]
    return sum(zeros, y)


def _called(
    function: type[Function], args: Sequence[Any]
) -> tuple[Tensor, Callable[[Tensor], Sequence[Tensor | None]]]:
    """The output of `forward`, and what computes the gradients of the inputs from its own."""
    context: Any = FunctionContext(tuple(map(_is_differentiable, args)))
    if "setup_context" in vars(function):
        y = function.forward(*args)
        function.setup_context(context, tuple(args), y)
    else:
        y = function.forward(context, *args)

    def backward(gradient: Tensor) -> Sequence[Tensor | None]:
        gradients = function.backward(context, gradient)
        every = gradients if isinstance(gradients, tuple) else (gradients,)
        return (*every, *[None] * (len(args) - len(every)))

    return y, backward


def _problem(
    function: type[Function], args: Sequence[Any], kinds: Sequence[tuple[torch.Size, Any] | None]
) -> str | None:
    """Why it cannot be traced, found on random numbers, in double precision where it has any."""
    if any(kind is not None and kind[0].numel() > MOST_ELEMENTS for kind in kinds):
        return f"a tensor of over {MOST_ELEMENTS:,} elements is too large to try it"
    generator = torch.Generator().manual_seed(0)

    def number(kind: tuple[torch.Size, torch.dtype]) -> Tensor:
        shape, dtype = kind
        if dtype.is_floating_point:
            return torch.randn(shape, generator=generator, dtype=torch.float64)
        return torch.randint(0, 2, shape, generator=generator).to(dtype)

    inputs = [arg if kind is None else number(kind) for arg, kind in zip(args, kinds, strict=True)]
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            y, backward = _called(function, inputs)
            if not isinstance(y, Tensor):
                return "it returns several values"
            if not y.is_floating_point():
                return "it returns no floating-point numbers"
            factors = backward(torch.ones_like(y))
            # Gradients of all magnitudes, so that one that is clipped is seen.
            powers = 8 * torch.rand(y.shape, generator=generator, dtype=torch.float64) - 4
            signs = torch.randn(y.shape, generator=generator, dtype=torch.float64).sign()
            gradient = (signs * 10**powers).to(y.dtype)
            for x, factor, got in zip(inputs, factors, backward(gradient), strict=True):
                if (factor is None) != (got is None):
                    return "which inputs have a gradient depends on numbers"
                if factor is None or got is None:
                    continue
                if not _is_differentiable(x) or factor.shape != y.shape or x.shape != y.shape:
                    return "an input with a gradient has another shape than the output"
                exact, rounding = gradient.double() * factor, 8 * torch.finfo(y.dtype).eps
                if not torch.allclose(got.double(), exact.double(), rtol=rounding, atol=0.0):
                    return "a gradient is not that of the output times a factor for each element"
    except Exception as error:
        return f"on random numbers it raises {type(error).__name__}: {error}"
    return None


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
