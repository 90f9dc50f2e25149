"""Predictions against published measurements

Training runs that others measured and published (`benchmarks/published_throughput.json`; `--rows
FILE` takes others of the same form, and leaves their picture beside the file), each planned at full
size as its expert ran it, or as a configuration of MindFormers says: data, tensor and pipeline
parallel, sharding, micro-batches, recomputation. None needs a device. *Ratio*: predicted over
measured seconds of a step. *Utilization*: the share of the device's peak that the model's
operations need, measured and predicted. *ρ*: Spearman's correlation of predicted and measured: 1 if
they are in the same order. *GiB*: the peak of a device that was reserved, and 108% of what is
predicted to be allocated; the share was chosen with the one row that has memory, which is therefore
no test of it. The figures of a cluster are fitted to all of its runs together, to none by itself:
to these very rows, so that only `--rows` with others tests them. Several sets of figures predict
these rows as well, and `shardwright calibrate --from` may find another. Goals: a median error of at
most 8%, no error above 30%, ρ of utilization of at least 0.7 on each hardware with 10 rows or more,
and memory within 10% where it is published.

![Predicted against measured throughput](published.svg)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.page import PAGE, ROOT
from benchmarks.scatter import scatter
from benchmarks.size import Size
from benchmarks.table import Table
from shardwright.tools.compare.measured import spearman
from shardwright.tools.compare.published import MeasuredRun, PlannedMeasurement
from shardwright.tools.compare.published_config import planned_runs

ROWS = ROOT / "benchmarks" / "published_throughput.json"
PICTURE = PAGE.with_name("published.svg")

MEDIAN, LARGEST, ORDER, MEMORY = 0.08, 0.3, 0.7, 0.1
ENOUGH = 10
"""Rows of a hardware of which the order is a goal."""

GIB = 2**30
RESERVED = 1.08
"""What PyTorch's allocator reserves, and others publish, over what is allocated and predicted."""


@dataclass(frozen=True)
class Prediction:
    """What was measured, and what is predicted: seconds of a step, utilization, bytes."""

    run: MeasuredRun
    seconds: float
    measured_utilization: float
    utilization: float
    memory: int | None

    @property
    def ratio(self) -> float:
        return self.seconds / self.run.seconds

    @property
    def error(self) -> float:
        return abs(self.ratio - 1)

    @property
    def throughput(self) -> float:
        """Tokens per second and device."""
        return self.run.tokens_per_second_per_device / self.ratio

    @property
    def source(self) -> str:
        """The publication, without the place in it."""
        return self.run.source.partition(" ")[0].partition("@")[0].rstrip(",:;")


def run(size: Size = Size.DEFAULT, rows: Path = ROWS) -> list[Table]:
    """Of the published runs one in five at the default size; all of the runs of another file."""
    planned, left_out = planned_runs(rows)
    if rows == ROWS:
        planned = planned[:: size.of(5, full=1)]
    # All rows are checked before any is planned; a plan is dropped as soon as it is priced.
    predictions = [predicted(copy(each)) for each in planned]
    if rows != ROWS or size is Size.FULL:
        draw(predictions, PICTURE if rows == ROWS else rows.with_suffix(".svg"))
    return [summary(predictions), each_row(predictions), *unread(left_out)]


def draw(predictions: list[Prediction], picture: Path) -> None:
    """Writes predicted against measured throughput, a color for each hardware."""
    kinds = sorted({each.run.hardware for each in predictions})
    points = {
        kind: [
            (each.run.id, each.run.tokens_per_second_per_device, each.throughput)
            for each in predictions
            if each.run.hardware == kind
        ]
        for kind in kinds
    }
    try:
        picture.write_text(scatter("Tokens per second and device", points), encoding="utf-8")
    except OSError as error:  # The numbers took minutes; they are worth more than their picture.
        print(f"no picture: {picture}: {error.strerror}", file=sys.stderr)


