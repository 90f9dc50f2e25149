"""Convolutions of padded images are one operator."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright as sw
from shardwright.core.graph.custom_ops import padded_convolution

aten = torch.ops.aten


class Padded(nn.Module):
    """Convolutions whose images are padded in and outside of the layer."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1, padding_mode=mode)
        self.second = nn.Conv2d(4, 4, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.pad(self.first(x), (0, 1, 0, 1))).square().mean()


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_a_pinned_convolution_shards_the_rows_of_the_image_before_padding(mode: str) -> None:
    net, x = Padded(mode).double(), torch.randn(2, 3, 16, 6, dtype=torch.float64)
    sw.shard(net.second, ((1, 1, 4, 1), (1, 1, 1, 1)))
    plan = sw.plan(net, (x,), devices=4, mode="sharding_propagation")
    assert [plan.graph.by_name[name].target for name in ("first", "second")] == [
        padded_convolution
    ] * 2
    assert plan.cuts["first"] == plan.cuts["second"] == {"s": (0,)}
    result = sw.check(net, (x,), {}, plan)
    assert result.passes(1e-9), str(result)
    assert result.counted_bytes == result.planned_bytes


class ReadTwice(nn.Module):
    """A convolution of an image that is padded otherwise, or whose padded image is read twice."""

    def __init__(self, pad: tuple[int, ...]) -> None:
        super().__init__()
        self.layer, self.pad = nn.Conv2d(4, 4, 3), pad

    def forward(self, x: Tensor) -> Tensor:
        padded = F.pad(x, self.pad)
        return self.layer(padded).mean() + (padded.mean() if min(self.pad) == 1 else 0)


@pytest.mark.parametrize("pad", [(0, 0, 0, 0, 1, 0), (-1, 1), (1, 1)])
def test_other_padding_is_an_operator_of_its_own(pad: tuple[int, ...]) -> None:
    x = torch.randn(2, 3 if len(pad) == 6 else 4, 8, 8)
    targets = [op.target for op in sw.capture(ReadTwice(pad), (x,)).ops]
    assert aten.conv2d.default in targets
    assert padded_convolution not in targets
