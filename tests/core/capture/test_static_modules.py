"""Modules of PyTorch that look at values compute the same where these are not known."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.ao import quantization
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwright as sw
from random_cases import random_cases
from random_plans import check_random_plan, random_plan
from shardwright.core.capture.capture import capture
from shardwright.core.graph.graph import Graph
from shardwright.errors import CaptureError


class Adaptive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(8, 20, [6, 12], div_value=2.0)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        result = self.softmax(x, y)
        return result.loss + self.softmax(x[0], y[0]).output, result.output


@random_cases(2)
def test_an_adaptive_softmax_trains_as_eager(seed: int) -> None:
    torch.manual_seed(seed)
    net, batch = Adaptive(), (torch.randn(8, 8), torch.randint(20, (8,)))
    graph = capture(net, batch)
    check_random_plan(net, batch, {}, graph, random_plan(graph, 4, seed))


class Quantized(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.linear, self.quantizer = nn.Linear(8, 4), kind()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.quantizer(self.linear(x)).square().mean()
        return result


@pytest.mark.parametrize(
    "kind", [quantization.FakeQuantize, quantization.FusedMovingAvgObsFakeQuantize]
)
def test_a_quantizer_trains_once_it_no_longer_observes(kind: type[nn.Module]) -> None:
    net, x = Quantized(kind), torch.randn(8, 8)
    net(x)
    with pytest.raises(CaptureError, match=r"(?s)quantizer, a Fa?u?.*disable_observer"):
        capture(net, (x,))
    net.apply(quantization.disable_observer)
    assert sw.check(net, (x,), None, sw.plan(net, (x,), devices=4)).passes()


@pytest.fixture
def two_ranks() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("two_ranks")
def test_a_sync_batch_norm_over_all_ranks_is_a_batch_norm_and_over_some_is_refused() -> None:
    def graph(group: dist.ProcessGroup | None) -> Graph:
        net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        return capture(nn.SyncBatchNorm.convert_sync_batchnorm(net, group), (torch.randn(8, 4),))

    assert [op.name for op in graph(dist.new_group([0, 1])).ops] == [
        op.name for op in graph(None).ops
    ]
    with pytest.raises(CaptureError, match=r"1 is a SyncBatchNorm over 1 of 2 ranks"):
        graph(dist.new_group([0]))
