"""Charts of the measurements of a plan next to its predictions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import fmean

from shardwright.core.cost.collective_totals import CollectiveTotal
from shardwright.core.cost.memory import binary
from shardwright.core.cost.time_parts import COMMUNICATION, COMPUTATION, WAITING
from shardwright.core.plan.data import PlanData
from shardwright.core.plan.measured import EXPOSED, Measured, MeasuredRank
from shardwright.core.plan.rows import seconds_text
from shardwright.tools.report.page import Chart, Stack, stacked

BETWEEN = "between operators"
KINDS = (*COMPUTATION, EXPOSED, WAITING, BETWEEN)

MAX_RANKS = 16


def kinds_chart(plan: PlanData, measured: Measured) -> Chart:
    """The time of a step by kind of work, predicted and measured."""
    stage, ranks = _busiest(measured)
    seconds = fmean(rank.seconds for rank in ranks)
    kinds = {kind: fmean(rank.kinds.get(kind, 0.0) for rank in ranks) for kind in KINDS}
    kinds[BETWEEN] = max(0.0, seconds - sum(kinds.values()))
    planned = _predicted_seconds(plan)
    whole = max(seconds, sum(planned.values())) or 1.0
    sides = [("predicted", planned)] if planned else []
    rows = tuple(_stack(name, side, whole) for name, side in (*sides, ("measured", kinds)))
    step = None if plan.step is None else plan.step.seconds
    table = [_comparison_cells("step", step, seconds)]
    for kind in KINDS:
        if kinds[kind] or planned.get(kind):
            predicted = None if not planned or kind == BETWEEN else planned.get(kind, 0.0)
            unknown = kind == WAITING and not kinds[kind]
            table.append(_comparison_cells(kind, predicted, None if unknown else kinds[kind]))
    shown = tuple(kind for kind in KINDS if kinds[kind] or planned.get(kind))
    return Chart(rows, shown, _note(plan, measured, stage), ("", *HEADER), tuple(table))


HEADER = ("predicted", "measured", "of predicted")


def _busiest(measured: Measured) -> tuple[int, list[MeasuredRank]]:
    """Returns the stage that computes longest, which predictions are of, and its ranks."""
    stages: dict[int, list[MeasuredRank]] = {}
    for rank in measured.ranks:
        stages.setdefault(rank.stage, []).append(rank)

    def computed(stage: int) -> float:
        return fmean(sum(map(rank.kinds.get, COMPUTATION, [0.0] * 5)) for rank in stages[stage])

    stage = max(stages, key=computed)
    return stage, stages[stage]


def _predicted_seconds(plan: PlanData) -> dict[str, float]:
    """Predicted seconds by measured kind; empty without a prediction."""
    result: dict[str, float] = {}
    for part in () if plan.step is None else plan.step.parts:
        kind = EXPOSED if part.kind in COMMUNICATION else part.kind
        result[kind] = result.get(kind, 0.0) + part.seconds
    return result


def _stack(label: str, kinds: Mapping[str, float], whole: float) -> Stack:
    shown = {kind: kinds[kind] for kind in KINDS if kinds.get(kind)}
    return Stack(label, seconds_text(sum(kinds.values())), stacked(shown, whole, seconds_text))


def _comparison_cells(
    name: str, predicted: float | None, measured: float | None
) -> tuple[str, ...]:
    times = f"{measured / predicted:.2f}" if predicted and measured is not None else ""
    sides = ("" if side is None else seconds_text(side) for side in (predicted, measured))
    return (name, *sides, times)


def _note(plan: PlanData, measured: Measured, stage: int) -> str:
    whose = f"the ranks of stage {stage}" if plan.pipeline.stages > 1 else "all ranks"
    note = f"Mean of {whose} over {measured.steps} steps, which the profiler slows down. "
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
    """The collectives of one rank in a step, by stage, kind and axes."""
    several = plan.pipeline.stages > 1
    table = []
    for stage, planned in enumerate(measured.predicted):
        ranks = [rank for rank in measured.ranks if rank.stage == stage]
        for key, (first, second) in _paired_totals(planned, ranks).items():
            name = f"{key[0]} over {key[1]}" + (f", stage {stage}" if several else "")
            table.append((name, *_total_cells(first, second)))
    header = ("collective", "count", "measured", "bytes", "measured", "seconds", "measured")
    note = (
        "One rank in a step, predicted and measured. Predicted seconds include communication that"
    )
    note += " overlaps computation."
    if not table:
        return Chart(note="There are no collectives within a stage.")
    return Chart(note=note, header=header, table=tuple(table))


_Totals = tuple[CollectiveTotal | None, CollectiveTotal | None]


def _paired_totals(
    planned: tuple[CollectiveTotal, ...], ranks: list[MeasuredRank]
) -> dict[tuple[str, str], _Totals]:
    """Pairs predictions with the mean of the ranks' measurements, by kind and axes."""
    totals: dict[tuple[str, str], list[CollectiveTotal]] = {}
    for rank in ranks:
        for total in rank.collectives:
            totals.setdefault((total.kind, total.over), []).append(total)
    first = {(total.kind, total.over): total for total in planned}
    return {
        key: (first.get(key), _mean(totals[key], len(ranks)) if key in totals else None)
        for key in dict.fromkeys((*first, *totals))
    }


def _mean(totals: list[CollectiveTotal], ranks: int) -> CollectiveTotal:
    def mean(name: str) -> float:
        return sum(getattr(total, name) or 0.0 for total in totals) / ranks

    one = totals[0]
    return CollectiveTotal(one.kind, one.over, mean("count"), mean("bytes"), mean("seconds"))


def _total_cells(first: CollectiveTotal | None, second: CollectiveTotal | None) -> Iterator[str]:
    for each in ("count", "bytes", "seconds"):
        for side in (first, second):
            value = None if side is None else getattr(side, each)
            if value is None:
                yield ""
            elif each == "count":
                yield f"{value:,.4g}"
            else:
                yield binary(round(value)) if each == "bytes" else seconds_text(value)


def ranks_chart(plan: PlanData, measured: Measured) -> Chart:
    """Memory and step time of each rank; if there are many, of those that need most memory."""
    stages = {} if plan.known_memory is None else {s.stage: s for s in plan.known_memory.stages}
    ranks = sorted(measured.ranks, key=lambda rank: -rank.peak)[:MAX_RANKS]
    table = []
    for rank in sorted(ranks, key=lambda rank: rank.rank):
        planned = stages[rank.stage].peak if rank.stage in stages else None
        ratio = f"{rank.peak / planned:.2f}" if planned else ""
        size = "" if planned is None else binary(planned)
        sizes = (size, binary(rank.peak), ratio)
        sent = seconds_text(rank.kinds.get(EXPOSED, 0.0))
        table.append((f"rank {rank.rank}", *sizes, seconds_text(rank.seconds), sent))
    header = ("memory peak", *HEADER, "step", EXPOSED)
    omitted = len(measured.ranks) - len(ranks)
    note = f"{omitted} ranks that need less memory are not shown. " if omitted else ""
    note += (
        "Counted from the allocations of operators and the state between steps."
        if measured.device == "cpu"
        else "Peak of the device's allocator."
    )
    return Chart(note=note, header=header, table=tuple(table))
