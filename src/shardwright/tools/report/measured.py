"""Charts of the measurements of a plan next to its predictions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import fmean

from shardwright.core.cost.collective_totals import CollectiveTotal
from shardwright.core.cost.memory import bytes_text
from shardwright.core.cost.time_parts import COMMUNICATION, COMPUTATION, WAITING
from shardwright.core.plan.data import PlanData
from shardwright.core.plan.measured import EXPOSED_COMMUNICATION, Measured, MeasuredRank
from shardwright.core.plan.rows import seconds_text
from shardwright.tools.report.page import Chart, Stack, stack_bars

BETWEEN_OPERATORS = "between operators"
KINDS = (*COMPUTATION, EXPOSED_COMMUNICATION, WAITING, BETWEEN_OPERATORS)

MAX_RANKS = 16
"""Maximum number of ranks in the table of memory and step times."""


def kinds_chart(plan: PlanData, measured: Measured) -> Chart:
    """Return the chart of a step's predicted and measured time, by category."""
    stage, ranks = _find_busiest_stage(measured)
    seconds = fmean(rank.seconds for rank in ranks)
    seconds_of = {
        each: fmean(rank.component_seconds.get(each, 0.0) for rank in ranks) for each in KINDS
    }
    # Kernels of several streams may add up to more than the step.
    seconds_of[BETWEEN_OPERATORS] = max(0.0, seconds - sum(seconds_of.values()))
    predicted_kinds = _get_predicted_seconds_by_category(plan)
    # 1.0 in place of 0, by which the bars would be divided.
    longest = max(seconds, sum(predicted_kinds.values())) or 1.0
    predicted_rows = [("predicted", predicted_kinds)] if predicted_kinds else []
    rows = tuple(
        _make_step_time_stack(name, row_kinds, longest)
        for name, row_kinds in (*predicted_rows, ("measured", seconds_of))
    )
    step = None if plan.step is None else plan.step.seconds
    table = [_format_comparison_row("step", step, seconds)]
    for category in KINDS:
        if seconds_of[category] or predicted_kinds.get(category):
            # The Python between operators is not predicted; a prediction without a category has no
            # such part.
            predicted = (
                None
                if not predicted_kinds or category == BETWEEN_OPERATORS
                else predicted_kinds.get(category, 0.0)
            )
            # Waiting is not measured on an accelerator.
            unknown = category == WAITING and not seconds_of[category]
            value = None if unknown else seconds_of[category]
            table.append(_format_comparison_row(category, predicted, value))
    shown = tuple(each for each in KINDS if seconds_of[each] or predicted_kinds.get(each))
    return Chart(
        rows, shown, _format_step_time_note(plan, measured, stage), ("", *HEADER), tuple(table)
    )


HEADER = ("predicted", "measured", "of predicted")


def _find_busiest_stage(measured: Measured) -> tuple[int, list[MeasuredRank]]:
    """Return the pipeline stage with the longest measured computation, and its ranks."""
    stages: dict[int, list[MeasuredRank]] = {}
    for rank in measured.ranks:
        stages.setdefault(rank.stage, []).append(rank)

    def computation_seconds(stage: int) -> float:
        # A default for each of the five categories.
        return fmean(
            sum(map(rank.component_seconds.get, COMPUTATION, [0.0] * 5)) for rank in stages[stage]
        )

    # Predictions describe the stage that computes longest, as the others wait for it.
    stage = max(stages, key=computation_seconds)
    return stage, stages[stage]


def _get_predicted_seconds_by_category(plan: PlanData) -> dict[str, float]:
    """Return a step's predicted seconds by measured category; empty without a prediction."""
    result: dict[str, float] = {}
    for time_part in () if plan.step is None else plan.step.parts:
        # Measurements have one category for all exposed communication.
        category = EXPOSED_COMMUNICATION if time_part.kind in COMMUNICATION else time_part.kind
        result[category] = result.get(category, 0.0) + time_part.seconds
    return result


def _make_step_time_stack(label: str, seconds_of: Mapping[str, float], longest: float) -> Stack:
    shown = {category: seconds_of[category] for category in KINDS if seconds_of.get(category)}
    total = seconds_text(sum(seconds_of.values()))
    return Stack(label, total, stack_bars(shown, longest, seconds_text))


def _format_comparison_row(
    name: str, predicted: float | None, measured: float | None
) -> tuple[str, ...]:
    ratio = f"{measured / predicted:.2f}" if predicted and measured is not None else ""
    cells = ("" if value is None else seconds_text(value) for value in (predicted, measured))
    return (name, *cells, ratio)


