"""Tests of values that only guard are passed; those that a model depends on are refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright as sw
import value_guards as guards
from shardwright.errors import CaptureError
from value_guards import CLASSES, Guard

pytestmark = pytest.mark.usefixtures("untried_suggestions")


class Guarded(nn.Module):
    def __init__(self, guard: Guard) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.guard = nn.Linear(8, CLASSES), guard

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        self.guard(x, labels)
        return F.cross_entropy(self.linear(x), labels)


BATCH = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(8) % CLASSES


def distributes(x: Tensor, labels: Tensor) -> None:
    torch.distributions.Normal(x.mean(), x.std() + 1)


def distributes_with_covariance(x: Tensor, labels: Tensor) -> None:
    # A positive definite matrix is first tested to be symmetric.
    torch.distributions.MultivariateNormal(x.mean(0), x.mT @ x + torch.eye(x.shape[1]))


PASSING = [
    distributes_with_covariance,
    guards.raises,
    guards.raises_otherwise,
    guards.asserts,
    guards.asserts_numbers,
    guards.compares,
    guards.warns,
    guards.reads,
    distributes,
]


@pytest.mark.parametrize("guard", PASSING)
def test_a_test_that_only_guards_is_passed(guard: Guard) -> None:
    net = Guarded(guard)
    net(*BATCH)
    check = sw.check(net, BATCH, None, sw.plan(net, BATCH, devices=4))
    assert check.passes(), check


class Counting(Guarded):
    """Has Python state that each call changes, for which TorchDynamo captures the model."""

    num_calls = 0

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        self.num_calls += 1
        return super().forward(x, labels)


@pytest.mark.parametrize("guard", PASSING)
def test_a_test_that_only_guards_is_passed_in_a_model_with_state(guard: Guard) -> None:
    graph = sw.capture(Counting(guard), BATCH)
    assert graph.python is not None
    assert graph.fingerprint == sw.capture(Guarded(guard), BATCH).fingerprint


DEPENDING = [
    guards.branches,
    guards.branches_otherwise,
    guards.catches,
    guards.leaves,
]


@pytest.mark.parametrize("guard", DEPENDING)
def test_a_test_that_a_model_with_state_depends_on_is_refused(guard: Guard) -> None:
    with pytest.raises(CaptureError, match=r"value_guards.py.*value"):
        sw.capture(Counting(guard), BATCH)


@pytest.mark.parametrize("guard", DEPENDING)
def test_a_test_that_the_model_depends_on_is_refused(guard: Guard) -> None:
    with pytest.raises(CaptureError, match=r"value_guards.py.*value"):
        sw.capture(Guarded(guard), BATCH)


def test_a_mask_of_pytorchs_transformers_is_read_instead_of_tested() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.net = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.net(x, mask=mask).square().mean()

    mask = nn.Transformer.generate_square_subsequent_mask(6)
    mask[0, 2] = 0.0
    net, args = Masked(), (torch.randn(8, 6, 8), mask)
    check = sw.check(net, args, None, sw.plan(net, args, devices=4))
    assert check.passes(), check
