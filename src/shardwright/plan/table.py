"""A plan as text for people: the table that `print(plan)` shows."""

from __future__ import annotations

from collections.abc import Iterable
from io import StringIO

from rich.console import Console
from rich.table import Table

from shardwright.cost.memory import binary
from shardwright.plan.data import PlanData
from shardwright.plan.repeated_rows import Fold, folded, folded_crossings, folded_names
from shardwright.plan.rows import (
    OperatorRow,
    cuts_text,
    is_notable,
    seconds_text,
    shape_text,
    strategy_text,
)

WIDTH = 140
"""Columns that `print(plan)` takes, and `shardwright plan` when it does not go to a terminal."""


def plan_text(plan: PlanData, every: bool = False, width: int = WIDTH) -> str:
    """Table and summary as plain text."""
    console = Console(file=StringIO(), width=width, color_system=None)
    console.print(plan_table(plan, every))
    console.print(
        "\n".join(plan_summary(plan, every)), highlight=False, markup=False, soft_wrap=True
    )
    written: StringIO = console.file  # type: ignore[assignment]
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines())


def plan_table(plan: PlanData, every: bool = False) -> Table:
    """Operator, shapes, cuts, strategy, conversions and bytes; equal blocks as one row.

    Args:
        every: show also the operators that follow their neighbors without talking.
    """
    sizes = "·".join(str(size) for size in plan.mesh.device_matrix) or "1"
    names = "".join(plan.mesh.alias_names)
    staged = plan.pipeline.stages > 1
    stages = f"{plan.pipeline.stages} stages x " if staged else ""
    title = f"Plan for {plan.devices} devices = {stages}{sizes}"
    title += f", axes {names}" if names else ""
    shown = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    for column in ("operator", "shapes", "cuts", "strategy", "conversions: forward / backward"):
        shown.add_column(column, overflow="fold")
    shown.add_column("bytes", justify="right", no_wrap=True)
    if staged:
        shown.add_column("stage", justify="right", no_wrap=True)
    for fold in folded([row for row in plan.operators if every or is_notable(row)]):
        row = fold.row
        shown.add_row(
            row.name,
            _shapes(row),
            cuts_text(row) if row.rule is not None else "no rule: whole",
            _strategy(fold),
            "\n".join(_conversions(row)),
            binary(row.bytes) if row.bytes else "",
            *([fold.stages] if staged else []),
            style="bold" if row.main else None,
        )
    return shown


def _shapes(row: OperatorRow) -> str:
    inputs = " ".join(shape_text(sizes) for _, sizes, _ in row.inputs)
    return f"{inputs} → {' '.join(map(shape_text, row.outputs))}"


def _strategy(fold: Fold) -> str:
    """In how many parts each input is cut, where it is; marked where the user said so, and where
    operators are computed again in the backward pass."""
    row = fold.row
    parts = strategy_text(row.strategy) if row.cuts or row.pinned else ""
    return " ".join(word for word in (parts, "pinned" if row.pinned else "", fold.again) if word)


def _conversions(row: OperatorRow) -> Iterable[str]:
    for conversion in row.conversions:
        words = [part for part in conversion.value.split(".") if not part.isdigit()]
        short = ".".join(words[-2:]) or "inside"
        mark = " (shared)" if conversion.shared else ""
        yield f"{short}: {', then '.join(conversion.steps)}{mark}"


def plan_summary(plan: PlanData, every: bool = False) -> list[str]:
    """The lines below the table."""
    options = ", ".join(f"{key}={value}" for key, value in plan.options.items())
    lines = [
        f"{plan.mode}({options}); captured in {plan.capture_seconds:.2f} s, "
        f"searched in {plan.search_seconds * 1e3:.1f} ms",
        f"each device sends {binary(plan.forward_bytes)} forward and {binary(plan.backward_bytes)} "
        f"backward a step, and keeps {binary(plan.parameter_bytes)} of parameters",
    ]
    for part in (_batch, _stages, _seconds, _again, _needs, _idle):
        lines += part(plan)
    silent = sum(not is_notable(row) for row in plan.operators)
    if silent and not every:
        lines.append(
            f"{silent} more operators follow their neighbors and send nothing: "
            "plan.text(every=True), --every"
        )
    if plan.without_rule:
        lines.append(
            "without a sharding rule, computed whole on every device: "
            + ", ".join(folded_names(plan.without_rule))
        )
    return lines


