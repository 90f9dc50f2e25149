"""The bound from computation alone is below the step of every plan, and close to good ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.core.partition.schedules import SCHEDULES
from shardwright.core.planner.options import PlanOptions
from shardwright.core.planner.step_bound import StepBounds


class Wide(nn.Module):
    """Layers whose matrix products take nearly all of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(8)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


with torch.device("meta"):
    GRAPH = sw.capture(Wide(), (torch.empty(4096, 4096),))
BOUNDS = StepBounds(GRAPH)


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
    bound = BOUNDS.min_seconds(options)
    assert 0.6 * step.seconds < bound <= step.seconds


def test_stages_that_do_not_divide_the_devices_have_no_bound() -> None:
    options = PlanOptions(devices=8, cluster="a100", micro_batches=8)
    assert BOUNDS.min_seconds(replace(options, stages=3)) == 0.0
