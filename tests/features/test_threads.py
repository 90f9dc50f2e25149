"""Threads that plan models at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.core.torch_internals.compiled import is_compiling


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


class Waiting(nn.Module):
    """Is traced until it may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.is_traced, self.may_end = Event(), Event()

    def forward(self, x: Tensor) -> Tensor:
        self.is_traced.set()
        assert self.may_end.wait(60)
        return x + 1


def test_a_planned_model_is_called_as_ever_while_another_thread_exports() -> None:
    net, eager, x = Net(4, False), Net(4, False), torch.randn(2, 4)
    planned = sw.parallelize(net, sw.plan(net, (x,), devices=1))
    other = Waiting()
    with ThreadPoolExecutor(1) as threads:
        exported = threads.submit(torch.export.export, other, (x,), strict=False)
        try:
            assert other.is_traced.wait(60) and torch.compiler.is_compiling()
            assert not is_compiling()
            assert torch.equal(planned(x), eager(x))
        finally:
            other.may_end.set()
        exported.result()
