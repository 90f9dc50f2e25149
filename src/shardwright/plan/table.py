"""A plan as text for people: the summary that `print(plan)` shows, or a table of operators."""

from __future__ import annotations

from collections.abc import Iterable
from io import StringIO

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from shardwright.cost.memory import binary
from shardwright.plan.data import PlanData
from shardwright.plan.repeated_rows import Fold, fold_crossings, fold_names, fold_rows
from shardwright.plan.rows import (
    OperatorRow,
    cuts_text,
    devices_text,
    is_notable,
    seconds_text,
    shapes_text,
    strategy_text,
)
from shardwright.plan.summary import plan_summary, speed, unused_axes_text
from shardwright.plan.text_columns import at_dots, text_width, wrapped


def plan_text(
    plan: PlanData, full: bool = False, every: bool = False, width: int | None = None
) -> str:
    """The summary, or the full table and the lines below it.

    Args:
        every: the full table, with operators that follow their neighbors without communication.
        width: columns; by default those of the terminal.
    """
    width = text_width() if width is None else width
    if not full and not every:
        return plan_summary(plan, width)
    console = Console(file=StringIO(), width=width, color_system=None)
    console.print(plan_table(plan, every, width))
    stream: StringIO = console.file  # type: ignore[assignment]
    lines = [line.rstrip() for line in stream.getvalue().splitlines()]
    lines += [part for line in table_notes(plan, every) for part in wrapped(line, width)]
    return "\n".join(lines)


