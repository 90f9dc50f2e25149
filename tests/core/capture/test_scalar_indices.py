"""Writes at an index that is a tensor without dimensions."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.core.capture.scalar_indices import at_one_row

INDEX, SLICE = torch.tensor(-2), slice(None)


@pytest.mark.parametrize(
    "index",
    [
        *(
            INDEX,
            (INDEX,),
            (SLICE, INDEX),
            (..., INDEX),
            (..., INDEX, SLICE),
            (INDEX, ...),
            (0, INDEX),
            (INDEX, 0),
            (0, INDEX, 1),
        ),
        *(
            (SLICE, INDEX, 1),
            (INDEX, slice(1, 3)),
            (INDEX, SLICE, None),
            (None, INDEX),
            (1, ..., INDEX),
            (SLICE, 1, INDEX),
        ),
    ],
)
def test_a_row_of_one_index_writes_what_the_index_writes(index: Any) -> None:
    x = torch.arange(60.0).view(3, 4, 5)
    shape = x[index].shape
    values = 7, torch.tensor(7.0), torch.tensor(7), torch.randn(shape), torch.randn(shape[-1:])
    for value in (*values, torch.randn(shape, dtype=torch.float64)):
        expected, written = x.clone(), x.clone()
        expected[index] = value
        row, at_row = at_one_row(written, index, value)
        written[row] = at_row
        assert torch.equal(written, expected)


@pytest.mark.parametrize(
    "index", [0, (SLICE, 1), (INDEX, torch.tensor([0])), (torch.tensor(True),), (True, INDEX)]
)
def test_other_indices_stay(index: Any) -> None:
    assert at_one_row(torch.zeros(3, 4), index, 0)[0] is index


class History(nn.Module):
    """Keeps the means of the last batches in a ring, and the last loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("means", torch.zeros(3, 4))
        self.register_buffer("losses", torch.zeros(3))
        self.register_buffer("step", torch.zeros((), dtype=torch.long))
        self.means: Tensor
        self.losses: Tensor
        self.step: Tensor

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        self.means[self.step % 3] = h.detach().mean(0)
        loss = (h * self.means.sum(0)).mean()
        self.losses[self.step % 3] = loss.detach()
        self.step += 1
        return loss


def test_a_ring_of_earlier_batches_is_written_at_the_index_of_a_buffer() -> None:
    eager, x = History(), torch.randn(8, 4)
    net = sw.parallelize(deepcopy(eager), sw.plan(eager, (x,), devices=1), "cpu")
    for _ in range(5):
        losses = [module(x) for module in (eager, net)]
        for loss in losses:
            loss.backward()
        torch.testing.assert_close(losses[1], losses[0])
    torch.testing.assert_close(dict(net.named_buffers()), dict(eager.named_buffers()))
    for ours, theirs in zip(net.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    for devices in (2, 4):
        plan = sw.plan(History(), (x,), devices=devices, mode="data_parallel")
        assert sw.check(History(), (x,), None, plan).passes()
