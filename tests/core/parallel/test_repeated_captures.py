"""Numbers of which each new value captures a planned model again are named once."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw

STEPS = 12


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.beta = nn.Linear(8, 8), 1.0
        self.gamma = nn.Buffer(torch.tensor(1.0))

    def forward(self, x: Tensor, alpha: Any = 1.0) -> Tensor:
        return self.linear(x).mean() * (alpha * self.beta * self.gamma)


def planned(alpha: Any) -> Weighted:
    net, x = Weighted(), torch.ones(4, 8)
    return sw.parallelize(net, sw.plan(net, (x, alpha), devices=1))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def test_an_argument_with_another_value_in_each_call_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    net = planned(1.0)
    for step in range(2, 2 + STEPS):
        net(torch.ones(4, 8), step / 7)
    (message,) = warnings(caplog)
    assert "captured 8 times, once for each value of `alpha`, " in message


def test_an_attribute_with_another_value_in_each_call_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    net = planned(1.0)
    for step in range(2, 2 + STEPS):
        net.beta = step / 7
        net(torch.ones(4, 8), 1.0)
    (message,) = warnings(caplog)
    assert "captured 8 times, once for each value of `beta`, " in message


def test_the_tensors_of_the_remedy_need_no_capture(caplog: pytest.LogCaptureFixture) -> None:
    net, x = planned(torch.tensor(1.0)), torch.ones(4, 8)
    with caplog.at_level(logging.INFO, logger="shardwright"):
        for step in range(STEPS):
            alpha = torch.tensor(step / 7)
            net.gamma.fill_(step)
            torch.testing.assert_close(net(x, alpha), net.linear(x).mean() * alpha * step)
    assert not [record for record in caplog.records if "captured" in record.getMessage()]
