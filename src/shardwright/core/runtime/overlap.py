"""Redistributions that overlap computation, and linear layers that delay their weight gradients.

| program line | forward | backward |
|---|---|---|
| `start` | starts the collective | waits for the collective of the gradient |
| `delay` | nothing | computes the gradient of the weight |
| `finish` | waits for the collective | starts the collective of the gradient |
| `linear` | computes the product | computes the gradient of the input only |

Autograd runs the lines in reverse, so computation between `start` and `finish` overlaps the
collective in both directions. A line `delay` between them computes the weight gradient during the
collective of the input gradient, as Megatron-LM does (Korthikanti et al., "Reducing activation
recomputation in large transformer models", 2022).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from shardwright.core.runtime.collective_errors import program_line
from shardwright.core.runtime.collectives import BoundCollective


class Pending(NamedTuple):
    """A redistribution that has been started and not yet waited for.

    Args:
        token: placeholder of the tensor's shape that takes no memory, through which the gradient
            flows; None without a gradient.
        tensor: the pending result of `Collective.start`.
        dtype: dtype of the redistributed tensor.
    """

    token: Tensor | None
    tensor: Tensor
    dtype: torch.dtype


@dataclass(frozen=True)
class StartCollective:
    """Callable that starts a redistribution of a local tensor."""

    bound: BoundCollective

    def __call__(self, x: Tensor) -> Pending:
        token = _StartCollectiveFunction.apply(x, self.bound) if x.requires_grad else None  # type: ignore[no-untyped-call]
        # Detached, because the gradient flows through the token.
        return Pending(token, self.bound.forward.start(x.detach()), x.dtype)


@dataclass(frozen=True)
class FinishCollective:
    """Callable that waits for a redistribution and returns its local result."""

    bound: BoundCollective

    def __call__(self, pending: Pending) -> Tensor:
        token, tensor, dtype = pending
        if token is None:
            return self.bound.forward.finish(tensor, dtype)
        return _FinishCollectiveFunction.apply(token, tensor, dtype, self.bound)  # type: ignore[no-any-return,no-untyped-call]


class _StartCollectiveFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bound: BoundCollective) -> Tensor:
        ctx.backward_collective, ctx.dtype, ctx.call_site = bound.backward, x.dtype, program_line()
        # The token's gradient is the pending result of a collective, and autograd checks its shape.
        return x.new_empty(()).expand(bound.backward.pending_shape(x.shape))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.backward_collective.finish(gradients[0], ctx.dtype), None


class _FinishCollectiveFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, token: Tensor, tensor: Tensor, dtype: torch.dtype, bound: BoundCollective
    ) -> Tensor:
        ctx.backward_collective, ctx.call_site = bound.backward, program_line()
        out = bound.forward.finish(tensor, dtype)
        # Autograd treats an input that is returned unchanged as modified in place.
        return out.view_as(out) if out is tensor else out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        # Only started: `_StartCollectiveFunction.backward` waits, after the operators between the
        # two.
        return ctx.backward_collective.start(gradients[0]), None, None, None


class DelayedWeight(NamedTuple):
    """A weight whose gradient is computed in the backward pass of `DelayGradient`.

    Args:
        weight: the weight; detached if its gradient is delayed.
        gradient, x: placeholders that take no memory; None if the weight requires no gradient.
            In the backward pass, autograd passes the output gradient of the layer as the gradient
            of `gradient`, and the input of the layer as the gradient of `x`.
    """

    weight: Tensor
    gradient: Tensor | None
    x: Tensor | None


@dataclass(frozen=True)
class DelayGradient:
    """Callable whose backward pass computes the delayed weight gradient of a linear layer.

    Args:
        x_shape, shape: local shapes of the layer's input and output.
    """

    x_shape: tuple[int, ...]
    shape: tuple[int, ...]

    def __call__(self, weight: Tensor) -> DelayedWeight:
        if not weight.requires_grad:
            return DelayedWeight(weight, None, None)
        tokens = _DelayGradientFunction.apply(weight, self.x_shape, self.shape)  # type: ignore[no-untyped-call]
        # Detached, because `_DelayGradientFunction` returns the gradient.
        return DelayedWeight(weight.detach(), *tokens)


def delayed_linear(x: Tensor, delayed: DelayedWeight, bias: Tensor | None = None) -> Tensor:
    """Apply a linear layer whose weight gradient is computed later, by `DelayGradient`."""
    weight, gradient, token = delayed
    if gradient is None:
        return F.linear(x, weight, bias)
    return _DelayedLinearFunction.apply(x, weight, bias, gradient, token)  # type: ignore[no-any-return,no-untyped-call]


class _DelayGradientFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, x_shape: tuple[int, ...], shape: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        # Expanded from one element, so that the tokens take no memory.
        token = weight.new_empty(())
        return token.expand(shape), token.expand(x_shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        gradient, x = gradients
        # dW = dYᵀ X, with all leading dimensions flattened into rows.
        return gradient.flatten(0, -2).t() @ x.flatten(0, -2), None, None


class _DelayedLinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, gradient: Tensor, token: Tensor
    ) -> Tensor:
        # The gradient of the input needs the weight, and the gradient of the weight needs `x`.
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        bias = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        x_gradient = gradient @ weight if ctx.needs_input_grad[0] else None
        # `gradient` and `x` go to the tokens: `_DelayGradientFunction` computes the weight gradient
        # later.
        return x_gradient, None, bias, gradient, x
