"""Trials of custom autograd functions on random numbers, to select a method of capture."""

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
"""Maximum elements per tensor in a trial of the factor method; larger tensors are shrunk."""

MOST_ELEMENTS_OF_DERIVATIVE = 1 << 20
"""Maximum elements per tensor in a trial of the derivative, which uses several random draws."""

FACTOR, OPERATORS = "factor", "operators"

CHANGES_INPUT = "it changes its input in place"

ArgumentTypes = Sequence[tuple[torch.Size, torch.dtype] | None]
"""Shape and dtype of each argument; None for arguments that are not tensors."""

RandomNumbers = Callable[[torch.Size], Tensor]
"""Function that returns random numbers of a given shape."""

PullBack = Callable[..., Sequence[Tensor | None]]
"""Function that returns gradients of the arguments from gradients of the outputs."""


class FunctionContext:
    """Replacement for `ctx`, the object that `forward` and `backward` of an autograd function
    share."""

    saved_tensors: tuple[Tensor | None, ...] = ()

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self._constants: tuple[Tensor, ...] = ()

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Tensor | None) -> None:
        """Do nothing: forward-mode gradients are not captured."""

    def set_materialize_grads(self, value: bool) -> None:
        """Do nothing: every output has a gradient during a trial."""

    def mark_dirty(self, *tensors: Tensor) -> None:
        """Do nothing: tracing captures in-place changes of inputs."""

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        self._constants = tensors

    def is_constant(self, output: Any) -> bool:
        """Return whether an output was marked as non-differentiable."""
        return any(output is constant for constant in self._constants)


@dataclass(frozen=True)
class CaptureTrial:
    """Result of trying to capture a custom autograd function.

    Args:
        method: method that captures the function: `FACTOR`, `OPERATORS`, or "" if neither does.
        problem: reason why the factor method fails; "" if it works.
        is_curved: whether the factor depends on the inputs, so that second derivatives are not
            zero.
    """

    method: str
    problem: str = ""
    is_curved: bool = False


def called(
    function: type[Function], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, PullBack, FunctionContext]:
    """Run `forward` with a `FunctionContext`.

    Returns:
        The result, the function that computes gradients of `args`, and the context.
    """
    context = FunctionContext(tuple(map(_is_differentiable, args)))
    ctx: Any = context  # Replaces PyTorch's `ctx`.
    if sets_up_context(function):
        result = function.forward(*args, **kwargs)
        function.setup_context(ctx, tuple(args), result)
    else:
        result = function.forward(ctx, *args, **kwargs)
    has_vjp = function.vjp is not Function.vjp
    own_backward: Callable[..., Any] = function.vjp if has_vjp else function.backward

    def backward(*gradients: Tensor | None) -> Sequence[Tensor | None]:
        # With `boxed_grads_call`, PyTorch passes gradients in a list, which `backward` may empty.
        boxed = getattr(function, "boxed_grads_call", False)
        given = [list(gradients)] if boxed else gradients
        result = own_backward(ctx, *given)
        every = result if isinstance(result, tuple) else (result,)
        # As in PyTorch, `backward` may return more or fewer gradients than there are arguments.
        return (*every, *[None] * len(args))[: len(args)]

    return result, backward, context


def trial(
    function: type[Function], args: Sequence[Any], kwargs: Mapping[str, Any], types: ArgumentTypes
) -> CaptureTrial:
    """Determine by calls on random float64 tensors how a custom autograd function can be
    captured.

    Args:
        function: the custom autograd function.
        args, kwargs: arguments of its call.
        types: shape and dtype of each of `args`.
    """
    with torch.random.fork_rng(devices=[]):
        large = _FunctionTrial(function, args, kwargs, reduced(types, MOST_ELEMENTS))
        problem, is_curved = large.with_factor()
        # A constant factor is exact, with a second derivative of 0. Instead of a curved one,
        # operators are preferred, as they have second derivatives too.
        if problem or is_curved:
            small = reduced(types, MOST_ELEMENTS_OF_DERIVATIVE)
            if _FunctionTrial(function, args, kwargs, small).is_derivative():
                return CaptureTrial(OPERATORS)
    return CaptureTrial("" if problem else FACTOR, problem, is_curved)