def _batch(plan: PlanData) -> Iterable[str]:
    """The global batch, and the pieces in which it is computed."""
    samples, pieces = plan.global_batch, plan.pipeline.micro_batches
    if samples is None:
        return
    line = f"global batch of {samples:,} samples"
    if plan.sequence is not None:
        line = f"global batch of {samples:,} sequences of {plan.sequence:,} tokens"
    if pieces > 1:
        line += (
            f", in {pieces:,} micro-batches of {samples // pieces:,}; shapes and conversions are"
            " those of one micro-batch"
        )
    yield line


def _stages(plan: PlanData) -> Iterable[str]:
    """Stages, their schedule, and what goes from stage to stage."""
    pipeline = plan.pipeline
    if pipeline.stages > 1:
        chunks = f", {pipeline.chunks} chunks a stage" if pipeline.chunks > 1 else ""
        yield (
            f"{pipeline.stages} stages of {plan.mesh.num_devices} devices{chunks}, in the order"
            f" {pipeline.schedule}"
        )
    for crossing in folded_crossings(plan.crossings):
        yield (
            f"{crossing.way}: {', '.join(crossing.values)};"
            f" {binary(crossing.forward_bytes)} there and {binary(crossing.backward_bytes)} back a"
            " micro-batch"
        )


def _seconds(plan: PlanData) -> Iterable[str]:
    """What a step takes, where a cluster was named."""
    step = plan.step
    if step is not None:
        bubble = f", {step.bubble:.1%} of the stages' time in bubbles" if step.bubble else ""
        takes = seconds_text(step.seconds)
        yield (
            f"a step takes {takes} on {step.cluster}{_speed(plan, step.seconds)}:"
            f" computation {seconds_text(step.computation)}, communication that it waits for"
            f" {seconds_text(step.communication)}{bubble}"
        )


def _speed(plan: PlanData, seconds: float) -> str:
    if plan.global_batch is None:
        return ""
    if plan.sequence is None:
        return f", {plan.global_batch / seconds:,.0f} samples a second"
    return f", {plan.global_batch * plan.sequence / seconds:,.0f} tokens a second"


def _needs(plan: PlanData) -> Iterable[str]:
    """How much memory a device of the stage that needs most needs, and what of it is for what; how
    much the others. Only where the plan has its graph to find it out."""
    if plan.graph is None or not plan.training:
        return
    stages = sorted(plan.memory.stages, key=lambda stage: stage.peak)
    most, others = stages[-1], stages[:-1]
    sizes = ((getattr(most, name), name) for name in most.NAMES)
    parts = ", ".join(
        f"{name} {binary(number)}" for number, name in sorted(sizes, reverse=True) if number
    )
    who = f"each device of stage {most.stage}" if others else "each device"
    yield (
        f"{who} needs {binary(most.peak)} at most in a training step with"
        f" {plan.memory.optimizer}{_limit(plan)}: {parts}"
    )
    if not others:
        return
    if len(others) > 1:
        ends = (f"{binary(each.peak)} (stage {each.stage})" for each in (others[0], others[-1]))
        yield f"the others need {' to '.join(ends)}"
    else:
        yield f"each of stage {others[0].stage} needs {binary(others[0].peak)}"
    if plan.step is None:
        bubbles = plan.timeline().bubble
        yield f"stages wait for {bubbles:.1%} of the time, if operations say how long parts take"


def _limit(plan: PlanData) -> str:
    """Against what a device has."""
    limit = plan.memory_limit
    if limit is None:
        return ""
    if plan.memory.peak > limit:
        return f", more than the {binary(limit)} that it has"
    return f", of {binary(limit)} that it has"


def _again(plan: PlanData) -> Iterable[str]:
    """How much is computed again in the backward pass."""
    rows = [row for row in plan.operators if row.segment]
    if rows:
        segments = len({row.segment for row in rows})
        yield (
            f"{len(rows)} operators in {segments} segment{'s' if segments > 1 else ''} are computed"
            " again in the backward pass"
        )


def _idle(plan: PlanData) -> list[str]:
    """Names the axes that cut no operator: the devices along them all do the same work."""
    used = {axis for factors in plan.cuts.values() for axes in factors.values() for axis in axes}
    idle = tuple(axis for axis in range(len(plan.mesh.device_matrix)) if axis not in used)
    if not idle:
        return []
    names = "".join(plan.mesh.alias_names[axis] for axis in idle)
    return [
        f"nothing is cut over {names}: groups of {plan.mesh.size(idle)} devices do the same work"
    ]
