"""Dry runs of chunks that are alike: made once, and what each would need by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from sample_models import captured_micro_batch, llama
from shardwright.core.cost import dry_run, meta_chunk
from shardwright.core.cost.dry_run import DryRun, DryRunCache, dry_run_chunk
from shardwright.core.cost.memory import memory
from shardwright.core.cost.meta_chunk import Phase
from shardwright.core.partition.schedules import SCHEDULES

MICRO_BATCHES = 4


def planned(schedule: str = "1f1b", level: str = "level1") -> sw.Plan:
    return sw.plan(
        captured_micro_batch(llama, MICRO_BATCHES, layers=8),
        devices=8,
        stages=2 if SCHEDULES[schedule].allows_several_chunks else 4,
        micro_batches=MICRO_BATCHES,
        schedule=schedule,
        hsdp={"level": level, "threshold": 0},
    )


@pytest.mark.parametrize(
    ("schedule", "level"), [("gpipe", "level3"), *((each, "level1") for each in SCHEDULES)]
)
def test_equal_chunks_need_what_each_needs_by_itself(
    schedule: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(schedule, level)
    shared = plan.memory

    run = DryRunCache.of
    monkeypatch.setattr(DryRunCache, "of", lambda _, *given: run(DryRunCache(), *given))
    assert memory(plan.partitioned) == shared


def test_the_middle_stages_of_equal_layers_run_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = planned()
    by_itself, made = plan.memory, []

    def counted(*given: object) -> DryRun:
        made.append(given)
        return dry_run_chunk(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(dry_run, "dry_run_chunk", counted)
    again = replace(plan, dry_runs=DryRunCache())
    assert again.memory == by_itself
    assert len(made) < 4
    before = len(made)
    assert again.memory_with("sgd").peak < by_itself.peak
    assert len(made) == before, "nothing runs for another optimizer"


def test_schedules_share_the_passes_that_both_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """DualPipeV runs some backward passes in full, as 1F1B does, and splits others."""
    made: list[Sequence[str]] = []

    def counted(*given: Any) -> DryRun:
        made.append(given[2])
        return dry_run_chunk(*given)

    monkeypatch.setattr(dry_run, "dry_run_chunk", counted)
    plan, cache = planned("dualpipe_v"), DryRunCache()
    chunk = plan.partitioned.chunks[1]
    cache.of(plan.partitioned, chunk, ("F", "B"))
    both = cache.of(plan.partitioned, chunk, ("F", "B", "I", "W"))
    assert made == [("F", "B"), ("F", "I", "W")]
    assert set(both.later) == {"F", "B", "I", "W"}


def test_arguments_that_are_no_tensors_may_stand_between_those_that_are() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor, scale: float, bias: Tensor) -> Tensor:
            return (self.layer(x) * scale + bias).sum()

    plan = sw.plan(Scaled(), (torch.randn(8, 4), 2.0, torch.randn(4)), devices=2)
    assert plan.memory is not None
    assert plan.memory.peak > 0


@pytest.mark.parametrize("level", ["level1", "level2", "level3"])
def test_one_micro_batch_tells_what_the_first_two_need(
    level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = planned(level=level)
    once = plan.memory

    def twice(
        self: meta_chunk.MetaChunk, kinds: Sequence[str], several: bool, _: object
    ) -> tuple[dict[str, Phase], dict[str, Phase]]:
        first = {kind: self.run_action(kind) for kind in kinds}
        return first, {kind: self.run_action(kind) for kind in kinds} if several else {}

    monkeypatch.setattr(meta_chunk.MetaChunk, "run_actions", twice)
    both = memory(plan.partitioned)
    assert [stage.curve for stage in once.stages] == [stage.curve for stage in both.stages]


def test_a_model_with_a_loss_is_planned_in_a_context_of_the_meta_device() -> None:
    with torch.device("meta"):
        net = sw.WithLoss(nn.Linear(4, 4), nn.MSELoss())
        plan = sw.plan(net, (torch.empty(8, 4), torch.empty(8, 4)), devices=2)
    assert plan.memory is not None
    assert plan.memory.peak > 0