def predicted(planned: PlannedMeasurement) -> Prediction:
    """Plans a run; only its numbers are kept."""
    run, seconds = planned.run, planned.seconds()
    return Prediction(
        run,
        seconds,
        run.utilization(planned.cluster, run.seconds),
        run.utilization(planned.cluster, seconds),
        None if run.memory_gib is None else int(RESERVED * planned.memory),
    )


def summary(predictions: list[Prediction]) -> Table:
    """By hardware and by source, with the goals."""
    table = Table(
        "Errors and order",
        ("rows of", "rows", "median error", "largest", "ρ throughput", "ρ utilization", "goals"),
    )
    groups: list[tuple[str, Callable[[Prediction], bool], bool]] = [("all", lambda _: True, False)]
    for kind in sorted({each.run.hardware for each in predictions}):
        groups.append((kind, lambda each, kind=kind: each.run.hardware == kind, True))  # type: ignore[misc]
    for source in sorted({each.source for each in predictions}):
        groups.append((source, lambda each, source=source: each.source == source, False))  # type: ignore[misc]
    for name, belongs, orders in groups:
        group = [each for each in predictions if belongs(each)]
        missed = list(misses(name, group, orders)) if orders or name == "all" else []
        table.missed += missed
        goals = "–" if not (orders or name == "all") else "missed" if missed else "held"
        table.add(
            *(name, len(group), f"{_median(group):.1%}"),
            f"{max(each.error for each in group):.1%}",
            f"{throughput_order(group):.2f}",
            f"{utilization_order(group):.2f}",
            goals,
        )
    return table


def misses(name: str, group: list[Prediction], orders: bool) -> Iterable[str]:
    """The goals that a group misses, a sentence each."""
    if _median(group) > MEDIAN:
        yield f"{name}: a median error of {_median(group):.1%}, above {MEDIAN:.0%}"
    if orders and len(group) >= ENOUGH and not utilization_order(group) >= ORDER:
        yield f"{name}: ρ of utilization {utilization_order(group):.2f}, below {ORDER}"
    if orders:
        return
    for each in group:
        if each.error > LARGEST:
            yield f"{each.run.id}: {each.error:.0%} off, above {LARGEST:.0%}"
        if each.memory is not None and each.run.memory_gib is not None:
            error = abs(each.memory / GIB / each.run.memory_gib - 1)
            if error > MEMORY:
                yield f"{each.run.id}: memory {error:.0%} off, above {MEMORY:.0%}"


def throughput_order(group: list[Prediction]) -> float:
    return spearman(
        [each.throughput for each in group],
        [each.run.tokens_per_second_per_device for each in group],
    )


def utilization_order(group: list[Prediction]) -> float:
    return spearman(
        [each.utilization for each in group], [each.measured_utilization for each in group]
    )


def each_row(predictions: list[Prediction]) -> Table:
    """A row for each run."""
    table = Table(
        "Tokens per second and device",
        ("run", "hardware", "devices", "measured", "predicted", "ratio", "utilization", "GiB"),
    )
    for each in predictions:
        memory = "–"
        if each.memory is not None:
            memory = f"{each.run.memory_gib:.1f} → {each.memory / GIB:.1f}"
        table.add(
            *(each.run.id, each.run.hardware, each.run.devices),
            *(f"{each.run.tokens_per_second_per_device:,.0f}", f"{each.throughput:,.0f}"),
            f"{each.ratio:.3f}",
            f"{each.measured_utilization:.1%} → {each.utilization:.1%}",
            memory,
        )
    return table


def unread(left_out: dict[str, str]) -> Iterable[Table]:
    """The runs that cannot be read, if there are any."""
    if left_out:
        table = Table("Left out", ("run", "why"))
        for name, why in left_out.items():
            table.add(name, why)
        yield table


def _median(group: list[Prediction]) -> float:
    return median(each.error for each in group)
