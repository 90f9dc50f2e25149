"""The number of micro-batches, chosen by the time of a step under the memory limit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw


class Deep(nn.Module):
    """Layers whose activations, kept for the backward pass, are most of what a device needs."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4)]
        self.layers = nn.Sequential(*layers, *([nn.BatchNorm1d(64)] if norm else []))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def batch(rows: int) -> tuple[Tensor]:
    return (torch.empty(rows, 64, device="meta"),)


NUMBERS = [1, 8, 64]


def plan(net: nn.Module | None = None, rows: int = 64, **options: Any) -> sw.Plan:
    with torch.device("meta"):
        net = net or Deep()
    given: dict[str, Any] = {"devices": 4, "cluster": "a100", "micro_batches": "auto"}
    return sw.plan(net, batch(rows), **{**given, **options})


@pytest.mark.parametrize("stages", [1, "auto"])
def test_it_is_never_slower_than_a_number_of_the_users(stages: int | str) -> None:
    chosen = plan(stages=stages)
    for number in NUMBERS:
        try:
            fixed = plan(stages=stages, micro_batches=number)
        except sw.StrategyError:
            continue
        assert chosen.step_time <= fixed.step_time


def test_less_memory_takes_more_micro_batches() -> None:
    free = plan(rows=4096, micro_batches=1, mode="data_parallel")
    assert plan(rows=4096, mode="data_parallel").pipeline.micro_batches == 1
    limit = free.memory.peak // 3
    tight = plan(rows=4096, mode="data_parallel", memory_limit=limit)
    assert tight.memory.peak <= limit
    assert tight.pipeline.micro_batches > 1


def test_what_fits_with_no_number_says_the_least_that_is_needed() -> None:
    with pytest.raises(sw.MemoryLimitError) as error:
        plan(memory_limit=1000)
    for number in NUMBERS:
        with pytest.raises(sw.MemoryLimitError) as fixed:
            plan(memory_limit=1000, micro_batches=number)
        assert error.value.needed <= fixed.value.needed


def test_a_model_whose_loss_is_no_mean_over_samples_keeps_its_batch_whole() -> None:
    net = Deep(norm=True)
    assert plan(net, mode="data_parallel").pipeline.micro_batches == 1
    with pytest.raises(sw.StrategyError, match="batch_norm_train in 'layers"):
        plan(net, mode="data_parallel", micro_batches=2)
    with pytest.raises(
        sw.StrategyError, match=r"(?s)can be trained with one micro-batch only.*statistics"
    ):
        plan(net, stages=2)


def test_a_captured_graph_needs_a_number() -> None:
    with torch.device("meta"):
        graph = sw.capture(Deep(), batch(64))
    with pytest.raises(sw.StrategyError, match="the size of a graph's micro-batches is fixed"):
        sw.plan(graph, devices=4, micro_batches="auto")


@pytest.mark.parametrize("wrong", [0, -1, 2.5, "many"])
def test_what_is_no_number_is_refused(wrong: Any) -> None:
    with pytest.raises(sw.StrategyError, match="a whole number of at least 1, or 'auto'"):
        plan(micro_batches=wrong)
