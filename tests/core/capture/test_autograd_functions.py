"""Custom autograd functions train as in the eager module; few are refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import CheckpointFunction, checkpoint

import shardwright as sw
from core.capture.autograd_ranks import CHECKS, Softmax
from random_cases import random_cases
from random_plans import random_plan
from shardwright.core.capture.function_trials import reduced
from shardwright.errors import CaptureError
from torchrun import checks_on_ranks

pytestmark = pytest.mark.usefixtures("untried_suggestions")


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


@random_cases(4)
def test_functions_that_compute_element_by_element_train_under_any_plan(seed: int) -> None:
    net, batch = Net(), (torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)),)
    plan = random_plan(sw.capture(net, batch), 4, seed)
    check = sw.check(net, batch, None, plan)
    assert check.passes() and check.gradient_difference < 1e-12, check


def net_with(apply: Callable[[Tensor], Tensor]) -> nn.Module:
    """A model that trains through `apply`."""

    class Applying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner, self.apply_of_self = nn.Linear(8, 8), apply

        def forward(self, x: Tensor) -> Tensor:
            return self.apply_of_self(self.inner(x)).square().mean()

    return Applying()


def check_trains_as_eager(net: nn.Module, *batch: Tensor) -> None:
    plan = random_plan(sw.capture(net, batch), 4, 0)
    check = sw.check(net, batch, None, plan)
    assert check.passes() and check.gradient_difference < 1e-12, check


class SetsUp(Sign):
    """Inherits `setup_context`, and has a default."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, scale: float = 1.0) -> Tensor:
        return x.sign() * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:  # type: ignore[override]
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient * ctx.scale, None


class Inherits(SetsUp):
    pass


class Halved(Function):
    """With a gradient that is none of its operators', a keyword, and more gradients than inputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shift: float = 0.0) -> Tensor:
        return x.round() + shift

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / 2, None


sign, sets_up, inherits = Sign.apply, SetsUp.apply, Inherits.apply
in_dict = {"sign": Sign.apply}


def by_default(x: Tensor, function: Any = Sign.apply) -> Tensor:
    result: Tensor = function(x)
    return result


class OfClass:
    kept = staticmethod(Sign.apply)


BOUND: dict[str, Callable[[Tensor], Tensor]] = {
    "of a module": lambda x: sign(x),
    "partial": functools.partial(SetsUp.apply, scale=3.0),
    "default": by_default,
    "dict": lambda x: in_dict["sign"](x),
    "static method": OfClass.kept,
    "closure": (lambda function: lambda x: function(x))(Sign.apply),
    "of no class": functools.partial(Function.__dict__["apply"].__func__, Sign),
    "inherited": lambda x: inherits(x, 2.0),
    "keyword": functools.partial(Halved.apply, shift=2.0),
    "vmap": lambda x: torch.vmap(sets_up)(x),
    "checkpointed": functools.partial(checkpoint, sign, use_reentrant=False),
    "reentrant": functools.partial(CheckpointFunction.apply, sign, True),
}


class Bound(nn.Module):
    """A layer for each name, whose gradient is that of the function alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in BOUND)
        self.apply_of_self = Sign.apply

    def forward(self, x: Tensor) -> Tensor:
        pairs = zip(BOUND.values(), self.layers, strict=True)
        results = [apply(layer(x)) for apply, layer in pairs]
        return torch.stack([*results, self.apply_of_self(results[0])]).square().mean()


def test_functions_are_captured_by_whatever_name_they_are_applied() -> None:
    check_trains_as_eager(Bound(), torch.randn(8, 8))


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


