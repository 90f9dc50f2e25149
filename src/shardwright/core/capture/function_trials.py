"""Trials of custom autograd functions on random numbers: how their gradients can be captured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from shardwright.core.torch_internals.autograd import sets_up_context
from shardwright.core.torch_internals.tensors import version

MOST_ELEMENTS = 1 << 24
"""Of the tensors on which a factor is tried; larger ones are tried at a smaller size."""

MOST_ELEMENTS_OF_DERIVATIVE = 1 << 20
"""The same where a derivative is tried, on several draws."""

FACTOR, OPERATORS = "factor", "operators"

CHANGES_INPUT = "it changes its input in place"

ArgumentTypes = Sequence[tuple[torch.Size, torch.dtype] | None]
"""Shape and dtype of each argument; None for what is no tensor."""

RandomNumbers = Callable[[torch.Size], Tensor]
"""Numbers of a shape."""

PullBack = Callable[..., Sequence[Tensor | None]]
"""The gradients of a function's arguments, from those of its outputs."""


class FunctionContext:
    """What `forward` and `backward` of a function hand over."""

    saved_tensors: tuple[Tensor | None, ...] = ()

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self._constants: tuple[Tensor, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Tensor | None) -> None:
        """Without effect, as forward mode is not captured."""

    def set_materialize_grads(self, value: bool) -> None:
        """Without effect, as every output has a gradient."""

    def mark_dirty(self, *tensors: Tensor) -> None:
        """Without effect, as changes in place are captured as they are."""

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        self._constants = tensors

    def is_constant(self, output: Any) -> bool:
        """Whether an output has no gradient."""
        return any(output is constant for constant in self._constants)


@dataclass(frozen=True)
class CaptureTrial:
    """How a function can be captured.

    Args:
        way: `FACTOR`, `OPERATORS`, or "" for neither.
        problem: why not with a factor.
        is_curved: whether the factor depends on the inputs, so that the function has a second
            derivative.
    """

    way: str
    problem: str = ""
    is_curved: bool = False


def called(
    function: type[Function], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, PullBack, FunctionContext]:
    """What `forward` returns, and what computes the gradients of `args` from those of that."""
    context = FunctionContext(tuple(map(_is_differentiable, args)))
    own: Any = context  # For `forward`, in place of PyTorch's.
    if sets_up_context(function):
        result = function.forward(*args, **kwargs)
        function.setup_context(own, tuple(args), result)
    else:
        result = function.forward(own, *args, **kwargs)
    has_vjp = function.vjp is not Function.vjp
    own_backward: Callable[..., Any] = function.vjp if has_vjp else function.backward

    def backward(*gradients: Tensor | None) -> Sequence[Tensor | None]:
        boxed = getattr(function, "boxed_grads_call", False)
        given = [list(gradients)] if boxed else gradients
        found = own_backward(own, *given)
        every = found if isinstance(found, tuple) else (found,)
        # As in PyTorch, there may be fewer or more, for defaults and keywords.
        return (*every, *[None] * len(args))[: len(args)]

    return result, backward, context


def trial(
    function: type[Function], args: Sequence[Any], kwargs: Mapping[str, Any], types: ArgumentTypes
) -> CaptureTrial:
    """Tries a function on random numbers, in double precision where it has any."""
    with torch.random.fork_rng(devices=[]):
        large = _Trial(function, args, kwargs, reduced(types, MOST_ELEMENTS))
        problem, is_curved = large.with_factor()
        if problem or is_curved:
            small = reduced(types, MOST_ELEMENTS_OF_DERIVATIVE)
            if _Trial(function, args, kwargs, small).is_derivative():
                return CaptureTrial(OPERATORS)
    return CaptureTrial("" if problem else FACTOR, problem, is_curved)