def plan_table(plan: PlanData, every: bool, width: int) -> Table:
    """Operator with shapes, cuts with strategy, redistributions and bytes; repeated blocks as one
    row.

    Args:
        every: also show operators that follow their neighbors without communication.
    """
    staged = plan.pipeline.stages > 1
    title = f"Plan for {devices_text(plan.mesh, plan.pipeline.stages)}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    room = width - 13 - (7 if staged else 0)
    columns = {"operator: shapes": 38, "cuts: strategy": 22, "redistribution: forward/backward": 40}
    names, cuts, sent = (room * share // 100 - 1 for share in columns.values())
    for column, size in zip(columns, (names, cuts, sent), strict=True):
        table.add_column(column, overflow="fold", width=size)
    table.add_column("bytes", justify="right", no_wrap=True)
    if staged:
        table.add_column("stage", justify="right", no_wrap=True)
    for fold in fold_rows([row for row in plan.operators if every or is_notable(row)]):
        row = fold.row
        own = cuts_text(row) if row.rule is not None else "no rule: replicated"
        table.add_row(
            "\n".join((*at_dots(row.name, names), shapes_text(row))),
            "\n".join(filter(None, (own, _strategy(fold)))),
            "\n".join(line for each in _redistributions(row) for line in at_dots(each, sent)),
            binary(row.bytes) if row.bytes else "",
            *([fold.stages] if staged else []),
        )
    return table


def _strategy(fold: Fold) -> str:
    """The number of shards of each input, if it is sharded; with marks for pinned and for
    recomputed operators."""
    row = fold.row
    strategy = strategy_text(row.strategy) if row.cuts or row.pinned else ""
    pinned = "pinned" if row.pinned else ""
    return " ".join(word for word in (strategy, pinned, fold.recomputed) if word)


def _redistributions(row: OperatorRow) -> Iterable[str]:
    for redistribution in row.redistributions:
        words = [word for word in redistribution.value.split(".") if not word.isdigit()]
        short = ".".join(words[-2:]) or "inside"
        mark = " (shared)" if redistribution.shared else ""
        yield f"{short}: {', then '.join(redistribution.steps)}{mark}"


def table_notes(plan: PlanData, every: bool = False) -> list[str]:
    """The lines below the table."""
    lines = [
        f"{plan.mode}({plan.options_text}); captured in {plan.capture_seconds:.2f} s, "
        f"searched in {plan.search_seconds * 1e3:.1f} ms",
        f"each device sends {binary(plan.forward_bytes)} forward and {binary(plan.backward_bytes)} "
        f"backward per step, and stores {binary(plan.parameter_bytes)} of parameters",
    ]
    for section in (_batch, _stages, _step_time, _recomputed, _memory, unused_axes_text):
        lines += section(plan)
    hidden = sum(not is_notable(row) for row in plan.operators)
    if hidden and not every:
        lines.append(
            f"{hidden} more operators follow their neighbors without communication: "
            "shown with plan.text(every=True), --every"
        )
    if plan.without_rule:
        lines.append(
            "no sharding rule, so every device computes them in full: "
            + ", ".join(fold_names(plan.without_rule))
        )
    return lines


def _batch(plan: PlanData) -> Iterable[str]:
    """The global batch and its micro-batches."""
    samples, micro_batches = plan.global_batch, plan.pipeline.micro_batches
    if samples is None:
        return
    line = f"global batch of {samples:,} samples"
    if plan.sequence is not None:
        line = f"global batch of {samples:,} sequences of {plan.sequence:,} tokens"
    if micro_batches > 1:
        line += (
            f", in {micro_batches:,} micro-batches of {samples // micro_batches:,}; shapes and"
            " redistributions are per micro-batch"
        )
    yield line


def _stages(plan: PlanData) -> Iterable[str]:
    """Stages, their schedule, and what they send to each other."""
    pipeline = plan.pipeline
    if pipeline.stages > 1:
        chunks = f", {pipeline.chunks} chunks per stage" if pipeline.chunks > 1 else ""
        yield (
            f"{pipeline.stages} stages of {plan.mesh.num_devices} devices{chunks},"
            f" schedule {pipeline.schedule}"
        )
    for crossing in fold_crossings(plan.crossings):
        yield (
            f"{crossing.stages}: {', '.join(crossing.values)};"
            f" {binary(crossing.forward_bytes)} forward, {binary(crossing.backward_bytes)} backward"
            " per micro-batch"
        )


def _step_time(plan: PlanData) -> Iterable[str]:
    """The predicted time of a step, if a cluster was named."""
    step = plan.step
    if step is not None:
        bubble = f", pipeline bubbles {step.bubble:.1%}" if step.bubble else ""
        words = filter(None, (seconds_text(step.seconds), speed(plan, step.seconds)))
        computed, waited = seconds_text(step.computation), seconds_text(step.communication)
        yield (
            f"step time on {step.cluster}: {', '.join(words)}; computation {computed},"
            f" exposed communication {waited}{bubble}"
        )


def _memory(plan: PlanData) -> Iterable[str]:
    """The peak memory of a device of the stage that needs most, by purpose, and the peaks of the
    other stages."""
    memory = plan.known_memory
    if memory is None:
        return
    stages = sorted(memory.stages, key=lambda stage: stage.peak)
    most, others = stages[-1], stages[:-1]
    sizes = ((getattr(most, name), name) for name in most.NAMES)
    purposes = ", ".join(
        f"{name} {binary(number)}" for number, name in sorted(sizes, reverse=True) if number
    )
    place = f" (stage {most.stage})" if others else ""
    yield (
        f"peak memory per device{place}, training with {memory.optimizer}:"
        f" {binary(most.peak)}{_limit(memory.peak, plan.memory_limit)}; {purposes}"
    )
    if not others:
        return
    ends = others if len(others) == 1 else (others[0], others[-1])
    peaks = " to ".join(f"{binary(stage.peak)} (stage {stage.stage})" for stage in ends)
    yield f"peak memory of the other stage{'s' if len(others) > 1 else ''}: {peaks}"
    if plan.step is None and plan.graph is not None:
        yield f"pipeline bubbles: {plan.timeline().bubble:.1%}, estimated from FLOPs alone"


def _limit(peak: int, limit: int | None) -> str:
    """The memory of a device, if it is known."""
    if limit is None:
        return ""
    if peak > limit:
        return f", over the limit of {binary(limit)}"
    return f" of {binary(limit)}"


def _recomputed(plan: PlanData) -> Iterable[str]:
    """How many operators are recomputed in the backward pass."""
    rows = [row for row in plan.operators if row.segment]
    if rows:
        segments = len({row.segment for row in rows})
        yield (
            f"{len(rows)} operators in {segments} segment{'s' if segments > 1 else ''} are"
            " recomputed in the backward pass"
        )
