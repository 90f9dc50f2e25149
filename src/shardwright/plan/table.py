"""A plan as text for people: the table that `print(plan)` shows."""

from __future__ import annotations

from collections.abc import Iterable
from io import StringIO

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

WIDTH = 140
"""Width in columns of `print(plan)`, and of `shardwright plan` when stdout is not a terminal."""


def plan_text(plan: PlanData, every: bool = False, width: int = WIDTH) -> str:
    """Table and summary as plain text."""
    console = Console(file=StringIO(), width=width, color_system=None)
    console.print(plan_table(plan, every))
    console.print(
        "\n".join(plan_summary(plan, every)), highlight=False, markup=False, soft_wrap=True
    )
    stream: StringIO = console.file  # type: ignore[assignment]
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines())


def plan_table(plan: PlanData, every: bool = False) -> Table:
    """Operator, shapes, cuts, strategy, redistributions and bytes; repeated blocks as one row.

    Args:
        every: also show operators that follow their neighbors without communication.
    """
    staged = plan.pipeline.stages > 1
    title = f"Plan for {devices_text(plan.mesh, plan.pipeline.stages)}"
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    for column in ("operator", "shapes", "cuts", "strategy", "redistribution: forward / backward"):
        table.add_column(column, overflow="fold")
    table.add_column("bytes", justify="right", no_wrap=True)
    if staged:
        table.add_column("stage", justify="right", no_wrap=True)
    for fold in fold_rows([row for row in plan.operators if every or is_notable(row)]):
        row = fold.row
        table.add_row(
            row.name,
            shapes_text(row),
            cuts_text(row) if row.rule is not None else "no rule: replicated",
            _strategy(fold),
            "\n".join(_redistributions(row)),
            binary(row.bytes) if row.bytes else "",
            *([fold.stages] if staged else []),
            style="bold" if row.main else None,
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


def plan_summary(plan: PlanData, every: bool = False) -> list[str]:
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


def speed(plan: PlanData, seconds: float) -> str:
    """`8,192 tokens/s`, or samples where their tokens are not known; empty if no batch is."""
    if plan.global_batch is None or not seconds:
        return ""
    if plan.sequence is None:
        return f"{plan.global_batch / seconds:,.0f} samples/s"
    return f"{plan.global_batch * plan.sequence / seconds:,.0f} tokens/s"


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


def unused_axes_text(plan: PlanData) -> Iterable[str]:
    """The axes that shard no operator: devices along them compute the same result."""
    unused = plan.unused_axes
    if unused:
        names = plan.mesh.named(unused)
        axes = f"axes {names} are" if len(unused) > 1 else f"axis {names} is"
        size, devices = plan.mesh.size(unused), plan.mesh.num_devices
        copies = f"{size} devices" if size == devices else f"groups of {size} devices"
        yield f"{axes} unused: {copies} compute the same result"
