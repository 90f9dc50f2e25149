"""The number of pipeline stages, chosen by the time of a step under the memory limit."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.core.constraints.shard import pins_of
from shardwright.core.partition.schedules import SCHEDULES
from shardwright.core.planner.candidate import Candidate, candidates
from shardwright.core.planner.captured_model import CapturedModel
from shardwright.core.planner.choose_stages import fastest_over_stages, stage_counts, suggest_stages
from shardwright.core.planner.fit_memory import candidate_within_memory
from shardwright.core.planner.options import PlanOptions
from shardwright.errors import MemoryLimitError, StrategyError


class Deep(nn.Module):
    """Layers so wide, on so few rows, that their gradients cost more than waiting for stages."""

    def __init__(self, layers: int = 8, width: int = 512) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


with torch.device("meta"):
    NET, X = Deep(), (torch.empty(64, 512),)
GRAPH = sw.capture(NET, (torch.empty(8, 512, device="meta"),))


MODEL = CapturedModel(GRAPH, pins_of(GRAPH), (), training=True)


def searched(**options: Any) -> PlanOptions:
    return PlanOptions(devices=8, cluster="a100", stages="auto", **options)


def with_stages(options: PlanOptions, stages: int) -> PlanOptions:
    return replace(options, stages=stages)


def decide(options: PlanOptions) -> Sequence[Candidate]:
    return candidates(MODEL, options)


def test_numbers_divide_the_devices_and_are_not_more_than_micro_batches() -> None:
    assert list(stage_counts(searched(micro_batches=8))) == [1, 2, 4, 8]
    assert list(stage_counts(searched(micro_batches=5))) == [1, 2, 4]
    assert list(stage_counts(searched(micro_batches=8, max_stages=2))) == [1, 2]
    assert list(stage_counts(searched(micro_batches=9, schedule="interleaved_1f1b"))) == [1, 8]


def test_the_number_whose_step_takes_the_least_time_is_taken() -> None:
    plans = [
        sw.plan(NET, X, devices=8, stages=n, micro_batches=8, cluster="a100") for n in (1, 2, 4, 8)
    ]
    best = min(plans, key=lambda plan: plan.step_time or 0.0)
    found = sw.plan(NET, X, devices=8, stages="auto", micro_batches=8, cluster="a100")
    assert found.pipeline == best.pipeline
    assert found.step == best.step


def test_with_one_micro_batch_there_is_one_stage() -> None:
    assert sw.plan(NET, X, devices=8, stages="auto", cluster="a100").pipeline.stages == 1


@pytest.mark.slow
def test_what_does_not_fit_into_memory_does_not_count() -> None:
    free = fastest_over_stages([searched(micro_batches=8)], decide)
    options = replace(searched(micro_batches=8), memory_limit=free.memory().peak // 2)
    found = fastest_over_stages([options], decide)
    assert options.limit is not None and found.memory().peak <= options.limit
    assert found.seconds > free.seconds
    for stages in (1, 2, 4, 8):
        try:
            one = candidate_within_memory(with_stages(options, stages), decide)
        except MemoryLimitError:
            continue
        assert found.seconds <= one.seconds


def test_if_nothing_fits_the_error_is_that_of_the_number_that_needs_least() -> None:
    options = replace(searched(micro_batches=8), memory_limit="1KiB")
    needed = []
    for stages in (1, 2, 4, 8):
        with pytest.raises(MemoryLimitError) as error:
            candidate_within_memory(with_stages(options, stages), decide)
        needed.append(error.value.needed)
    with pytest.raises(MemoryLimitError) as error:
        fastest_over_stages([options], decide)
    assert error.value.needed == min(needed)


def test_what_cannot_be_faster_than_the_best_is_not_fitted() -> None:
    best = fastest_over_stages([searched(micro_batches=8)], decide)
    fitted = []

    def watched(options: PlanOptions) -> Sequence[Candidate]:
        if options.sharding is None:
            fitted.append(options.stages)
        return decide(options)

    assert fastest_over_stages([searched(micro_batches=8)], watched, best=best) is best
    assert len(fitted) < 4


def test_where_the_user_chose_a_suggestion_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    best = fastest_over_stages([searched(micro_batches=8)], decide).pipeline.stages
    other = 8 if best != 8 else 1
    chosen = PlanOptions(devices=8, cluster="a100", stages=other, micro_batches=8)
    with caplog.at_level(logging.WARNING, "shardwright.search"):
        suggest_stages(chosen, decide(chosen)[0], decide)
    assert f"{best} pipeline stages have the shortest predicted step time" in caplog.text
    assert f"{other} are requested" in caplog.text


def test_stages_are_balanced_by_time_on_the_cluster() -> None:
    plan = sw.plan(NET, X, devices=8, stages=4, micro_batches=8, cluster="a100")
    counts = [list(plan.pipeline.chunk_of.values()).count(stage) for stage in range(4)]
    assert max(counts) - min(counts) <= 2
    assert plan.step is not None and 0 < plan.step.bubble < 1


def test_the_schedule_is_the_fastest_of_all(caplog: pytest.LogCaptureFixture) -> None:
    options = {"devices": 8, "stages": 2, "micro_batches": 8, "cluster": "a100"}
    each = {}
    for schedule in SCHEDULES:
        each[schedule] = sw.plan(GRAPH, **options, schedule=schedule).step.seconds
    best = sw.plan(GRAPH, **options, schedule="auto")
    assert best.pipeline.stages == 2
    assert best.step.seconds == min(each.values()) < each["1f1b"]
    assert best.pipeline.schedule == min(each, key=lambda schedule: each[schedule])


def test_stages_and_schedule_are_chosen_together_under_a_memory_limit() -> None:
    free = fastest_over_stages([searched(micro_batches=8, schedule="auto")], decide)
    limit = free.memory().peak - 1
    options = searched(micro_batches=8, schedule="auto", memory_limit=limit)
    found = fastest_over_stages([options], decide)
    assert found.memory().peak <= limit and found.seconds >= free.seconds
    plain = fastest_over_stages([replace(options, schedule="1f1b")], decide)
    assert found.seconds <= plain.seconds


def test_a_schedule_for_stages_that_cannot_be_is_an_error() -> None:
    with pytest.raises(StrategyError, match="8 devices cannot be divided into 3 stages"):
        sw.plan(GRAPH, devices=8, stages=3, micro_batches=8, cluster="a100", schedule="auto")


def test_auto_and_named_stages_contradict_each_other() -> None:
    with pytest.raises(StrategyError, match="stages='auto' conflicts with stage_config"):
        sw.plan(NET, X, devices=8, stages="auto", micro_batches=8, stage_config={"layers.0": 0})


def test_stages_that_the_model_cannot_be_divided_into_are_left_out() -> None:
    x = torch.empty(8, 8, device="meta", requires_grad=True)
    options: dict[str, Any] = {"devices": 4, "micro_batches": 2, "mode": "data_parallel"}
    with pytest.raises(sw.PlanError, match="'x' requires a gradient"):
        sw.plan(Deep(2, 8), (x,), stages=2, **options)
    assert sw.plan(Deep(2, 8), (x,), stages="auto", **options).pipeline.stages == 1
