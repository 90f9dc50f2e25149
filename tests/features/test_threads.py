"""Threads that plan models at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

import shardwright as sw


class Net(nn.Module):
    """Counts its calls in an attribute if `counts`."""

    def __init__(self, width: int, counts: bool) -> None:
        super().__init__()
        torch.manual_seed(width)
        self.inner, self.counts, self.calls = nn.Linear(width, width), counts, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.counts:
            self.calls += 1
        loss: Tensor = self.inner(x).relu().square().mean() * (1 + self.calls)
        return loss


def losses_of_planned_and_eager(nets: tuple[Net, Net], x: Tensor) -> list[tuple[Tensor, Tensor]]:
    net, eager = nets
    planned = sw.parallelize(net, sw.plan(net, (x,), devices=1))
    return [(planned(x), eager(x)) for _ in range(3)]


def test_models_that_are_planned_in_several_threads_at_once_equal_eager() -> None:
    widths = range(4, 8)
    nets = [(Net(width, width % 2 == 0), Net(width, width % 2 == 0)) for width in widths]
    batches = [torch.randn(2, width) for width in widths]
    with ThreadPoolExecutor(len(nets)) as threads:
        results = list(threads.map(losses_of_planned_and_eager, nets, batches))
    for planned, eager in (pair for losses in results for pair in losses):
        assert torch.equal(planned, eager)
