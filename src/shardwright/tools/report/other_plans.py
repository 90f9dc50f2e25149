"""Section of a report page that compares its plan with other plans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shardwright.core.cost.memory import bytes_text
from shardwright.core.plan.data import PlanData
from shardwright.core.plan.diff import differences
from shardwright.core.plan.parallelism import parallelism_sentence
from shardwright.core.plan.rows import seconds_text
from shardwright.tools.report.page import Bar, Chart, OtherPlan, Stack

MAX_CHANGES = 12
"""Maximum number of differences listed for each plan."""

THIS_PLAN = "this plan"


def other_plans(plan: PlanData, others: Mapping[str, PlanData | str]) -> Iterator[OtherPlan]:
    """Yield a comparison entry for each plan, the page's plan first, with bars on a shared scale.

    Args:
        others: for each plan to compare with, by name, the plan or the reason why it could not be
            made; if empty, nothing is yielded.
    """
    if not others:
        return
    plans_by_name = {THIS_PLAN: plan, **others}
    plans = [each for each in plans_by_name.values() if isinstance(each, PlanData)]
    maxima = (
        max((each.step_time or 0.0 for each in plans), default=0.0),
        # With the limits, whose lines must lie within the chart.
        max(max(_get_peak_bytes(each), each.memory_limit or 0) for each in plans),
        max(each.bytes for each in plans),
    )
    for name, each in plans_by_name.items():
        if isinstance(each, str):
            # The reason why this plan could not be made.
            yield OtherPlan(name, each)
        else:
            changes = Chart() if each is plan else _make_differences_table(plan, each)
            yield OtherPlan(
                name,
                parallelism_sentence(each),
                tuple(_iterate_plan_stacks(each, *maxima)),
                changes,
            )


def _get_peak_bytes(plan: PlanData) -> int:
    return 0 if plan.known_memory is None else plan.known_memory.peak


def _iterate_plan_stacks(
    plan: PlanData, max_seconds: float, max_peak_bytes: int, max_sent_bytes: int
) -> Iterator[Stack]:
    # Without a cluster, plans have no step time.
    if plan.step_time is not None and max_seconds:
        yield _make_single_bar_stack(
            "step", seconds_text(plan.step_time), plan.step_time / max_seconds
        )
    peak_bytes, limit = _get_peak_bytes(plan), plan.memory_limit
    if peak_bytes:
        size_text = bytes_text(peak_bytes) + ", does not fit" * plan.over_limit
        limit_position = None if limit is None else limit / max_peak_bytes
        state = "bad" if plan.over_limit else ""
        length = peak_bytes / max_peak_bytes
        yield _make_single_bar_stack("memory", size_text, length, limit_position, state)
    # On one device nothing is sent.
    yield _make_single_bar_stack("sent", bytes_text(plan.bytes), plan.bytes / (max_sent_bytes or 1))


def _make_single_bar_stack(
    category: str, size_text: str, length: float, limit: float | None = None, state: str = ""
) -> Stack:
    bar = Bar(category, category, size_text, 0.0, length)
    return Stack(category, size_text, (bar,), limit, state)


def _make_differences_table(plan: PlanData, other_plan: PlanData) -> Chart:
    """Return the table of differences between the plan of the report page and another plan."""
    # "model" is a difference of fingerprints, which depend on the batch size too.
    changes = [each for each in differences(plan, other_plan) if each.what != "model"]
    table = []
    for each in changes[:MAX_CHANGES]:
        num_omitted = len(each.names) - 2
        names = ", ".join(each.names[:2]) + (f" and {num_omitted} more" if num_omitted > 0 else "")
        table.append((each.what, each.first, each.second, names))
    omitted = len(changes) - MAX_CHANGES
    note = f"And {omitted} more differences: `shardwright diff` lists them." if omitted > 0 else ""
    note = note if changes else "Both plans make the same decisions."
    return Chart(note=note, header=("", THIS_PLAN, "this one", "of"), table=tuple(table))
