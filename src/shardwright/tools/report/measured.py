"""What was measured of a plan beside what it predicted."""

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

MOST_RANKS = 16


def kinds_chart(plan: PlanData, measured: Measured) -> Chart:
    """A step by kind of work, as predicted and as measured."""
    stage, ranks = _busiest(measured)
    seconds = fmean(rank.seconds for rank in ranks)
    kinds = {kind: fmean(rank.kinds.get(kind, 0.0) for rank in ranks) for kind in KINDS}
    kinds[BETWEEN] = max(0.0, seconds - sum(kinds.values()))
    planned = _planned(plan)
    whole = max(seconds, sum(planned.values())) or 1.0
    sides = [("predicted", planned)] if planned else []
    rows = tuple(_stack(name, side, whole) for name, side in (*sides, ("measured", kinds)))
    step = None if plan.step is None else plan.step.seconds
    table = [_compared("step", step, seconds)]
    for kind in KINDS:
        if kinds[kind] or planned.get(kind):
            predicted = None if not planned or kind == BETWEEN else planned.get(kind, 0.0)
            unknown = kind == WAITING and not kinds[kind]
            table.append(_compared(kind, predicted, None if unknown else kinds[kind]))
    shown = tuple(kind for kind in KINDS if kinds[kind] or planned.get(kind))
    return Chart(rows, shown, _note(plan, measured, stage), ("", *HEADER), tuple(table))


HEADER = ("predicted", "measured", "of predicted")


def _busiest(measured: Measured) -> tuple[int, list[MeasuredRank]]:
    """The ranks of the stage that computes longest, of which a prediction is."""
    stages: dict[int, list[MeasuredRank]] = {}
    for rank in measured.ranks:
        stages.setdefault(rank.stage, []).append(rank)

    def computed(stage: int) -> float:
        return fmean(sum(map(rank.kinds.get, COMPUTATION, [0.0] * 5)) for rank in stages[stage])

    stage = max(stages, key=computed)
    return stage, stages[stage]


def _planned(plan: PlanData) -> dict[str, float]:
    """Seconds by the kinds that are measured; none if they were not predicted."""
    result: dict[str, float] = {}
    for part in () if plan.step is None else plan.step.parts:
        kind = EXPOSED if part.kind in COMMUNICATION else part.kind
        result[kind] = result.get(kind, 0.0) + part.seconds
    return result


def _stack(label: str, kinds: Mapping[str, float], whole: float) -> Stack:
    shown = {kind: kinds[kind] for kind in KINDS if kinds.get(kind)}
    return Stack(label, seconds_text(sum(kinds.values())), stacked(shown, whole, seconds_text))


def _compared(name: str, predicted: float | None, measured: float | None) -> tuple[str, ...]:
    times = f"{measured / predicted:.2f}" if predicted and measured is not None else ""
    sides = ("" if side is None else seconds_text(side) for side in (predicted, measured))
    return (name, *sides, times)


def _note(plan: PlanData, measured: Measured, stage: int) -> str:
    whose = f"the ranks of stage {stage}" if plan.pipeline.stages > 1 else "all ranks"
    note = f"Mean of {whose} over {measured.steps} steps, which the profiler itself makes longer. "
    if measured.device == "cpu":
        note += "Communication is what a rank sends and waits, between operators is Python."
    else:
        note += (
            "Seconds are those of kernels; communication is what has none beside it, between"
            " operators what has no kernel at all, bubbles among it."
        )
    if plan.step is None:
        note += " Seconds are predicted for plans that are made for a cluster."
    return note


def collectives_chart(plan: PlanData, measured: Measured) -> Chart:
    """The collectives of each stage by kind and axes, in a step of one rank."""
    several = plan.pipeline.stages > 1
    table = []
    for stage, planned in enumerate(measured.predicted):
        ranks = [rank for rank in measured.ranks if rank.stage == stage]
        for key, (first, second) in _matched(planned, ranks).items():
            name = f"{key[0]} over {key[1]}" + (f", stage {stage}" if several else "")
            table.append((name, *_pair(first, second)))
    header = ("collective", "how many", "measured", "bytes", "measured", "seconds", "measured")
    note = "Of one rank in a step, each as predicted and as measured"
    note += ": predicted seconds are those of all of them, beside computation or not."
    if not table:
        return Chart(note="Nothing is sent within a stage.")
    return Chart(note=note, header=header, table=tuple(table))


_Sides = tuple[CollectiveTotal | None, CollectiveTotal | None]


def _matched(
    planned: tuple[CollectiveTotal, ...], ranks: list[MeasuredRank]
) -> dict[tuple[str, str], _Sides]:
    """What was planned, and the mean of what the ranks measured, by kind and axes."""
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


def _pair(first: CollectiveTotal | None, second: CollectiveTotal | None) -> Iterator[str]:
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
    """The memory of each rank, and how long its step takes; of many ranks those that need most."""
    stages = {} if plan.known_memory is None else {s.stage: s for s in plan.known_memory.stages}
    ranks = sorted(measured.ranks, key=lambda rank: -rank.peak)[:MOST_RANKS]
    table = []
    for rank in sorted(ranks, key=lambda rank: rank.rank):
        planned = stages[rank.stage].peak if rank.stage in stages else None
        ratio = f"{rank.peak / planned:.2f}" if planned else ""
        size = "" if planned is None else binary(planned)
        sizes = (size, binary(rank.peak), ratio)
        sent = seconds_text(rank.kinds.get(EXPOSED, 0.0))
        table.append((f"rank {rank.rank}", *sizes, seconds_text(rank.seconds), sent))
    header = ("memory peak", *HEADER, "step", EXPOSED)
    left = len(measured.ranks) - len(ranks)
    note = f"{left} ranks that need less memory are not shown. " if left else ""
    note += (
        "What operators allocated and freed, and what is kept between steps."
        if measured.device == "cpu"
        else "What the allocator of the device gave out at most."
    )
    return Chart(note=note, header=header, table=tuple(table))
