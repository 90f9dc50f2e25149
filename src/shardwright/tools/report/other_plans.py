"""The comparison of the plan of a page with other plans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shardwright.core.cost.memory import binary
from shardwright.core.plan.data import PlanData
from shardwright.core.plan.diff import differences
from shardwright.core.plan.parallelism import sentence
from shardwright.core.plan.rows import seconds_text
from shardwright.tools.report.page import Bar, Chart, OtherPlan, Stack

MAX_CHANGES = 12
"""Differences that are listed for each plan."""

FIRST = "this plan"


def other_plans(plan: PlanData, others: Mapping[str, PlanData | str]) -> Iterator[OtherPlan]:
    """Yields the plan and each other plan, with bars on one scale; nothing without others."""
    if not others:
        return
    named = {FIRST: plan, **others}
    plans = [each for each in named.values() if isinstance(each, PlanData)]
    most = (
        max((each.step_time or 0.0 for each in plans), default=0.0),
        max(max(_peak(each), each.memory_limit or 0) for each in plans),
        max(each.bytes for each in plans),
    )
    for name, each in named.items():
        if isinstance(each, str):
            yield OtherPlan(name, each)
        else:
            changes = Chart() if each is plan else _changes(plan, each)
            yield OtherPlan(name, sentence(each), tuple(_rows(each, *most)), changes)


def _peak(plan: PlanData) -> int:
    return 0 if plan.known_memory is None else plan.known_memory.peak


def _rows(plan: PlanData, longest: float, largest: int, most: int) -> Iterator[Stack]:
    if plan.step_time is not None and longest:
        yield _row("step", seconds_text(plan.step_time), plan.step_time / longest)
    peak, limit = _peak(plan), plan.memory_limit
    if peak:
        text = binary(peak) + ", does not fit" * plan.over_limit
        place = None if limit is None else limit / largest
        yield _row("memory", text, peak / largest, place, "bad" if plan.over_limit else "")
    yield _row("sent", binary(plan.bytes), plan.bytes / (most or 1))


def _row(kind: str, text: str, length: float, limit: float | None = None, state: str = "") -> Stack:
    return Stack(kind, text, (Bar(kind, kind, text, 0.0, length),), limit, state)


def _changes(plan: PlanData, other: PlanData) -> Chart:
    """The differences of a plan from the plan of the page."""
    # A plan for another batch has another fingerprint, although its model is the same.
    changes = [each for each in differences(plan, other) if each.what != "model"]
    table = []
    for each in changes[:MAX_CHANGES]:
        more = len(each.names) - 2
        where = ", ".join(each.names[:2]) + (f" and {more} more" if more > 0 else "")
        table.append((each.what, each.first, each.second, where))
    omitted = len(changes) - MAX_CHANGES
    note = f"And {omitted} more differences: `shardwright diff` lists them." if omitted > 0 else ""
    note = note if changes else "It makes the same decisions."
    return Chart(note=note, header=("", FIRST, "this one", "of"), table=tuple(table))
