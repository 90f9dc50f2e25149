"""The bound from computation alone is below the step of every plan, and close to good ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.core.partition.pipeline_spec import PipelineSpec
from shardwright.core.partition.schedules import SCHEDULES
from shardwright.core.planner.options import PlanOptions
from shardwright.core.planner.step_bound import StepBounds, _min_micro_batches_in_flight
from shardwright.core.search.recompute.levels import micro_batches_in_flight


class Wide(nn.Module):
    """Layers whose matrix products take nearly all of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(8)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


with torch.device("meta"):
    GRAPH = sw.capture(Wide(), (torch.empty(4096, 4096),))
BOUNDS = StepBounds({8: GRAPH})


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_no_plan_is_faster_than_its_bound(stages: int, schedule: str) -> None:
    options = PlanOptions(
        devices=8, cluster="a100", stages=stages, schedule=schedule, micro_batches=8
    )
    step = sw.plan(
        GRAPH, devices=8, cluster="a100", stages=stages, schedule=schedule, micro_batches=8
    ).step
    assert step is not None
    bound, balanced = BOUNDS.min_seconds(options), BOUNDS.balanced_seconds(options)
    assert 0.6 * step.seconds < bound <= step.seconds
    assert 0.6 * step.seconds < balanced <= step.seconds


def test_stages_that_do_not_divide_the_devices_have_no_bound() -> None:
    options = PlanOptions(devices=8, cluster="a100", micro_batches=8)
    assert BOUNDS.min_seconds(replace(options, stages=3)) == 0.0
    assert BOUNDS.balanced_seconds(replace(options, stages=3)) == 0.0


def test_layers_that_cannot_be_divided_equally_raise_the_balanced_bound() -> None:
    options = PlanOptions(devices=15, cluster="a100", stages=5, micro_batches=8)
    # 8 equal layers over 5 stages: the slowest stage has two of them, instead of 8 / 5.
    ratio = BOUNDS.balanced_seconds(options) / BOUNDS.min_seconds(options)
    assert 1.05 < ratio < 1.25


def test_a_model_with_too_few_operators_for_the_stages_has_no_balanced_bound() -> None:
    options = PlanOptions(devices=64, cluster="a100", stages=64, micro_batches=8)
    assert BOUNDS.balanced_seconds(options) == 0.0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_micro_batches_in_flight_of_many_stages_are_in_proportion_to_those_of_fewer(
    schedule: str,
) -> None:
    chunks = SCHEDULES[schedule].min_chunks
    pipeline = PipelineSpec(80, 160, schedule, chunks)
    assumed = _min_micro_batches_in_flight(pipeline)
    simulated = micro_batches_in_flight(pipeline)
    assert len(assumed) == 80
    for few, exact in zip(assumed, simulated, strict=True):
        assert few <= 1.1 * exact + 2
