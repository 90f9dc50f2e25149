"""Modules of PyTorch that look at values compute the same where these are not known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.ao import quantization

import shardwright as sw
from random_cases import random_cases
from random_plans import check_random_plan, random_plan
from shardwright.core.capture.capture import capture
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
    with pytest.raises(CaptureError, match=r"quantizer, a Fa?u?.*disable_observer"):
        capture(net, (x,))
    net.apply(quantization.disable_observer)
    assert sw.check(net, (x,), None, sw.plan(net, (x,), devices=4)).passes()
