"""The memory of a named cluster's devices, which limits a plan whose user gives no limit."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from sample_models import Stack
from shardwright.core.cost.cluster import LOCAL, Cluster
from shardwright.core.cost.clusters import load_cluster
from shardwright.errors import MemoryLimitError, StrategyError

ARGS = (torch.randn(512, 128),)
GRAPH = sw.capture(Stack(), ARGS)


def cluster(memory: int, name: str = "small") -> Cluster:
    h100 = load_cluster("h100")
    return replace(h100, name=name, device=replace(h100.device, memory=memory))


def plan(**options: Any) -> sw.Plan:
    return sw.plan(GRAPH, **{"devices": 4, **options})


FREE = plan(cluster="h100", memory_limit="none").memory.peak
BY_HAND = plan(cluster="h100", mode="data_parallel", memory_limit="none").memory.peak


def decided(plan: sw.Plan) -> object:
    return plan.cuts, plan.storage, plan.recompute, plan.pipeline.stages


def test_a_plan_that_fits_is_the_one_without_a_limit() -> None:
    for options in ({}, {"mode": "data_parallel"}, {"cost_model": "symbolic"}):
        free = plan(cluster="h100", memory_limit="none", **options)
        just = cluster(free.memory.peak)
        assert plan(cluster="h100", **options).dump() == free.dump()
        assert decided(plan(cluster=just, **options)) == decided(free)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mode": "data_parallel"},
        {"mode": "semi_auto"},
        {"cost_model": "symbolic"},
        {"mem_coeff": 10.0},
    ],
)
def test_a_plan_that_does_not_fit_is_the_one_with_that_limit(options: dict[str, Any]) -> None:
    limit = plan(cluster="h100", memory_limit="none", **options).memory.peak * 3 // 4
    found = plan(cluster=cluster(limit), **options)
    assert found.memory.peak <= limit
    assert decided(found) == decided(plan(cluster="h100", memory_limit=limit, **options))


@pytest.mark.parametrize(
    "options", [{"stages": "auto", "micro_batches": 2}, {"micro_batches": "auto"}]
)
def test_what_is_chosen_fits_too(options: dict[str, Any]) -> None:
    net = sw.WithLoss(nn.Sequential(nn.Linear(64, 512), nn.Linear(512, 8)), nn.MSELoss())
    batch = (torch.empty(1024, 64), torch.empty(1024, 8))
    free = sw.plan(net, batch, devices=2, cluster="h100", memory_limit="none", **options)
    limit = free.memory.peak * 3 // 4
    assert sw.plan(net, batch, devices=2, cluster=cluster(limit), **options).memory.peak <= limit


@pytest.mark.parametrize("mode", ["recursive_programming", "data_parallel", "stand_alone"])
def test_nothing_that_fits_is_one_error_with_what_would_do(mode: str) -> None:
    with pytest.raises(MemoryLimitError) as caught:
        plan(cluster=cluster(10_000), mode=mode)
    text = str(caught.value)
    assert text.startswith("no plan for 4 devices fits into memory_limit=9.8 KiB; the smallest one")
    assert text.endswith(
        "; the limit is the device memory of cluster 'small': to plan without it,"
        " set memory_limit='none'"
    )
    assert text.count("\n") == 1
    assert plan(cluster="h100", mode=mode, memory_limit=caught.value.needed)


@pytest.mark.parametrize(
    "options", [{}, {"mode": "data_parallel"}, {"stages": 2, "micro_batches": 2}]
)
def test_none_is_no_limit(options: dict[str, Any]) -> None:
    found = plan(cluster=cluster(10_000), memory_limit="none", **options)
    assert decided(found) == decided(plan(cluster="h100", memory_limit="none", **options))
    assert found.memory_limit == 10_000
    assert "over the limit" in str(found)


def test_a_limit_that_is_given_is_used_in_its_place() -> None:
    assert plan(cluster=cluster(10_000), memory_limit=10 * FREE).memory.peak > 10_000


def test_neither_this_machine_nor_no_cluster_is_a_limit() -> None:
    found = plan(cluster=cluster(10_000, LOCAL))
    assert found.memory.peak > 10_000
    assert plan().memory_limit is None


def test_a_model_in_eval_mode_has_no_default_limit() -> None:
    assert sw.plan(Stack().eval(), ARGS, devices=4, cluster=cluster(10_000)).memory_limit == 10_000
    with pytest.raises(MemoryLimitError):
        sw.plan(Stack(), ARGS, devices=4, cluster=cluster(10_000))


def test_a_plan_by_hand_that_must_be_changed_is_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "shardwright.search"):
        plan(cluster=cluster(BY_HAND), mode="data_parallel")
        plan(cluster=cluster(FREE * 3 // 4))
        with pytest.raises(MemoryLimitError):
            plan(cluster=cluster(10_000), mode="data_parallel")
        assert not caplog.records
        plan(cluster=cluster(BY_HAND * 3 // 4), mode="data_parallel")
    (record,) = caplog.records
    assert record.message.startswith("the requested plan needs at least ")
    assert "a device of cluster 'small' has" in record.message
    assert "planned with hsdp level" in record.message


@pytest.mark.parametrize("options", [{"mem_coeff": "auto"}, {"recompute": "auto"}])
def test_what_follows_from_a_limit_needs_one(options: dict[str, Any]) -> None:
    with pytest.raises(
        StrategyError, match="='auto' needs a memory limit, but memory_limit='none'"
    ):
        plan(cluster="h100", memory_limit="none", **options)
    assert plan(cluster="h100", **options).memory.peak <= load_cluster("h100").device.memory


def test_plans_that_are_ranked_without_a_limit_are_not_left_out_for_memory() -> None:
    ranked = sw.best_plans(GRAPH, devices=4, cluster=cluster(10_000), memory_limit="none", top=2)
    assert ranked.plans
    with pytest.raises(MemoryLimitError):
        sw.best_plans(GRAPH, devices=4, cluster=cluster(10_000), top=2)


def test_auto_parallel_has_the_same_default() -> None:
    net = sw.AutoParallel(Stack(), "semi_auto", cluster=cluster(10_000))
    with pytest.raises(MemoryLimitError, match="cluster 'small'"):
        net.compile(*ARGS)
