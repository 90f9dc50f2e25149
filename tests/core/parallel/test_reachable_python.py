"""Python state that `forward` can reach besides attributes of modules, changed after planning."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.core.parallel.reachable_python import MAX_EQUAL_GRAPHS


class Tracker:
    def __init__(self) -> None:
        self.scales, self.losses = [1.0], [0.0]

    def scale(self) -> float:
        return self.scales[-1]


class Tracked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.tracker = nn.Linear(8, 8), Tracker()
        trackers = [self.tracker]
        self.scaled = lambda x: x * trackers[0].scale()

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(self.linear(x)).square().mean()


class Untraceable(Tracked):
    """TorchDynamo does not capture it, as `forward` breaks its graph."""

    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return super().forward(x)


def planned_and_eager(make: type[Tracked], **options: Any) -> tuple[Any, Tracked, Tensor]:
    net, eager, x = make(), make(), torch.randn(4, 8)
    return sw.parallelize(net, sw.plan(net, (x,), devices=1, **options)), eager, x


def test_state_that_is_not_read_is_captured_with_its_guards_once() -> None:
    planned, _, x = planned_and_eager(Tracked)
    for _ in range(2 * MAX_EQUAL_GRAPHS):
        planned.tracker.losses.append(float(planned(x).detach()))
    assert len(planned.execution._forwards) == 2


@pytest.mark.parametrize("make", [Tracked, Untraceable])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_training_step_reads_the_state_of_its_call(
    make: type[Tracked], micro_batches: int
) -> None:
    planned, eager, x = planned_and_eager(make, micro_batches=micro_batches)
    for scale in (1.0, 2.0, 3.0):
        for each in (planned, eager):
            each.tracker.scales.append(scale)
            each.zero_grad()
        loss = eager(x)
        loss.backward()
        torch.testing.assert_close(planned.train_step(x), loss.detach())
        torch.testing.assert_close(planned.linear.weight.grad, eager.linear.weight.grad)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_what_changes_all_the_time_and_is_not_read_is_ignored_with_a_warning(
    micro_batches: int, caplog: pytest.LogCaptureFixture
) -> None:
    planned, _, x = planned_and_eager(Untraceable, micro_batches=micro_batches)
    with caplog.at_level(logging.WARNING):
        for _ in range(MAX_EQUAL_GRAPHS + 4):
            planned.train_step(x)
            planned.tracker.losses.append(0.0)
    (warning,) = [r.getMessage() for r in caplog.records if "are ignored" in r.getMessage()]
    assert "losses" in warning and "in a buffer" in warning


def test_what_is_read_takes_effect_as_often_as_it_changes() -> None:
    planned, eager, x = planned_and_eager(Untraceable)
    for step in range(MAX_EQUAL_GRAPHS + 4):
        for each in (planned, eager):
            each.tracker.scales.append(float(step))
        torch.testing.assert_close(planned(x), eager(x))


def test_an_attribute_that_is_set_on_the_class_of_the_planned_model_takes_effect() -> None:
    class Scaled(Tracked):
        factor = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.factor

    planned, eager, x = planned_and_eager(Scaled)
    for factor in (2.0, 3.0):
        type(planned).factor = factor
        torch.testing.assert_close(planned(x), eager(x))
        assert Scaled.factor == factor


def test_a_copy_has_a_state_of_its_own() -> None:
    planned, eager, x = planned_and_eager(Tracked)
    copied = copy.deepcopy(planned)
    copied.tracker.scales.append(3.0)
    torch.testing.assert_close(planned(x), eager(x))


def test_a_forward_that_is_set_on_a_submodule_after_planning_is_refused() -> None:
    planned, _, x = planned_and_eager(Tracked)
    planned.linear.forward = lambda x: 2 * x
    with pytest.raises(sw.PlanError, match=r"`forward` of module 'linear' was replaced\b.*\n"):
        planned(x)


class Cosine:
    def apply(self, x: Tensor) -> Tensor:
        return x.cos()


class Replaceable(Tracked):
    def __init__(self) -> None:
        super().__init__()
        self.last, self.cosine = nn.Softsign(), Cosine()

    def forward(self, x: Tensor) -> Tensor:
        x = nn.ELU()(self.linear(x).sin())
        return self.last(self.cosine.apply(torch.tanh(x))).sum()


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (torch, "tanh"),
        (nn.functional, "softsign"),
        (nn.Linear, "forward"),
        (nn.ELU, "forward"),
        (Tensor, "sin"),
        (Cosine, "apply"),
    ],
)
def test_functions_that_are_replaced_between_steps_take_effect(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, eager, x = planned_and_eager(Replaceable)
    before = planned(x).detach()
    monkeypatch.setattr(owner, name, lambda *args: 3 * args[-1])
    replaced = planned(x)
    assert not torch.equal(replaced, before)
    torch.testing.assert_close(replaced, eager(x))
    monkeypatch.undo()
    torch.testing.assert_close(planned(x).detach(), before)
