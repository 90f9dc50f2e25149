"""Buffers that the model updates once per batch, in micro-batches and stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwright as sw
from shardwright.core.micro_batches.buffer_updates import reduce_micro_batches

WAYS: tuple[dict[str, Any], ...] = (
    {"devices": 2, "micro_batches": 4},
    {"devices": 1, "micro_batches": 8},
    {"devices": 4, "stages": 2, "micro_batches": 2},
)


class Updating(nn.Module):
    def __init__(self, update: Update) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden, self.head, self.update = nn.Linear(6, 8), nn.Linear(8, 4), update
        self.count = nn.Buffer(torch.zeros((), dtype=torch.long))
        self.total = nn.Buffer(torch.ones(()))
        self.mean = nn.Buffer(torch.zeros(8))
        self.uses = nn.Buffer(torch.ones(4, dtype=torch.long))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.update(self, x, y, torch.tanh(self.hidden(x)))
        return F.cross_entropy(self.head(z), y)


Update = Callable[[Updating, Tensor, Tensor, Tensor], Tensor]


def count(net: Updating, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    net.count += 1
    return z / net.count


def count_samples(net: Updating, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    net.count += (y > 1).sum()
    net.total += len(x)
    return z * net.total / 8


def average(net: Updating, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    centered = z - net.mean
    net.mean.lerp_(z.detach().mean(0), 0.1)
    return centered


def add(net: Updating, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    net.total += z.detach().square().sum()
    return z


def spread_of_inputs(net: Updating, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    net.total.copy_(0.5 * net.total + x.std())
    return z * net.total


def follow_weights(net: Updating, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    net.mean.lerp_(net.hidden.bias.detach(), 0.5)
    return z + net.mean


def count_correct(net: Updating, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    hits = (net.head(z).argmax(-1) == y).sum()
    net.count += hits
    net.count.sub_(2 * hits.int())
    return z


def correct_and_numbers(net: Updating, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    hits = (net.head(z).argmax(-1) == y).sum()
    # A share of a number would be rounded.
    net.count.add_(hits + 1, alpha=2)
    net.count.sub_(hits - 5)
    return z


def histogram(net: Updating, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    best = net.head(z).argmax(-1)
    net.uses.index_add_(0, best, torch.ones_like(y))
    net.uses.scatter_add_(0, (best + 1) % 4, y)
    net.uses.index_put_((y,), torch.ones_like(best), accumulate=True)
    net.uses += torch.bincount(best, minlength=4)
    return z


@pytest.mark.parametrize(
    "update",
    [
        *(count, count_samples, average, add, spread_of_inputs, follow_weights, count_correct),
        *(correct_and_numbers, histogram),
    ],
)
def test_a_buffer_is_updated_once_per_batch(update: Update) -> None:
    net = Updating(update)
    batch = (torch.randn(8, 6), torch.randint(4, (8,)))
    for way in WAYS:
        assert sw.check(net, batch, None, sw.plan(net, batch, **way)).passes()


def spread(net: Updating, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    net.total.copy_(z.detach().std())
    return z


def half_of_correct(net: Updating, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    net.count += (net.head(z).argmax(-1) == y).sum() // 2
    return z


def number_minus_correct(net: Updating, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    net.count.copy_(8 - (net.head(z).argmax(-1) == y).sum())
    return z


@pytest.mark.parametrize(
    ("update", "why"),
    [
        (spread, r"aten.std.* mixes samples, and 'total' is updated with its result"),
        (half_of_correct, "not linear in a mean or sum over samples, and 'count' is updated"),
        (number_minus_correct, "not linear in a mean or sum over samples, and 'count' is updated"),
    ],
)
def test_a_buffer_that_micro_batches_do_not_determine_is_refused(update: Update, why: str) -> None:
    batch = (torch.randn(8, 6), torch.randint(4, (8,)))
    with pytest.raises(sw.StrategyError, match=why):
        sw.plan(Updating(update), batch, **WAYS[0])


def test_sums_of_small_integers_keep_their_dtype() -> None:
    parts = [torch.tensor(3, dtype=torch.int32)] * 2
    assert reduce_micro_batches(parts, "sum").dtype == torch.int32


class Apart(nn.Module):
    """Reads a buffer in the first layer that the last one updates."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 4)
        self.mean = nn.Buffer(torch.zeros(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.last(torch.tanh(self.first(x + self.mean.sum())))
        self.mean.lerp_(z.detach().mean(0), 0.5)
        return F.cross_entropy(z, y)


def test_stages_may_divide_the_read_and_the_update_of_a_buffer() -> None:
    batch = (torch.randn(8, 6), torch.randint(4, (8,)))
    plan = sw.plan(net := Apart(), batch, devices=2, stages=2, micro_batches=2)
    assert [plan.row(name).stage for name in ("first", "last")] == [0, 1]
    assert sw.check(net, batch, None, plan).passes()
