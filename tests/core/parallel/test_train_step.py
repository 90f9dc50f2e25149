"""What an error about micro-batches says to do instead works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwright as sw
from shardwright.errors import MixedSamplesError

BATCH = (torch.randn(8, 6, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 4)


class Net(nn.Module):
    """A model whose hidden activations `mix` may relate to each other."""

    def __init__(self, mix: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.hidden, self.norm, self.head = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)
        self.spread = nn.Buffer(torch.ones(8))
        self.mix = mix

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.mix(self, torch.tanh(self.hidden(x)))), y)


def normalized(net: Net, h: Tensor) -> Tensor:
    return net.norm(h)


def normalized_in_groups(net: Net, h: Tensor) -> Tensor:
    return torch.cat([net.norm(part) for part in h.chunk(2)])


def centered(net: Net, h: Tensor) -> Tensor:
    return h - h.mean(0)


def measured(net: Net, h: Tensor) -> Tensor:
    net.spread.copy_(h.detach().std(0))
    return h


def measured_by_means(net: Net, h: Tensor) -> Tensor:
    net.spread.copy_(h.detach().square().mean(0))
    return h


def passes(net: nn.Module, **options: Any) -> bool:
    plan = sw.plan(net, BATCH, devices=2, **options)
    return sw.check(net, BATCH, None, plan).passes()


@pytest.mark.parametrize(
    ("mix", "remedy", "options"),
    [
        (normalized, "batch_norm='per_micro_batch'", {"batch_norm": "per_micro_batch"}),
        (normalized, "micro_batches=1", {"micro_batches": 1}),
        (normalized_in_groups, "instead of a loop over samples or chunks", {"micro_batches": 1}),
        (centered, "`micro_batches=1`", {"micro_batches": 1}),
        (measured, "`micro_batches=1`", {"micro_batches": 1}),
    ],
)
def test_the_options_of_an_error_are_accepted(
    mix: Callable[[Net, Tensor], Tensor], remedy: str, options: dict[str, Any]
) -> None:
    with pytest.raises(MixedSamplesError) as error:
        sw.plan(Net(mix), BATCH, devices=2, micro_batches=2)
    assert remedy in str(error.value)
    assert passes(Net(mix), **{"micro_batches": 2, **options})


def test_groups_of_a_batch_norm_are_not_told_to_normalize_in_micro_batches() -> None:
    with pytest.raises(MixedSamplesError, match="splits the batch into chunks") as error:
        sw.plan(Net(normalized_in_groups), BATCH, devices=2, micro_batches=2)
    assert "per_micro_batch" not in str(error.value)


def test_means_replace_statistics_that_micro_batches_do_not_determine() -> None:
    with pytest.raises(MixedSamplesError, match="update the buffer with means"):
        sw.plan(Net(measured), BATCH, devices=2, micro_batches=2)
    assert passes(Net(measured_by_means), micro_batches=2)


def test_the_sum_of_the_losses_of_micro_batches_is_trained() -> None:
    with pytest.raises(MixedSamplesError, match="loss_reduction='sum'"):
        sw.plan(Net(centered), BATCH, devices=2, micro_batches=2)
    assert passes(sw.Pipeline(Net(centered), 2, loss_reduction="sum"))
