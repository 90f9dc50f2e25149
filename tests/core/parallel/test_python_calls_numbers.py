"""Python numbers that change between calls of a planned model."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

import shardwright as sw
from shardwright.core.parallel import python_calls

CALLS = 10  # More than there may be programs for one batch shape.


class Reversed(Function):
    """The gradient times a number that `backward` computes from `scale` and `divisor`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, divisor: int) -> Tensor:
        ctx.factor = 1 / divisor - 2 * scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.factor * gradients[0], None, None


class Annealed(nn.Module):
    """Reverses gradients by an attribute that also scales the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scale, self.steps, self.calls = 0.1, 3, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        hidden = Reversed.apply(self.linear(x), self.scale, self.steps)
        # Also of a tensor without dimensions, which a tensor of another dtype would promote.
        loss = Reversed.apply(hidden.square().mean(), self.scale, self.steps)
        # In a checkpoint too, whose sub-graph gets the number as an input.
        loss = checkpoint(
            lambda x: x * self.scale + x * (1 / self.steps), loss, use_reentrant=False
        )
        return loss + self.scale * hidden.mean()


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[frozenset[str]]:
    """The numbers that were to be inputs, for each capture of a call."""
    made: list[frozenset[str]] = []
    capture = python_calls.capture_python

    def recorded(call: Any, dtype: Any, numbers: frozenset[str] = frozenset()) -> Any:
        made.append(numbers)
        return capture(call, dtype, numbers)

    monkeypatch.setattr(python_calls, "capture_python", recorded)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_number_that_a_custom_autograd_function_reads_is_an_input(
    dtype: torch.dtype, captures: list[frozenset[str]]
) -> None:
    torch.manual_seed(0)
    net, x = Annealed().to(dtype), torch.randn(4, 8, dtype=dtype)
    planned = sw.parallelize(net, sw.plan(net, (x,), devices=1), copy=True)
    for step in range(CALLS):
        for model in (net, planned):
            model.scale, model.steps = 0.1 + step / 7, 3 + step
            model.zero_grad()
        eager, loss = net(x), planned(x)
        eager.backward()
        loss.backward()
        assert loss.dtype == dtype
        torch.testing.assert_close(loss, eager)
        for parameter, expected in zip(planned.parameters(), net.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, expected.grad)
    # All numbers are inputs at their second value, or, if they equalled another, at their third.
    assert len(captures) <= 3


class Narrowing(nn.Module):
    """Has a number that is a size, next to numbers that change in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 16)
        self.width, self.steps, self.calls = 8, 0, Counter[str]()

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.calls["forward"] += 1
        return self.linear(x)[:, : self.width].sum() * self.steps


def test_a_number_that_is_a_size_leaves_others_inputs(captures: list[frozenset[str]]) -> None:
    torch.manual_seed(0)
    net, x = Narrowing(), torch.randn(4, 8)
    planned = sw.parallelize(net, sw.plan(net, (x,), devices=1), copy=True)
    for step in range(CALLS):
        net.width = planned.width = 1 + step % 3
        torch.testing.assert_close(planned(x), net(x))
    assert planned.steps == CALLS
    assert planned.calls == {"forward": CALLS}
    assert max(len(numbers) for numbers in captures) == 3


def test_the_number_that_cannot_be_an_input_is_named() -> None:
    net, x = Narrowing(), torch.randn(4, 8)
    planned = sw.parallelize(net, sw.plan(net, (x,), devices=1))
    line = r"\(test_python_calls_numbers\.py:\d+: `return self\.linear\(x\)\[:, : self\.width\]"
    with pytest.raises(
        sw.PlanError, match=rf"calls: `self\.width == \d+` {line}.*\n.*pass a tensor"
    ):
        for planned.width in range(1, 1 + CALLS):
            planned(x)
