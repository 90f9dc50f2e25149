"""The least recomputation with which the activations of stages fit into memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

import shardwright as sw
from sample_models import Stack
from shardwright.core.cost.predict import chunk_times, predict, with_longer_backward
from shardwright.core.planner.options import PlanOptions
from shardwright.core.planner.recompute_bound import (
    RecomputeOptions,
    least_recompute_seconds,
)
from shardwright.core.planner.step_bound import StepBounds

CURVE = [(0.0, 0.0), (0.5, 0.1), (1.0, 1.1)]
GRAPH = sw.capture(Stack(), (torch.randn(512, 128),))
RECOMPUTE = RecomputeOptions.of(GRAPH, {})


def test_the_curve_of_a_model_rises_and_is_convex() -> None:
    (curve,) = RECOMPUTE.stage_curves(lambda _: 1.0, lambda _: 0, 1)
    slopes = [(high - low) / (right - left) for (left, low), (right, high) in pairwise(curve)]
    assert curve[0] == (0.0, 0.0)
    assert 0.5 < curve[-1][0] <= 1.0
    assert slopes and slopes == sorted(slopes)


def test_a_larger_batch_saves_more_in_proportion() -> None:
    larger = sw.capture(Stack(), (torch.randn(2048, 128),))
    assert RECOMPUTE.saved_bytes_in(larger) == pytest.approx(4 * RECOMPUTE.saved_bytes, rel=0.01)


@pytest.mark.parametrize("share", [0.95, 0.8, 0.7])
def test_no_plan_under_a_limit_is_faster_than_the_bound(share: float) -> None:
    request: dict[str, Any] = {"devices": 2, "cluster": "a100", "micro_batches": 2}
    limit = int(share * sw.plan(GRAPH, **request).memory.peak)
    options = PlanOptions(**request, memory_limit=limit, stages=1)
    bound = StepBounds({2: GRAPH}, lambda: RECOMPUTE).balanced_seconds(options)
    step = sw.plan(GRAPH, **request, memory_limit=limit).step
    assert step is not None
    assert bound <= step.seconds


def test_a_smaller_limit_raises_the_bound() -> None:
    bounds = StepBounds({2: GRAPH}, lambda: RECOMPUTE)
    request: dict[str, Any] = {"devices": 2, "cluster": "a100", "micro_batches": 2, "stages": 1}
    large, small, smaller = (
        bounds.balanced_seconds(PlanOptions(**request, memory_limit=limit))
        for limit in ("1GB", "4MB", "3MB")
    )
    assert large < small < smaller


def test_stages_share_the_curve_of_the_model() -> None:
    names = [op.name for op in GRAPH.ops]
    halves = RECOMPUTE.stage_curves(
        lambda _: 1.0, lambda n: int(names.index(n) >= len(names) // 2), 2
    )
    (whole,) = RECOMPUTE.stage_curves(lambda _: 1.0, lambda _: 0, 1)
    assert sum(curve[-1][0] for curve in halves) == pytest.approx(whole[-1][0], rel=0.2)
    assert all(curve[-1][0] < whole[-1][0] for curve in halves)


@pytest.mark.parametrize(
    ("freed", "seconds"),
    [(-1.0, 0.0), (0.0, 0.0), (0.25, 0.05), (0.5, 0.1), (0.75, 0.6), (9.0, 1.1)],
)
def test_the_least_seconds_lie_on_the_curve_and_end_with_it(freed: float, seconds: float) -> None:
    assert least_recompute_seconds(CURVE, freed) == pytest.approx(seconds)


@pytest.mark.parametrize(("stages", "share"), [(1, 0.8), (1, 0.7), (2, 0.9), (2, 0.8)])
def test_a_division_recomputes_no_less_than_its_estimate(stages: int, share: float) -> None:
    request: dict[str, Any] = {
        "devices": 4,
        "cluster": "a100",
        "micro_batches": 8,
        "stages": stages,
        "mode": "data_parallel",
    }
    limit = int(share * sw.plan(GRAPH, **request).memory.peak)
    plan = sw.plan(GRAPH, **request, memory_limit=limit)
    free = replace(plan, recompute={})
    options = PlanOptions(**request, memory_limit=limit)
    estimate = StepBounds({8: GRAPH}, lambda: RECOMPUTE).stage_recompute_seconds(
        options, plan.pipeline
    )
    assert len(estimate) == stages
    times = chunk_times(free.partitioned, options.resolved_cluster)
    longer = with_longer_backward(times, plan.pipeline, estimate)
    bound = predict(free.partitioned, options.resolved_cluster, times=longer).seconds
    assert plan.recompute and bound <= plan.step_time * 1.001
