"""Predictions against published measurements

Training runs that others measured and published, each planned at full size as its expert ran it, or
as a configuration of MindFormers says. None needs a device. Each row names its kernel and its
framework, and is predicted on the variant of its cluster that has them. Two tables: sources to
whose rows the figures of clusters are fitted (`benchmarks/published_throughput.json`), which test
nothing but the fit, and sources to which no figure is (`benchmarks/published_other_sources.json`).
`--rows FILE` takes others of the same form, and leaves their picture beside the file. *Ratio*:
predicted over measured seconds of a step. *Utilization*: the share of the device's peak that the
model's operations need, measured and predicted. *ρ*: Spearman's correlation of the two: 1 if they
are in the same order. *Loss*: in sweeps of layouts of one model, what the layout predicted fastest
was measured slower than the fastest, in the median of sweeps and at most. *Refused*: runs that the
planner would refuse, as more than the memory of the device is predicted to be allocated. *GiB*:
the peak of a device that was reserved, and 108% of what is predicted to be allocated. Goals for
each source: a median error of at most 8%, no error above 30%, ρ of at least 0.7 with 10 rows or
more, a loss of at most 3% in the median and 8% at most, nothing refused, and memory within 10%
where it is published.

![Predicted against measured throughput](published.svg)
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from copy import copy
from dataclasses import dataclass
from math import log2
from pathlib import Path
from statistics import median

from benchmarks.page import PAGE, ROOT
from benchmarks.scatter import scatter
from benchmarks.size import Size
from benchmarks.table import Table
from shardwright.errors import ConfigError, ShardwrightError, one_line
from shardwright.tools.compare.measured import spearman
from shardwright.tools.compare.measured_run import MeasuredRun
from shardwright.tools.compare.published import PlannedMeasurement
from shardwright.tools.compare.published_config import planned_runs
from shardwright.tools.compare.published_rows import PublishedRun

FITTED = ROOT / "benchmarks" / "published_throughput.json"
NEVER_FITTED = ROOT / "benchmarks" / "published_other_sources.json"
PICTURE = PAGE.with_name("published.svg")

MEDIAN, LARGEST, ORDER, MEMORY = 0.08, 0.3, 0.7, 0.1
MEDIAN_LOSS, LARGEST_LOSS = 0.03, 0.08
ENOUGH, SWEEP = 10, 4
"""Rows of a source of which the order is a goal, and of a sweep."""

GIB = 2**30
RESERVED = 1.08
"""What PyTorch's allocator reserves, and others publish, over what is allocated and predicted."""


@dataclass(frozen=True)
class Prediction:
    """What was measured, and what is predicted: seconds of a step, utilization, reserved bytes."""

    run: MeasuredRun
    seconds: float
    measured_utilization: float
    utilization: float
    memory: int
    device_memory: int

    @property
    def is_refused(self) -> bool:
        """Whether a plan of the run would exceed the memory of a device."""
        return self.allocated > self.device_memory

    @property
    def allocated(self) -> int:
        """Predicted bytes without what the allocator reserves, which the planner compares."""
        return int(self.memory / RESERVED)

    @property
    def measured(self) -> float:
        """Measured tokens per second and device."""
        return self.run.tokens_per_second_per_device

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
        """The publication, without the place in it: an arXiv id, or owner and repository."""
        name = self.run.source.removeprefix("https://github.com/").partition(" ")[0]
        return "/".join(name.partition("@")[0].split("/")[:2]).rstrip(",:;")


def run(size: Size = Size.DEFAULT, rows: Path | None = None) -> list[Table]:
    """Some of the rows at the default size; all rows of another file."""
    if rows is not None:
        predictions, left_out = _predict(rows, 1)
        draw(predictions, rows.with_suffix(".svg"))
        return [by_source(predictions, "By source"), each_row(predictions), *unread(left_out)]
    fitted, left_out = _predict(FITTED, size.of(5, full=1))
    unseen, unseen_left_out = _predict(NEVER_FITTED, size.of(12, full=1))
    if size is Size.FULL:
        draw([*fitted, *unseen], PICTURE)
    return [
        by_source(fitted, "Fitted: sources to whose rows the figures are fitted"),
        by_source(unseen, "Never fitted: sources to which no figure is fitted"),
        each_row([*fitted, *unseen]),
        *unread(left_out | unseen_left_out),
    ]


