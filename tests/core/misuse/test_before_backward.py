"""Which backward passes a program has: of gradients of gradients none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardwright as sw
from shardwright.core.misuse.before_backward import (
    before_backward,
    refuse_other_draws,
    refuse_transforms,
)


def test_a_gradient_that_is_to_be_differentiated_is_refused() -> None:
    x = torch.ones(2, requires_grad=True)
    y = (x**3).sum()
    before_backward([y, None, torch.zeros(2)], [])
    with pytest.raises(sw.PlanError, match="create_graph=True"):
        torch.autograd.grad(y, x, create_graph=True)


def test_an_ordinary_gradient_flows_also_where_the_output_is_changed_in_place() -> None:
    x = torch.ones(2, requires_grad=True)
    y = (x**3).sum()
    calls: list[int] = []
    before_backward([y], [lambda: calls.append(1)])
    y /= 3
    assert not calls
    y.backward()
    assert calls
    torch.testing.assert_close(x.grad, torch.ones(2))


def test_a_pass_that_looks_for_anomalies_is_refused() -> None:
    x = torch.ones(2, requires_grad=True)
    y = (x**3).sum()
    before_backward([y], [])
    with torch.autograd.detect_anomaly(), pytest.raises(sw.PlanError, match="check_nan=False"):
        y.backward()


def in_forward_mode(function: Any, x: torch.Tensor) -> None:
    with torch.autograd.forward_ad.dual_level():
        function(x)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, x: torch.func.vmap(f)(x),
        lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
        lambda f, x: torch.func.jvp(f, (x,), (x,)),
        in_forward_mode,
        lambda f, x: torch.jit.trace(f, x),
    ],
)
def test_transforms_that_take_other_derivatives_are_refused(transform: Any) -> None:
    def called(x: torch.Tensor) -> torch.Tensor:
        refuse_transforms()
        return x

    called(torch.ones(2))
    with pytest.raises(sw.PlanError, match="its collectives support only one"):
        transform(called, torch.ones(2))


def test_what_has_drawn_is_not_drawn_again_in_a_backward_pass() -> None:
    refuse_other_draws()
    x = torch.ones(2, requires_grad=True)
    y = (x**3).sum()
    y.register_hook(lambda gradient: refuse_other_draws())  # type: ignore[no-untyped-call]
    with pytest.raises(sw.PlanError, match="would draw other random numbers"):
        y.backward()