class Largest(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        largest, where = x.max(-1)
        ctx.mark_non_differentiable(where)
        ctx.save_for_backward(x, where)
        return largest, where

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Tensor:
        x, where = ctx.saved_tensors
        return torch.zeros_like(x).scatter(-1, where[..., None], gradient[..., None])


class InPlace(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 2 * gradient


class Exact(nn.Module):
    """Its functions compute the derivatives of their `forward`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.scale = nn.Linear(8, 8), nn.Parameter(torch.rand(1))

    def forward(self, x: Tensor) -> Tensor:
        one, other = Split.apply(Softmax.apply(Scaled.apply(self.inner(x), self.scale)))
        largest, where = Largest.apply(InPlace.apply(one * 1))
        loss: Tensor = (largest * where + other.square().sum(-1)).mean()
        return loss


def test_functions_that_compute_derivatives_train_as_eager() -> None:
    check_trains_as_eager(Exact(), torch.randn(8, 8))


class Clipped(Reversed):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.clamp(-1, 1), None


class Normalized(Reversed):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient / gradient.norm(), None


class StraightThroughSoftmax(Softmax):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = Softmax.forward(ctx, x)
        return (y == y.amax(-1, keepdim=True)).to(y.dtype)


class OtherScale(Scaled):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        return gradient * scale, (gradient * x).mean().reshape(1)


class OtherSplit(Split):
    @staticmethod
    def backward(ctx: Any, one: Tensor, other: Tensor) -> Tensor:
        return one + other


class OtherInPlace(InPlace):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class PerSample(Function):
    """Its results are nested, and its backward depends on values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        return x.sort(-1).values, x.argmax(-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        rows = [
            g if g.norm() < row.norm() else g / g.norm() for g, row in zip(gradient, x, strict=True)
        ]
        return torch.stack(rows), None


class Applied(nn.Module):
    """A model that applies a function to its hidden state and a parameter."""

    def __init__(self, apply: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.scale = nn.Linear(8, 8), nn.Parameter(torch.ones(1))
        self.last, self.apply_of_self = nn.Linear(8, 8), apply

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.apply_of_self(self.inner(x), self.scale)
        return self.last(result).square().mean() + self.scale.square().sum()


clipped, per_sample = Clipped.apply, PerSample.apply


@pytest.mark.parametrize(
    "apply",
    [
        lambda x, _: Clipped.apply(x, 1.0),
        lambda x, _: clipped(x, strength=1e-3) + clipped(x, 1.0),
        lambda x, _: Normalized.apply(x, 1.0),
        lambda x, _: StraightThroughSoftmax.apply(x),
        lambda x, scale: OtherScale.apply(x, scale),
        lambda x, _: OtherSplit.apply(x)[1],
        lambda x, _: torch.mul(*OtherSplit.apply(x)),
        lambda x, _: per_sample(x, (2, 3))[0],
        lambda x, _: checkpoint(clipped, x, 1.0, use_reentrant=False),
    ],
)
def test_other_functions_are_computed_in_full_and_train_as_eager(
    apply: Any, caplog: pytest.LogCaptureFixture
) -> None:
    check_trains_as_eager(Applied(apply), torch.randn(8, 8))
    assert "every device computes the autograd function" in caplog.text


class Through(Function):
    """Calls a module, whose parameters get gradients as a side effect of `backward`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.layer(x).backward(gradient)
        assert x.grad is not None
        return x.grad, None


LAYER = nn.Linear(8, 8)
LAYERS = {"all": [LAYER]}


class ThroughGlobal(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return LAYER(x).detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-1, 1)


class ThroughList(ThroughGlobal):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return LAYERS["all"][0](x).detach()


@pytest.mark.parametrize(
    ("name", "apply", "why"),
    [
        ("OtherInPlace", lambda x, _: OtherInPlace.apply(x * 1), "it changes its input in place"),
        ("Through", lambda x, _: Through.apply(x, nn.Linear(8, 8)), "it takes a Linear"),
        ("ThroughGlobal", lambda x, _: ThroughGlobal.apply(x), "it reads a Linear"),
        ("ThroughList", lambda x, _: ThroughList.apply(x), "it reads a Linear"),
    ],
)
def test_functions_that_change_or_train_more_than_their_arguments_are_refused(
    name: str, apply: Any, why: str
) -> None:
    message = f"custom backward of the autograd function `{name}`: {why}"
    with pytest.raises(CaptureError, match=message):
        sw.capture(Applied(apply), (torch.randn(4, 8),))


def test_functions_without_a_gradient_to_give_are_captured() -> None:
    """Not the tensors of a closure either."""
    split = OtherSplit.apply

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.weight = nn.Linear(8, 8), nn.Parameter(torch.rand(8))

        def forward(self, x: Tensor) -> Tensor:
            net = self

            class Weighted(Function):
                @staticmethod
                def forward(ctx: Any, x: Tensor) -> Tensor:
                    return x * net.weight

            weighted = Weighted.apply
            one, other = split(weighted(x))
            y = self.inner(one + 2 * other)
            with torch.no_grad():
                first, _ = split(y)
            return (first * y * self.weight).mean()

    check_trains_as_eager(Net(), torch.randn(8, 8))


class OtherCube(Function):
    """Its factor depends on the input."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x**2


class Cube(OtherCube):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 3 * OtherCube.backward(ctx, gradient)


def by_grad(function: Any) -> Callable[[Tensor], Tensor]:
    return lambda y: torch.autograd.grad(function(y).square().sum(), y, create_graph=True)[0]


def by_transform(function: Any) -> Callable[[Tensor], Tensor]:
    return torch.func.grad(lambda y: function(y).square().sum())  # type: ignore[no-any-return]


@pytest.mark.parametrize("derivative", [by_grad, by_transform])
@pytest.mark.parametrize("function", [Cube, SetsUp])
def test_derivatives_that_forward_takes_of_functions_train_as_eager(
    derivative: Any, function: Any
) -> None:
    check_trains_as_eager(net_with(derivative(function.apply)), torch.randn(8, 8))


@pytest.mark.parametrize("derivative", [by_grad, by_transform])
def test_second_derivatives_that_cannot_be_captured_are_refused(derivative: Any) -> None:
    with pytest.raises(CaptureError, match="computes gradients through the autograd function `Ot"):
        sw.capture(net_with(derivative(OtherCube.apply)), (torch.randn(4, 8),))


def test_large_tensors_are_tried_at_a_smaller_size() -> None:
    types = [(torch.Size((64, 32)), torch.float32), None, (torch.Size((32,)), torch.int64)]
    assert reduced(types, 2048) == types
    smaller = [(torch.Size((16, 16)), torch.float32), None, (torch.Size((16,)), torch.int64)]
    assert reduced(types, 256) == smaller


test_bound_functions_on_real_ranks = checks_on_ranks(CHECKS, 2)


def test_derivatives_that_forward_takes_of_functions_computed_in_full_are_refused() -> None:
    derivative = by_grad(lambda x: per_sample(x, ())[0])
    with pytest.raises(CaptureError, match=r"gradients through `shardwright\.local_map"):
        sw.capture(net_with(derivative), (torch.randn(8, 8),))


class Similar(Function):
    """Of rows of length 1, as in `YosoCumulation` of transformers, whose backward approximates."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        similarity = (1 - (x @ y.mT).acos() / torch.pi) ** 3
        ctx.save_for_backward(x, y, similarity)
        return similarity

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, y, similarity = ctx.saved_tensors
        weights = 1.5 * gradient * similarity
        return weights @ y, weights.mT @ x


class Noisy(Function):
    """Draws random numbers in `backward` only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.flip(-1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.flip(-1) * torch.rand(gradient.shape[-1])


class Rows(nn.Module):
    """Applies a function to normalized rows."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function, self.linear = function, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.nn.functional.normalize(self.linear(x), dim=-1)
        loss: Tensor = self.function(rows).square().mean()
        return loss


def test_a_derivative_that_is_tried_where_forward_is_not_defined_proves_nothing() -> None:
    net, batch = Rows(lambda rows: Similar.apply(rows, rows.roll(1, 0))), (torch.randn(8, 8),)
    assert sw.check(net, batch, None, sw.plan(net, batch, devices=4)).passes()


def test_random_numbers_of_a_backward_pass_are_equal_on_all_devices() -> None:
    net, batch = Rows(Noisy.apply), (torch.randn(8, 8),)
    check = sw.check(net, batch, None, sw.plan(net, batch, devices=4))
    assert check.random_operators and check.passes(), str(check)


class Logarithm(Function):
    """Its gradient is finite at 0."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.log()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / (ctx.saved_tensors[0] + 1)


class Clamped(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def test_infinite_inputs_have_the_values_and_gradients_of_eager() -> None:
    def of_infinite(y: Tensor) -> Tensor:
        scores = y.masked_fill(torch.arange(8) > 5, -torch.inf)
        return Reversed.apply(scores, 0.3).softmax(-1) + Clamped.apply(Logarithm.apply(y.relu()))

    check_trains_as_eager(net_with(of_infinite), torch.randn(8, 8))
