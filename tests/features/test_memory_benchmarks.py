"""The benchmarks of memory and bubbles compare what they should."""

from __future__ import annotations

import pytest
import torch
from benchmarks import bench_bubbles, bench_memory
from benchmarks.allocations import held, peak_of_later_steps
from benchmarks.bubble_ranks import described
from benchmarks.memory_cases import CASES
from benchmarks.slow import slept, slow

from shardwright.core.cost.memory import Memory, StageMemory
from shardwright.core.cost.pipeline_actions import actions


def stage(number: int, peak: int) -> StageMemory:
    return StageMemory(number, peak, 0, 0, 0, 0, 0, 0, "")


def test_the_stage_that_is_predicted_worst_counts_with_its_lowest_rank() -> None:
    memory = Memory((stage(0, 100), stage(1, 90)), "adamw")
    assert bench_memory.worst(memory, [100, 130, 100, 120]) == (1, pytest.approx(-0.1))
    assert bench_memory.worst(memory, [80, 130, 90, 120]) == (0, pytest.approx(0.25))


def test_there_are_plans_of_every_kind() -> None:
    assert len(CASES) >= 12
    said = [str(case.options) for case in CASES.values()]
    for word in ("level1", "level2", "level3", "bfloat16", "'stages': 2", "'stages': 4"):
        assert any(word in each for each in said), word
    assert any(case.recompute for case in CASES.values())


def test_what_a_step_takes_for_a_moment_is_measured_and_what_was_there_before_is_not() -> None:
    there = torch.zeros(10_000)

    def prepare():
        kept = torch.zeros(100_000)

        def step() -> None:
            assert there is not None
            (kept + 1).sum()

        return step

    # What is kept, and for a moment as much again, and small numbers.
    assert peak_of_later_steps(prepare) == pytest.approx(2 * 400_000, abs=100)
    assert held() >= 40_000


def test_every_case_of_the_bubbles_is_a_schedule() -> None:
    cases = bench_bubbles.cases()
    assert {pipeline.schedule for pipeline, _ in cases} == {s for s, _ in bench_bubbles.SCHEDULES}
    for pipeline, parts in cases:
        assert len(actions(pipeline)) == bench_bubbles.STAGES
        assert len(described(pipeline, parts)["parts"]) == pipeline.num_chunks


def test_a_slow_copy_takes_its_time_forward_and_backward() -> None:
    slept.clear()
    x = torch.ones(3, requires_grad=True)
    slow(x, 0.01, 0.02).sum().backward()
    assert torch.equal(x.grad, torch.ones(3))
    assert len(slept) == 2
    assert slept[0] >= 0.01
    assert slept[1] >= 0.02


@pytest.mark.slow
@pytest.mark.distributed
def test_memory_is_predicted_within_the_goals() -> None:
    (table,) = bench_memory.run()
    assert table.missed == []


@pytest.mark.slow
@pytest.mark.distributed
def test_bubbles_are_predicted_within_the_goals() -> None:
    (table,) = bench_bubbles.run()
    assert table.missed == []