def _predict(rows: Path, every: int) -> tuple[list[Prediction], dict[str, str]]:
    """Predictions for one in `every` rows of a file, and the rows that cannot be read."""
    planned, left_out = planned_runs(rows, skips_invalid=True)
    predictions = []
    for each in planned[::every]:
        try:
            # A copy, so that its plan is dropped as soon as it is priced.
            predictions.append(predicted(copy(each)))
        except ShardwrightError as error:
            left_out[each.run.id] = one_line(error)
    if not predictions:
        raise ConfigError("; ".join(left_out.values()))
    return predictions, left_out


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
        int(RESERVED * planned.memory),
        planned.cluster.device.memory,
    )


def by_source(predictions: list[Prediction], title: str) -> Table:
    """Errors, order and losses of each source, with the goals."""
    table = Table(
        title,
        ("source", "rows", "median error", "largest", "ρ utilization", "loss", "refused", "goals"),
    )
    for source in sorted({each.source for each in predictions}):
        group = [each for each in predictions if each.source == source]
        missed = list(misses(source, group))
        table.missed += missed
        losses = sweep_losses(group)
        loss = f"{median(losses):.1%}, at most {max(losses):.1%}" if losses else "–"
        table.add(
            *(source, len(group), f"{_median(group):.1%}"),
            f"{max(each.error for each in group):.1%}",
            f"{utilization_order(group):.2f}" if len(group) >= ENOUGH else "–",
            *(loss, sum(each.is_refused for each in group)),
            "missed" if missed else "held",
        )
    return table


def misses(name: str, group: list[Prediction]) -> Iterable[str]:
    """The goals that the rows of a source miss, a sentence each."""
    if _median(group) > MEDIAN:
        yield f"{name}: a median error of {_median(group):.1%}, above {MEDIAN:.0%}"
    if len(group) >= ENOUGH and not utilization_order(group) >= ORDER:
        yield f"{name}: ρ of utilization {utilization_order(group):.2f}, below {ORDER}"
    losses = sweep_losses(group)
    if losses and (median(losses) > MEDIAN_LOSS or max(losses) > LARGEST_LOSS):
        yield (
            f"{name}: the layout predicted fastest loses {median(losses):.1%} in the median and"
            f" {max(losses):.1%} at most, above {MEDIAN_LOSS:.0%} and {LARGEST_LOSS:.0%}"
        )
    for each in group:
        if each.error > LARGEST:
            yield f"{each.run.id}: {each.error:.0%} off, above {LARGEST:.0%}"
        if each.is_refused:
            yield f"{each.run.id}: ran, but needs {each.allocated / GIB:.1f} GiB as predicted"
        if each.run.memory_gib is not None:
            error = abs(each.memory / GIB / each.run.memory_gib - 1)
            if error > MEMORY:
                yield f"{each.run.id}: memory {error:.0%} off, above {MEMORY:.0%}"


def sweep_losses(group: list[Prediction]) -> list[float]:
    """What the layout predicted fastest loses against the measured best, for each sweep: rows of a
    source with one model, batch, number of devices and software."""
    sweeps: dict[object, list[Prediction]] = {}
    for each in group:
        if isinstance(each.run, PublishedRun):
            sweeps.setdefault(_sweep_of(each.run), []).append(each)
    return [
        1 - max(sweep, key=lambda each: each.throughput).measured / max(e.measured for e in sweep)
        for sweep in sweeps.values()
        if len(sweep) >= SWEEP
    ]


def _sweep_of(run: PublishedRun) -> object:
    # Batches that differ by a few per cent, as each layout divides its own, are one.
    batch = round(8 * log2(run.global_batch))
    software = run.kernel, run.attention, run.framework, run.dtype
    return run.hidden, run.layers, run.heads, run.seq, run.devices, batch, software


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
        published = "–" if each.run.memory_gib is None else f"{each.run.memory_gib:.1f}"
        memory = f"{published} → {each.memory / GIB:.1f}"
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
