"""The search under a memory limit finds what examining everything finds, with fewer steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.core.planner import candidate, candidate_fitting, group_search, step_bound
from shardwright.core.planner.candidate import Candidate
from shardwright.core.planner.candidate_bound import CandidateBound
from shardwright.core.planner.group_search import GroupSearch
from shardwright.core.planner.stage_options import LowestSeconds, QueuedOptions


def plan(limit: int, **options: Any) -> sw.Plan:
    """Plan six layers, which take most of the memory of four devices."""
    with torch.device("meta"):
        net = sw.WithLoss(nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(6))), nn.MSELoss())
        batch = torch.empty(4096, 1024), torch.empty(4096, 1024)
    return sw.plan(net, batch, devices=4, cluster="h100", memory_limit=limit, **options)


OPEN: dict[str, Any] = {"stages": "auto", "micro_batches": 4, "schedule": "auto"}


@pytest.mark.parametrize("mebibytes", [120, 85, 68])
def test_the_answer_is_that_of_examining_everything(
    mebibytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = mebibytes << 20
    found = plan(limit, **OPEN)
    with monkeypatch.context() as patched:
        # Nothing is skipped: all bounds are those of the computation, and all cuts are examined.
        patched.setattr(group_search, "SIMILAR_BOUND", 0.0)
        patched.setattr(step_bound, "SIMILAR_BOUND", 0.0)
        patched.setattr(step_bound, "BALANCED_BOUND", 0.0)
        patched.setattr(group_search, "UNSHARDED_BOUND", 0.0)
        patched.setattr(candidate_fitting, "RECOMPUTED_BOUND", 0.0)
        patched.setattr(QueuedOptions, "without_earlier_cuts", lambda _, candidates: candidates)
        exhaustive = plan(limit, **OPEN)
    assert found.step_time == exhaustive.step_time
    assert found.memory == exhaustive.memory
    # What the plan says that it needs was measured, not estimated.
    assert found.memory.peak <= limit


def test_a_group_whose_cuts_an_earlier_group_found_is_not_examined_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    examined: Counter[tuple[object, ...]] = Counter()
    make = GroupSearch._make_queue_entries

    def counted(search: GroupSearch, candidates: Sequence[Candidate], attempt: Any) -> Any:
        options = attempt.options
        # Without ZeRO the objective of the search is another one.
        if options.sharding is not None:
            pipeline = options.stages, options.schedule, options.sharding.level
            # A baseline may have the cuts that the search found.
            examined.update((*pipeline, cuts) for cuts in {id(each.cuts) for each in candidates})
        return make(search, candidates, attempt)

    monkeypatch.setattr(GroupSearch, "_make_queue_entries", counted)
    plan(68 << 20, **OPEN)
    assert examined
    assert set(examined.values()) == {1}


def test_baselines_say_nothing_about_the_next_mem_coeff() -> None:
    with torch.device("meta"):
        net, x = nn.Linear(64, 64), torch.empty(64, 64)
    found: list[Candidate] = []

    def recorded(model: Any, options: Any) -> Sequence[Candidate]:
        found.extend(search_all(model, options))
        return found

    search_all = candidate.candidates
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("shardwright.core.planner.best_candidate.candidates", recorded)
        sw.plan(net, (x,), devices=2, cluster="h100")
    baseline = next(each for each in found if each.is_baseline)
    lowest = LowestSeconds()
    fast, slow = CandidateBound(baseline, [0.0]), CandidateBound(baseline, [1.0])
    lowest.lower([replace(slow, candidate=replace(baseline, is_baseline=False))])
    lowest.lower([fast])
    assert (lowest.of_group, lowest.searched) == (fast.simulated, slow.simulated)
    assert fast.simulated < slow.simulated