def reduced(types: ArgumentTypes, most: int) -> ArgumentTypes:
    """The same with smaller tensors, if one has more than `most` elements: dimensions of equal size
    stay equal."""
    shapes = [list(of_tensor[0]) for of_tensor in types if of_tensor is not None]
    if all(prod(shape) <= most for shape in shapes):
        return types
    while any(prod(shape) > most for shape in shapes):
        largest = max(size for shape in shapes for size in shape)
        shapes = [[size // 2 if size == largest else size for size in shape] for shape in shapes]
    left = iter(shapes)
    return [each if each is None else (torch.Size(next(left)), each[1]) for each in types]


class _Trial:
    def __init__(
        self,
        function: type[Function],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        types: ArgumentTypes,
    ) -> None:
        self._function, self._args, self._kwargs, self._types = function, args, kwargs, types
        self._generator = torch.Generator().manual_seed(0)

    def with_factor(self) -> tuple[str, bool]:
        """Why the gradients are not those of the output times a factor for each element, "" if they
        are; and whether the factor depends on the inputs."""
        inputs = self._inputs()
        versions = _versions(inputs)
        try:
            with torch.no_grad():
                y, backward, _ = called(self._function, inputs, self._kwargs)
                if not isinstance(y, Tensor):
                    return "it returns several values", False
                if not y.is_floating_point():
                    return "it returns no floating-point numbers", False
                if versions != _versions(inputs):
                    return CHANGES_INPUT, False
                factors = backward(torch.ones_like(y))
                gradient = self._gradient(y)
                for x, factor, found in zip(inputs, factors, backward(gradient), strict=True):
                    if problem := _no_factor(x, factor, found, gradient):
                        return problem, False
                near = [_moved(x) for x in inputs]
                y, backward, _ = called(self._function, near, self._kwargs)
                pairs = zip(factors, backward(torch.ones_like(y)), strict=True)
                is_flat = all(
                    one is None or other is None or torch.equal(one, other) for one, other in pairs
                )
                return "", not is_flat
        except Exception as error:
            return f"on random numbers it raises {type(error).__name__}: {error}", False

    def is_derivative(self) -> bool:
        """Whether `backward` computes the derivative of `forward`, also where inputs are large,
        small, round numbers or all zero."""
        draws = (self._normal, self._of_any_magnitude, torch.zeros)
        try:
            return all(self._is_derivative(draw) for draw in draws * 2)
        except Exception:  # Of the function, or of operators that have no derivative.
            return False

    def _is_derivative(self, draw: RandomNumbers) -> bool:
        leaves = self._inputs(draw)
        places = [n for n, x in enumerate(leaves) if _is_differentiable(x)]
        for place in places:
            leaves[place].requires_grad_()
        with torch.enable_grad():
            # A function may change in place what is no leaf.
            inputs = [x.clone() if isinstance(x, Tensor) else x for x in leaves]
            result, backward, context = called(self._function, inputs, self._kwargs)
        every = result if isinstance(result, tuple) else (result,)
        outputs = [y for y in every if _has_gradient(y) and not context.is_constant(y)]
        if not outputs:
            return False
        gradients = {id(y): self._gradient(y) for y in outputs}
        found = torch.autograd.grad(
            outputs,
            [leaves[place] for place in places],
            list(gradients.values()),
            retain_graph=True,
            materialize_grads=True,
        )
        with torch.no_grad():
            wanted = backward(*(_gradient_of(y, gradients) for y in every))
        rounding = max(torch.finfo(y.dtype).eps for y in outputs)
        return all(
            _equal(gradient, wanted[place], 1e3 * rounding)
            for place, gradient in zip(places, found, strict=True)
        )

    def _inputs(self, draw: RandomNumbers | None = None) -> list[Any]:
        """Random arguments; what is no tensor stays."""
        return [
            arg if of_tensor is None else self._numbers(*of_tensor, draw or self._normal)
            for arg, of_tensor in zip(self._args, self._types, strict=True)
        ]

    def _numbers(self, shape: torch.Size, dtype: torch.dtype, draw: RandomNumbers) -> Tensor:
        if dtype.is_floating_point:
            return draw(shape).double()
        return torch.randint(0, 2, shape, generator=self._generator).to(dtype)

    def _of_any_magnitude(self, shape: torch.Size) -> Tensor:
        numbers = self._normal(shape).sign() * 10 ** (4 * self._normal(shape))
        are_round = self._normal(shape) > 1
        return torch.where(are_round, self._normal(shape).round(), numbers)

    def _gradient(self, y: Tensor) -> Tensor:
        """One of all magnitudes, so that one that is clipped is seen."""
        powers = 8 * torch.rand(y.shape, generator=self._generator, dtype=torch.float64) - 4
        return (self._normal(y.shape).sign() * 10**powers).to(y.dtype)

    def _normal(self, shape: torch.Size) -> Tensor:
        return torch.randn(shape, generator=self._generator, dtype=torch.float64)


def _no_factor(x: Any, factor: Tensor | None, found: Tensor | None, gradient: Tensor) -> str:
    """Why the gradient that was found for an input is not the output's times its factor, if so."""
    if (factor is None) != (found is None):
        return "which inputs have a gradient depends on numbers"
    if factor is None or found is None:
        return ""
    if not _is_differentiable(x) or factor.shape != gradient.shape or x.shape != gradient.shape:
        return "an input with a gradient has another shape than the output"
    exact, rounding = gradient.double() * factor, 8 * torch.finfo(gradient.dtype).eps
    if not torch.allclose(found.double(), exact.double(), rtol=rounding, atol=0.0):
        return "a gradient is not that of the output times a factor for each element"
    return ""


def _equal(gradient: Tensor, other: Tensor | None, rounding: float) -> bool:
    """Whether two gradients of an input are equal but for rounding; None is zero."""
    if other is None:
        return not gradient.any()
    finite = gradient.abs().nan_to_num(posinf=0.0)
    largest = float(finite.max()) if finite.numel() else 0.0
    return gradient.shape == other.shape and torch.allclose(
        other.double(), gradient, rtol=rounding, atol=rounding * 1e-3 * largest, equal_nan=True
    )


def _gradient_of(output: Any, gradients: Mapping[int, Tensor]) -> Tensor | None:
    if not isinstance(output, Tensor):
        return None
    return gradients.get(id(output), torch.zeros_like(output))


def _moved(value: Any) -> Any:
    """A little, if it is a tensor that may have a gradient."""
    return value * (1 + 1e-9) if _is_differentiable(value) else value


def _versions(values: Sequence[Any]) -> list[int]:
    """How often each was changed in place."""
    return [version(value) if isinstance(value, Tensor) else 0 for value in values]


def _has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
