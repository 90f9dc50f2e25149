"""Batch norms in training: statistics of each micro-batch on request, else refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwright as sw
from core.micro_batches.accumulation import BATCH_NORM_NETS, Normalized, accumulated, batch

PER_MICRO_BATCH: dict[str, Any] = {"batch_norm": "per_micro_batch", "micro_batches": 4}
WAYS: dict[str, dict[str, Any]] = {
    "ignored targets": {"mode": "data_parallel"},
    "an average of all batches": {"stages": 2},
    "called twice": {"stages": 2, "schedule": "zero_bubble_v"},
    "functions": {},
    "images": {"mode": "data_parallel", "dataset_strategy": "data_parallel"},
    "instances": {"mode": "data_parallel"},
}


@pytest.mark.parametrize("name", BATCH_NORM_NETS)
def test_one_device_trains_as_gradient_accumulation_does(name: str) -> None:
    torch.manual_seed(0)
    net, call = BATCH_NORM_NETS[name]().double(), batch()
    planned = sw.parallelize(
        net, sw.plan(net, call, devices=1, **PER_MICRO_BATCH), "cpu", copy=True
    )
    for _ in range(2):
        net.zero_grad()
        planned.zero_grad()
        torch.testing.assert_close(planned.train_step(*call), accumulated(net, call, 4))
        for own, parameter in zip(planned.parameters(), net.parameters(), strict=True):
            torch.testing.assert_close(own.grad, parameter.grad)
    for own, buffer in zip(planned.buffers(), net.buffers(), strict=True):
        torch.testing.assert_close(own, buffer)


@pytest.mark.parametrize("name", WAYS)
def test_check_compares_with_statistics_of_each_micro_batch(name: str) -> None:
    net, call = BATCH_NORM_NETS[name]().double(), batch()
    plan = sw.plan(net, call, devices=2, **PER_MICRO_BATCH, **WAYS[name])
    result = sw.check(net, call, None, plan)
    assert result.passes() and not result.random_operators, str(result)


def test_statistics_of_the_whole_batch_are_refused_with_the_remedy() -> None:
    said = r"batch_norm_train in 'norm' .*\n.*batch_norm='per_micro_batch'"
    for split in ({"micro_batches": 4}, {"micro_batches": 2, "stages": 2}):
        with pytest.raises(sw.StrategyError, match=said):
            sw.plan(Normalized().double(), batch(), devices=2, **split)
    with pytest.raises(
        sw.StrategyError, match="batch_norm='micro': must be one of whole_batch, per"
    ):
        sw.plan(Normalized().double(), batch(), devices=2, micro_batches=4, batch_norm="micro")


def test_running_statistics_of_instances_are_refused_with_the_remedy() -> None:
    said = r"instance_norm_train in 'norm' .*updates running.*\n.*batch_norm='per_micro_batch'"
    with pytest.raises(sw.StrategyError, match=said):
        sw.plan(BATCH_NORM_NETS["instances"]().double(), batch(), devices=2, micro_batches=4)


def test_automatic_numbers_of_micro_batches_leave_the_statistics_as_they_are() -> None:
    tight = {"cluster": "h100", "memory_limit": "none", "micro_batches": "auto"}
    for batch_norm in ("whole_batch", "per_micro_batch"):
        plan = sw.plan(Normalized().double(), batch(), devices=2, batch_norm=batch_norm, **tight)
        assert plan.pipeline.micro_batches == 1
    # Stages need several.
    plan = sw.plan(
        Normalized().double(), batch(), devices=2, stages=2, batch_norm="per_micro_batch", **tight
    )
    assert plan.pipeline.micro_batches > 1


def test_files_of_plans_have_the_statistics(tmp_path: Path) -> None:
    net, call = Normalized().double(), batch()
    plan = sw.plan(net, call, devices=2, mode="data_parallel", **PER_MICRO_BATCH)
    plan.save(tmp_path / "plan.json")
    loaded = sw.Plan.load(tmp_path / "plan.json")
    assert loaded.pipeline == plan.pipeline
    assert sw.check(net, call, None, loaded).passes()


class Counting(Normalized):
    def __init__(self) -> None:
        super().__init__()
        self.calls = nn.Buffer(torch.zeros(()))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x, y)


class Table(Normalized):
    """Normalizes a table that all samples share, too: it is the same in all micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.of_table = nn.Parameter(torch.randn(5, 6)), nn.BatchNorm1d(6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return super().forward(x + self.of_table(self.table).mean(0), y)


def test_a_batch_norm_of_what_samples_share_is_called_in_each_micro_batch() -> None:
    net, call = Table().double(), batch()
    assert sw.check(net, call, None, sw.plan(net, call, devices=2, **PER_MICRO_BATCH)).passes()


class Refused(Normalized):
    def __init__(self, rule: Callable[[Normalized, Tensor], Tensor]) -> None:
        super().__init__()
        self.rule = rule

    def loss(self, z: Tensor, y: Tensor) -> Tensor:
        return self.rule(self, z)


REFUSED: dict[str, tuple[Callable[[Normalized, Tensor], Tensor], str]] = {
    "running statistics": (
        lambda net, z: z.square().mean() + net.norm.running_mean.sum(),
        "reads a value that mixes samples",
    ),
    "a count of batches": (
        lambda net, z: z.square().mean() / net.norm.num_batches_tracked,
        "reads a value that mixes samples",
    ),
    "a spread": (lambda net, z: z.std(0).mean(), "aten.std"),
    "samples in another dimension": (
        lambda net, z: F.batch_norm(z.t(), None, None, training=True).square().mean(),
        "normalizes samples that are not in its dimension 0|mixes samples",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_still_mixes_samples_is_refused(name: str) -> None:
    rule, said = REFUSED[name]
    with pytest.raises(sw.StrategyError, match=said):
        sw.plan(Refused(rule).double(), batch(), devices=2, **PER_MICRO_BATCH)


def test_other_buffers_are_updated_once_per_batch() -> None:
    net, call = Counting().double(), batch()
    assert sw.check(net, call, None, sw.plan(net, call, devices=2, **PER_MICRO_BATCH)).passes()
