"""Custom autograd functions train as in the eager module, or are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

import shardwright as sw
from random_plans import random_plan
from shardwright.errors import CaptureError


class Swish(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return gradient * (s + x * s * (1 - s))


class Sign(Function):
    """Straight through where the input is small."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient.masked_fill(x.abs() > 1, 0.0)


class Reversed(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.strength * gradient, None


class Gated(Function):
    """The gate learns at half the rate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(x, gate)
        return x * gate

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor]:
        x, gate = ctx.saved_tensors
        return gradient * gate if ctx.needs_input_grad[0] else None, 0.5 * gradient * x


class Rounded(Function):
    """In half the precision, with a gradient in full."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.double()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.gate, self.head = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = Gated.apply(Swish.apply(self.inner(x)), self.gate(x))
        y = y + Rounded.apply(y).to(y.dtype)
        loss: Tensor = self.head(Reversed.apply(Sign.apply(y), 0.3)).square().mean()
        return loss


@pytest.mark.parametrize("seed", range(4))
def test_functions_that_compute_element_by_element_train_under_any_plan(seed: int) -> None:
    net, batch = Net(), (torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)),)
    plan = random_plan(sw.capture(net, batch), 4, seed)
    check = sw.check(net, batch, None, plan)
    assert check.passes() and check.gradient_difference < 1e-12, check


class Softmax(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.softmax(-1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return y * (gradient - (gradient * y).sum(-1, keepdim=True))


class Clipped(Reversed):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.clamp(-1, 1), None


class Scaled(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        return gradient * scale, (gradient * x).sum().reshape(1)


class Split(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.clone(), x.neg()

    @staticmethod
    def backward(ctx: Any, one: Tensor, other: Tensor) -> Tensor:
        return one - other


class InPlace(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


@pytest.mark.parametrize(
    ("apply", "why"),
    [
        (lambda x, scale: Softmax.apply(x), "`Softmax`: a gradient is not that of the output"),
        (lambda x, scale: Clipped.apply(x, 1.0), "`Clipped`: a gradient is not that of the"),
        (lambda x, scale: Scaled.apply(x, scale), "`Scaled`: an input with a gradient has"),
        (lambda x, scale: Split.apply(x)[0], "`Split`: it returns several values"),
        (lambda x, scale: InPlace.apply(x), "`InPlace`: on random numbers it raises"),
    ],
)
def test_other_functions_are_refused(apply: Any, why: str) -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = apply(self.inner(x), self.scale)
            return result.square().mean()

    with pytest.raises(CaptureError, match=f"custom backward of the autograd function {why}"):
        sw.capture(Other(), (torch.randn(4, 8),))
