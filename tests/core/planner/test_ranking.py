"""The fastest plans of different kinds, and why there is none of others."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from sample_models import Stack
from shardwright.core.plan.ranked import LeftOut, PlanKind, RankedPlans
from shardwright.core.planner.memory_search import MemorySearch

OPTIONS: dict[str, Any] = {"devices": 4, "cluster": "ascend910b", "stages": "auto"}


def batch(rows: int = 4096) -> tuple[Tensor]:
    return (torch.empty(rows, 128, device="meta"),)


def net() -> nn.Module:
    with torch.device("meta"):
        return Stack()


def plan(**options: Any) -> sw.Plan:
    return sw.plan(net(), batch(), **{**OPTIONS, "micro_batches": 4, **options})


@cache
def limit() -> int:
    """What plans with four stages do not fit into, and with two stages only if they recompute."""
    return plan(stages=2).memory.peak * 5 // 6


@cache
def ranked(top: int = 50) -> RankedPlans:
    return sw.best_plans(net(), batch(), **OPTIONS, micro_batches=4, memory_limit=limit(), top=top)


def test_the_first_is_the_plan_and_each_kind_is_there_once_in_the_order_of_time() -> None:
    plans = list(ranked().plans.values())
    chosen = plan(memory_limit=limit())
    assert (plans[0].step_time, plans[0].cuts) == (chosen.step_time, chosen.cuts)
    seconds = [each.step_time or 0.0 for each in plans]
    assert seconds == sorted(seconds) and seconds[0] > 0
    assert all(each.memory.peak <= limit() for each in plans)
    assert len({kind.stages for kind in ranked().plans}) > 1
    for kind, each in ranked().plans.items():
        assert (each.pipeline.stages, each.pipeline.micro_batches) == (kind.stages, 4)
        assert bool(each.recompute) == kind.recomputes
        assert ("" if each.sharding is None else each.sharding.level).startswith(kind.level)


def test_plans_that_fit_although_estimates_ruled_them_out_are_ranked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = {**OPTIONS, "stages": 2, "micro_batches": 4, "memory_limit": limit()}
    monkeypatch.setattr(MemorySearch, "_may_fit_in_memory", lambda *_: False)
    plans = list(sw.best_plans(net(), batch(), **options, top=50).plans.values())
    assert plans and plans[0].step_time == plan(stages=2, memory_limit=limit()).step_time


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("level", ["level1", "level2", "level3"])
def test_no_plan_that_is_asked_for_is_faster_than_that_of_its_kind(stages: int, level: str) -> None:
    found = {**ranked(3).plans, **ranked(3).left_out}
    kind = PlanKind(4, stages, "1f1b" if stages > 1 else "", level)
    of_kind = [each for known, each in found.items() if known.requested == kind]
    try:
        fixed = plan(stages=stages, hsdp={"level": level}, memory_limit=limit())
    except sw.MemoryLimitError:
        assert all(isinstance(each, LeftOut) and each.memory > limit() for each in of_kind)
        return
    assert fixed.step_time is not None and fixed.step_time >= next(iter(found.values())).step_time
    for each in of_kind:
        if isinstance(each, LeftOut) and fixed.sharding and fixed.sharding.level == level:
            assert each.seconds <= fixed.step_time
        if isinstance(each, sw.Plan):
            assert (each.step_time or 0.0) <= 1.001 * fixed.step_time


def test_as_many_are_told_as_are_asked_for_and_the_next_are_left_out_for_their_time() -> None:
    few, many = ranked(2), ranked()
    assert len(few.plans) == 2 and list(few.plans) == list(many.plans)[:2]
    slowest = list(few.plans.values())[-1].step_time or 0.0
    for kind, reason in few.left_out.items():
        if reason.seconds:
            assert reason.seconds >= 0.97 * slowest, kind
        else:
            assert reason.memory > limit() or "stages" in reason.text


def test_what_is_too_large_says_how_much_it_needs() -> None:
    large = [each for each in ranked().left_out.values() if each.memory]
    assert large and all(each.memory > limit() for each in large)
    assert all("needs at least" in each.text for each in large)


def test_the_number_of_micro_batches_is_one_of_the_kinds_where_it_is_open() -> None:
    found = sw.best_plans(net(), batch(64), **OPTIONS, micro_batches="auto", top=6)
    numbers = {kind.micro_batches for kind in (*found.plans, *found.left_out)}
    assert {1, 2, 64} <= numbers
    assert not any(
        "does not follow from micro-batches" in each.text for each in found.left_out.values()
    )
    assert "2 micro-batches" in str(found)


def test_numbers_are_left_out_where_the_loss_is_not_a_mean_of_samples() -> None:
    class Root(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).sqrt()

    with torch.device("meta"):
        root = Root()
    found = sw.best_plans(root, batch(8), **{**OPTIONS, "stages": 1}, micro_batches="auto")
    assert {kind.micro_batches for kind in found.plans} == {1}
    assert any(
        "does not follow from micro-batches" in each.text for each in found.left_out.values()
    )
    with pytest.raises(sw.StrategyError, match="not linear in a mean or sum"):
        sw.best_plans(root, batch(8), **{**OPTIONS, "stages": 1}, micro_batches=4)


def test_kinds_are_ranked_where_mem_coeff_is_to_be_chosen_too() -> None:
    options = {**OPTIONS, "stages": 1, "micro_batches": 4}
    found = sw.best_plans(net(), batch(), **options, mem_coeff="auto")
    assert len(found.plans) > 1
    fixed = plan(stages=1, mem_coeff="auto").step_time or 0.0
    assert (next(iter(found.plans.values())).step_time or 0.0) <= fixed


def test_the_text_reads_at_80_columns_and_json_has_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    found = ranked(3)
    lines = str(found).splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert "4 micro-batches" in lines[0] and "left out:" in lines
    figures = json.loads(found.to_json())
    assert [each["step_seconds"] for each in figures["plans"]] == [
        each.step_time for each in found.plans.values()
    ]
    assert len(figures["left_out"]) == len(found.left_out)
    slower = json.loads(ranked().to_json())["plans"][-1]["slower_for"]
    assert slower and all(seconds > 0 for seconds in slower.values())


def test_what_is_left_out_of_kinds_that_differ_in_the_level_is_one_line() -> None:
    reason = LeftOut.slower(2.0)
    one, other = PlanKind(4, 2, "1f1b"), PlanKind(4, 2, "1f1b", "level3")
    text = str(replace(ranked(2), left_out={one: reason, other: reason}))
    assert text.endswith("2 stages (1f1b), unsharded/level3: takes at least 2 s")


def test_without_a_cluster_there_are_no_seconds_to_rank_by() -> None:
    with pytest.raises(sw.StrategyError, match="name a cluster"):
        sw.best_plans(net(), batch(), devices=4)
    with pytest.raises(sw.StrategyError, match="top=0: must be"):
        sw.best_plans(net(), batch(), **OPTIONS, top=0)