def reduced(types: ArgumentTypes, max_numel: int) -> ArgumentTypes:
    """Shrink tensors to at most `max_numel` elements; dimensions of equal size remain equal."""
    shapes = [list(of_tensor[0]) for of_tensor in types if of_tensor is not None]
    if all(prod(shape) <= max_numel for shape in shapes):
        return types
    # All dimensions of the largest size are halved at once.
    while any(prod(shape) > max_numel for shape in shapes):
        largest = max(size for shape in shapes for size in shape)
        shapes = [[size // 2 if size == largest else size for size in shape] for shape in shapes]
    remaining = iter(shapes)
    return [each if each is None else (torch.Size(next(remaining)), each[1]) for each in types]


class _FunctionTrial:
    def __init__(
        self,
        function: type[Function],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        types: ArgumentTypes,
    ) -> None:
        self._function, self._args, self._kwargs, self._types = function, args, kwargs, types
        # Seeded, so that every capture on every rank chooses the same method.
        self._generator = torch.Generator().manual_seed(0)
        # Indices of the arguments whose gradient was not finite in a draw, and of those whose
        # gradient was finite and not zero.
        self._undefined: set[int] = set()
        self._defined: set[int] = set()

    def with_factor(self) -> tuple[str, bool]:
        """Test the factor method: each gradient is the output's gradient times an elementwise
        factor.

        Returns:
            The reason why the method fails, "" if it works; and whether the factor depends on the
            inputs.
        """
        inputs = self._draw_arguments()
        versions = _list_versions(inputs)
        try:
            with torch.no_grad():
                y, backward, _ = called(self._function, inputs, self._kwargs)
                if not isinstance(y, Tensor):
                    return "it returns several values", False
                if not y.is_floating_point():
                    return "it returns no floating-point numbers", False
                if versions != _list_versions(inputs):
                    return CHANGES_INPUT, False
                # If the gradient is the output's gradient times a factor, a gradient of ones gives
                # the factor.
                factors = backward(torch.ones_like(y))
                gradient = self._draw_gradient(y)
                for x, factor, actual in zip(inputs, factors, backward(gradient), strict=True):
                    if problem := _find_factor_problem(x, factor, actual, gradient):
                        return problem, False
                # Inputs scaled by 1 + 1e-9: on the same piece of a piecewise function, but far
                # enough in float64 for a curved factor to differ.
                near = [_perturb_tensor(x) for x in inputs]
                y, backward, _ = called(self._function, near, self._kwargs)
                pairs = zip(factors, backward(torch.ones_like(y)), strict=True)
                is_flat = all(a is None or b is None or torch.equal(a, b) for a, b in pairs)
                return "", not is_flat
        # Any error of the user's code, which gets random numbers in place of its inputs.
        except Exception as error:
            return f"on random numbers it raises {type(error).__name__}: {error}", False

    def is_derivative(self) -> bool:
        """Return whether `backward` computes the derivative of `forward`.

        The comparison uses normal inputs, small inputs, inputs of many magnitudes, integers, and
        zeros. The method fails if gradients are NaN in all trials, as `forward` is then undefined
        for most numbers.
        """
        draws = (
            self._draw_normal_values,
            self._draw_small_values,
            self._draw_with_random_magnitude,
            torch.zeros,
        )
        try:
            return (
                # Each kind of draw twice, with other numbers.
                all(self._matches_derivative_on_draw(draw) for draw in draws * 2)
                and self._undefined <= self._defined
            )
        except Exception:  # Raised by the function, or by operators without a derivative.
            return False

    def _matches_derivative_on_draw(self, draw: RandomNumbers) -> bool:
        leaves = self._draw_arguments(draw)
        positions = [n for n, x in enumerate(leaves) if _is_differentiable(x)]
        for position in positions:
            leaves[position].requires_grad_()
        with torch.enable_grad():
            # A function may change non-leaf tensors in place.
            inputs = [x.clone() if isinstance(x, Tensor) else x for x in leaves]
            result, backward, context = called(self._function, inputs, self._kwargs)
        every = result if isinstance(result, tuple) else (result,)
        outputs = [y for y in every if _has_gradient(y) and not context.is_constant(y)]
        if not outputs:
            return False
        gradients = {id(y): self._draw_gradient(y) for y in outputs}
        actual = torch.autograd.grad(
            outputs,
            [leaves[position] for position in positions],
            list(gradients.values()),
            retain_graph=True,
            materialize_grads=True,
        )
        with torch.no_grad():
            wanted = backward(*(_look_up_gradient(y, gradients) for y in every))
        for position, gradient in zip(positions, actual, strict=True):
            # Equal NaNs pass one draw; an input whose gradient was never finite and non-zero is
            # refused.
            if not gradient.isfinite().all():
                self._undefined.add(position)
            elif gradient.any():
                self._defined.add(position)
        # Inputs are float64, but `forward` may cast its outputs to a lower precision.
        rounding = max(torch.finfo(y.dtype).eps for y in outputs)
        return all(
            _are_equal_gradients(gradient, wanted[position], 1e3 * rounding)
            for position, gradient in zip(positions, actual, strict=True)
        )

    def _draw_arguments(self, draw: RandomNumbers | None = None) -> list[Any]:
        """Return arguments with random numbers in place of tensors."""
        return [
            arg
            if of_tensor is None
            else self._draw_tensor(*of_tensor, draw or self._draw_normal_values)
            for arg, of_tensor in zip(self._args, self._types, strict=True)
        ]

    def _draw_tensor(self, shape: torch.Size, dtype: torch.dtype, draw: RandomNumbers) -> Tensor:
        if dtype.is_floating_point:
            return draw(shape).double()
        # 0 or 1 is valid as an index, a count or a mask.
        return torch.randint(0, 2, shape, generator=self._generator).to(dtype)

    def _draw_small_values(self, shape: torch.Size) -> Tensor:
        """Return random numbers small enough for functions such as `acos` of products."""
        return self._draw_normal_values(shape) * 1e-2

    def _draw_with_random_magnitude(self, shape: torch.Size) -> Tensor:
        numbers = self._draw_normal_values(shape).sign() * 10 ** (
            4 * self._draw_normal_values(shape)
        )
        # One number in six is an integer, where functions such as `round` or `relu` have kinks.
        are_round = self._draw_normal_values(shape) > 1
        return torch.where(are_round, self._draw_normal_values(shape).round(), numbers)

    def _draw_gradient(self, y: Tensor) -> Tensor:
        """Return a random gradient of many magnitudes, which reveals gradient clipping."""
        powers = 8 * torch.rand(y.shape, generator=self._generator, dtype=torch.float64) - 4
        return (self._draw_normal_values(y.shape).sign() * 10**powers).to(y.dtype)

    def _draw_normal_values(self, shape: torch.Size) -> Tensor:
        return torch.randn(shape, generator=self._generator, dtype=torch.float64)


def _find_factor_problem(
    x: Any, factor: Tensor | None, actual: Tensor | None, gradient: Tensor
) -> str:
    """Return the reason why an input's gradient is not the output's gradient times the factor;
    empty if both are equal."""
    if (factor is None) != (actual is None):
        return "which inputs have a gradient depends on numbers"
    if factor is None or actual is None:
        return ""
    if not _is_differentiable(x) or factor.shape != gradient.shape or x.shape != gradient.shape:
        return "an input with a gradient has another shape than the output"
    # A few roundings in the dtype of the output; no absolute tolerance, as factors are elementwise.
    exact, rounding = gradient.double() * factor, 8 * torch.finfo(gradient.dtype).eps
    if not torch.allclose(actual.double(), exact.double(), rtol=rounding, atol=0.0):
        return "a gradient is not that of the output times a factor for each element"
    return ""


def _are_equal_gradients(gradient: Tensor, other: Tensor | None, rounding: float) -> bool:
    """Whether two gradients of an input are equal up to rounding; None represents zero."""
    if other is None:
        return not gradient.any()
    # Small elements may be differences of large ones, so their tolerance is relative to the
    # largest.
    finite = gradient.abs().nan_to_num(posinf=0.0)
    largest = float(finite.max()) if finite.numel() else 0.0
    return gradient.shape == other.shape and torch.allclose(
        other.double(), gradient, rtol=rounding, atol=rounding * 1e-3 * largest, equal_nan=True
    )


def _look_up_gradient(output: Any, gradients: Mapping[int, Tensor]) -> Tensor | None:
    if not isinstance(output, Tensor):
        return None
    return gradients.get(id(output), torch.zeros_like(output))


def _perturb_tensor(value: Any) -> Any:
    """Scale a differentiable tensor by 1 + 1e-9; return other values unchanged."""
    return value * (1 + 1e-9) if _is_differentiable(value) else value


def _list_versions(values: Sequence[Any]) -> list[int]:
    """Return the autograd version counter of each tensor, 0 for other values."""
    return [version(value) if isinstance(value, Tensor) else 0 for value in values]


def _has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