def _format_step_time_note(plan: PlanData, measured: Measured, stage: int) -> str:
    ranks = f"the ranks of stage {stage}" if plan.pipeline.stages > 1 else "all ranks"
    note = f"Mean of {ranks} over {measured.steps} steps, which the profiler slows down. "
    if measured.device == "cpu":
        note += (
            "Communication is the time in which a rank sends or waits; between operators is Python."
        )
    else:
        note += (
            "Seconds are those of kernels. Communication is the part that overlaps no computation;"
            " between operators no kernel runs, which includes bubbles."
        )
    if plan.step is None:
        note += " No time is predicted: plan for a cluster."
    return note


def collectives_chart(plan: PlanData, measured: Measured) -> Chart:
    """Return the table of one rank's collectives in a step, by stage, type of collective and mesh
    axes."""
    has_stages = plan.pipeline.stages > 1
    table = []
    # One device's collectives differ between stages, but not within one.
    for stage, predicted in enumerate(measured.predicted):
        ranks = [rank for rank in measured.ranks if rank.stage == stage]
        for key, (predicted_total, mean_total) in _pair_collective_totals(predicted, ranks).items():
            name = f"{key[0]} over {key[1]}" + (f", stage {stage}" if has_stages else "")
            table.append((name, *_format_collective_row(predicted_total, mean_total)))
    header = ("collective", "count", "measured", "bytes", "measured", "seconds", "measured")
    note = (
        "One rank in a step, predicted and measured. Predicted seconds include communication that"
    )
    note += " overlaps computation."
    if not table:
        return Chart(note="There are no collectives within a stage.")
    return Chart(note=note, header=header, table=tuple(table))


_Totals = tuple[CollectiveTotal | None, CollectiveTotal | None]
"""Predicted and measured totals of one collective."""


def _pair_collective_totals(
    predicted: tuple[CollectiveTotal, ...], ranks: list[MeasuredRank]
) -> dict[tuple[str, str], _Totals]:
    """Pair predicted with measured totals, averaged over `ranks`, by collective and mesh axes."""
    totals: dict[tuple[str, str], list[CollectiveTotal]] = {}
    for rank in ranks:
        for total in rank.collectives:
            totals.setdefault((total.kind, total.over), []).append(total)
    by_key = {(total.kind, total.over): total for total in predicted}
    return {
        key: (
            by_key.get(key),
            _average_collective_totals(totals[key], len(ranks)) if key in totals else None,
        )
        # First the predicted ones, then those that only the run has.
        for key in dict.fromkeys((*by_key, *totals))
    }


def _average_collective_totals(totals: list[CollectiveTotal], num_ranks: int) -> CollectiveTotal:
    def mean(name: str) -> float:
        # Over all ranks, also those without this collective.
        return sum(getattr(total, name) or 0.0 for total in totals) / num_ranks

    collective, over = totals[0].kind, totals[0].over
    return CollectiveTotal(collective, over, mean("count"), mean("bytes"), mean("seconds"))


def _format_collective_row(
    predicted: CollectiveTotal | None, measured: CollectiveTotal | None
) -> Iterator[str]:
    for quantity in ("count", "bytes", "seconds"):
        for total in (predicted, measured):
            value = None if total is None else getattr(total, quantity)
            if value is None:
                yield ""
            elif quantity == "count":
                # A mean over ranks need not be an integer.
                yield f"{value:,.4g}"
            else:
                yield bytes_text(round(value)) if quantity == "bytes" else seconds_text(value)


def ranks_chart(plan: PlanData, measured: Measured) -> Chart:
    """Return the table of memory and step time of the `MAX_RANKS` ranks with the highest peaks."""
    stages = {} if plan.known_memory is None else {s.stage: s for s in plan.known_memory.stages}
    ranks = sorted(measured.ranks, key=lambda rank: -rank.peak_bytes)[:MAX_RANKS]
    table = []
    # Chosen by memory, but listed in order of ranks.
    for rank in sorted(ranks, key=lambda rank: rank.rank):
        predicted = stages[rank.stage].peak if rank.stage in stages else None
        ratio = f"{rank.peak_bytes / predicted:.2f}" if predicted else ""
        predicted_text = "" if predicted is None else bytes_text(predicted)
        peaks = (predicted_text, bytes_text(rank.peak_bytes), ratio)
        exposed = seconds_text(rank.component_seconds.get(EXPOSED_COMMUNICATION, 0.0))
        table.append((f"rank {rank.rank}", *peaks, seconds_text(rank.seconds), exposed))
    header = ("memory peak", *HEADER, "step", EXPOSED_COMMUNICATION)
    omitted = len(measured.ranks) - len(ranks)
    note = f"{omitted} ranks that need less memory are not shown. " if omitted else ""
    note += (
        "Counted from the allocations of operators and the state between steps."
        if measured.device == "cpu"
        else "Peak of the device's allocator."
    )
    return Chart(note=note, header=header, table=tuple(table))
