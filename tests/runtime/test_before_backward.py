"""Gradients of gradients."""

from __future__ import annotations

import pytest
import torch

import shardwright as sw
from shardwright.runtime.before_backward import before_backward


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
