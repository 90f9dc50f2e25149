"""Numbers that only Python code reads."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import shardwright as sw


def test_a_number_that_many_sums_double_is_followed_once() -> None:
    class Doubling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear, self.doubled = nn.Linear(4, 4), list[float]()

        def forward(self, x: Tensor) -> Tensor:
            loss = self.linear(x).square().mean()
            number = loss.item()
            # Each path from the first number to the last would be 1 of 2 ** 40.
            for _ in range(40):
                number = number + number
            self.doubled.append(number)
            return loss

    net, batch = Doubling(), torch.ones(8, 4)
    planned = sw.parallelize(net, sw.plan(net, (batch,), devices=1))
    loss = planned(batch).item()
    assert net.doubled == [loss * 2.0**40]
