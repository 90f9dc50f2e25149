"""A recommender: tables of bags are cut, and the dense layers take a share of the batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright as sw
from random_plans import random_plan


class Recommender(nn.Module):
    """DLRM (Naumov et al., 2019) with four tables."""

    def __init__(self, rows: int, features: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(rows, features, mode=mode) for mode in ("sum", "mean", "max", "sum")
        )
        self.bottom = nn.Sequential(nn.Linear(8, features), nn.ReLU())
        self.top = nn.Linear(features + 10, 1)
        self.register_buffer("pairs", torch.tril_indices(5, 5, -1))

    def forward(self, dense: Tensor, ids: Tensor, clicked: Tensor) -> Tensor:
        x = self.bottom(dense)
        looked_up = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        every = torch.stack([x, *looked_up], 1)
        products = (every @ every.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        scores = self.top(torch.cat([x, products], 1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(scores, clicked)


def batch(size: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.randint(rows, (size, 4, 3))
    return torch.randn(size, 8), ids, torch.rand(size)


@pytest.mark.parametrize("devices", [2, 6, 8])
def test_random_plans_of_a_recommender_equal_one_device(devices: int) -> None:
    net, args = Recommender(24, 8), batch(12, 24)
    plan = random_plan(sw.capture(net, args), devices, seed=devices)
    result = sw.check(net, args, {}, plan)
    assert result.passes(1e-9), result


def test_large_tables_are_divided_among_devices() -> None:
    with torch.device("meta"):
        net, args = Recommender(4_000_000, 128), batch(4096, 1)
    one, eight = (sw.plan(net, args, devices=n, cluster="h100") for n in (1, 8))
    copied = sw.plan(net, args, devices=8, cluster="h100", mode="data_parallel")
    assert 6 * eight.step_time < min(one.step_time, copied.step_time)
    assert 7 * eight.memory.peak < one.memory.peak
