"""Python state of a model that changes in each call, on real processes and in error."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from core.parallel.python_calls_ranks import CHECKS, Counter, Returning, batches
from torchrun import checks_on_ranks

test_python_state_changes_as_on_one_device = checks_on_ranks(CHECKS, 2)


def test_state_that_micro_batches_would_change_several_times_is_refused() -> None:
    batch = (batches()[0],)
    for options in ({"micro_batches": 2, "devices": 1}, {"stages": 2, "devices": 2}):
        with pytest.raises(sw.StrategyError, match=r"several times per batch\n.*micro_batches=1"):
            sw.plan(Counter(), batch, **options)
    net = Returning()
    planned = sw.parallelize(net, sw.plan(net, batch, devices=1, micro_batches=2))
    torch.testing.assert_close(planned.train_step(*batch), Returning()(*batch).loss)


def test_train_step_changes_state_once() -> None:
    net, eager, batch = Counter(), Counter(), (batches()[0],)
    planned = sw.parallelize(net, sw.plan(net, batch, devices=1))
    for _ in range(3):
        torch.testing.assert_close(planned.train_step(*batch), eager(*batch).detach())
    assert planned.calls == eager.calls == 3


def test_check_compares_calls_from_the_same_state() -> None:
    net, batch = Counter(), (batches()[0],)
    assert sw.check(net, batch, None, sw.plan(net, batch, devices=2)).passes()
    assert net.calls == 0


class Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.seen: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append("x" * len(self.seen))
        return self.linear(x).sum() * len("".join(self.seen))


def test_state_that_never_repeats_ends_with_an_error_that_names_it() -> None:
    net = Growing()
    planned = sw.parallelize(net, sw.plan(net, (batches()[0],), devices=1))
    with pytest.raises(sw.PlanError, match=r"differs between calls: .*seen.*\n.*register_buffer"):
        for _ in range(12):
            planned(batches()[0])
