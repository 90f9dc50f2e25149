"""A plan as text for people: the table that `print(plan)` shows, and the story of one operator."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from io import StringIO

from rich.console import Console
from rich.table import Table

from shardwright.plan.plan import Plan
from shardwright.plan.rows import ConversionRow, OperatorRow, Shape, Strategy

WIDTH = 140
"""Columns that `print(plan)` takes when it does not go to a terminal."""


def text(plan: Plan, every: bool = False, width: int = WIDTH) -> str:
    """Table and summary as plain text."""
    console = Console(file=StringIO(), width=width, color_system=None)
    console.print(table(plan, every))
    console.print("\n".join(summary(plan, every)), highlight=False, markup=False, soft_wrap=True)
    written: StringIO = console.file  # type: ignore[assignment]
    return "\n".join(line.rstrip() for line in written.getvalue().splitlines())


def table(plan: Plan, every: bool = False) -> Table:
    """Operator, shapes, cuts, strategy, conversions and bytes; equal blocks as one row.

    Args:
        every: show also the operators that follow their neighbours without talking.
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
    for row in folded(plan.operators):
        if not (every or _tells(row)):
            continue
        shown.add_row(
            row.name,
            _shapes(row),
            _cuts(row) if row.rule is not None else "no rule: whole",
            _strategy(row),
            "\n".join(_conversions(row)),
            size(row.bytes) if row.bytes else "",
            *([str(row.stage)] if staged else []),
            style="bold" if row.main else None,
        )
    return shown


def _tells(row: OperatorRow) -> bool:
    """Whether there is more to say of an operator than that it follows its neighbours."""
    return row.main or row.pinned or row.rule is None or row.bytes > 0


def summary(plan: Plan, every: bool = False) -> list[str]:
    """The lines below the table."""
    options = ", ".join(f"{key}={value}" for key, value in plan.options.items())
    lines = [
        f"{plan.mode}({options}); captured in {plan.capture_seconds:.2f} s, "
        f"searched in {plan.search_seconds * 1e3:.1f} ms",
        f"each device sends {size(plan.forward_bytes)} forward and {size(plan.backward_bytes)} "
        f"backward a step, and keeps {size(plan.parameter_bytes)} of parameters",
    ]
    lines += [*_pipeline(plan), *_seconds(plan), *_again(plan), *_needs(plan), *_idle(plan)]
    silent = sum(not _tells(row) for row in plan.operators)
    if silent and not every:
        lines.append(
            f"{silent} more operators follow their neighbours and send nothing: "
            "plan.text(every=True)"
        )
    if plan.without_rule:
        lines.append(
            "without a sharding rule, computed whole on every device: "
            + ", ".join(plan.without_rule)
        )
    return lines


def _pipeline(plan: Plan) -> Iterable[str]:
    """Stages, micro-batches, and what goes from stage to stage."""
    pipeline = plan.pipeline
    if pipeline.stages > 1:
        chunks = f", {pipeline.chunks} chunks a stage" if pipeline.chunks > 1 else ""
        yield (
            f"{pipeline.stages} stages of {plan.mesh.num_devices} devices{chunks},"
            f" {pipeline.micro_batches} micro-batches in the order {pipeline.schedule};"
            " shapes and conversions are those of one micro-batch"
        )
    elif pipeline.micro_batches > 1:
        yield (
            f"{pipeline.micro_batches} micro-batches; shapes and conversions are those of one of"
            " them"
        )
    for row in plan.crossings:
        yield (
            f"stage {row.stage} to {row.to_stage}: {', '.join(row.values)};"
            f" {size(row.forward_bytes)} there and {size(row.backward_bytes)} back a micro-batch"
        )


def _seconds(plan: Plan) -> Iterable[str]:
    """What a step takes, where a cluster was named."""
    step = plan.step
    if step is not None:
        bubble = f", {step.bubble:.1%} of the stages' time in bubbles" if step.bubble else ""
        yield (
            f"a step takes {seconds(step.seconds)} on {step.cluster}: computation"
            f" {seconds(step.computation)}, communication that it waits for"
            f" {seconds(step.communication)}{bubble}"
        )


def _needs(plan: Plan) -> Iterable[str]:
    """How much memory a device of each stage needs, where the plan has its graph to find it out."""
    if plan.graph is None or not plan.training:
        return
    several = len(plan.memory.stages) > 1
    for stage in plan.memory.stages:
        sizes = ((getattr(stage, name), name) for name in stage.NAMES)
        parts = ", ".join(
            f"{name} {size(number)}" for number, name in sorted(sizes, reverse=True) if number
        )
        who = f"each device of stage {stage.stage}" if several else "each device"
        yield (
            f"{who} needs {size(stage.peak)} at most in a training step with"
            f" {plan.memory.optimizer}: {parts}"
        )
    if several and plan.step is None:
        bubbles = plan.timeline().bubble
        yield f"stages wait for {bubbles:.1%} of the time, if operations say how long parts take"


def _again(plan: Plan) -> Iterable[str]:
    """How much is computed again in the backward pass."""
    rows = [row for row in plan.operators if row.segment]
    if rows:
        segments = len({row.segment for row in rows})
        yield (
            f"{len(rows)} operators in {segments} segment{'s' if segments > 1 else ''} are computed"
            " again in the backward pass"
        )


def _idle(plan: Plan) -> list[str]:
    """Names the axes that cut no operator: the devices along them all do the same work."""
    used = {axis for factors in plan.cuts.values() for axes in factors.values() for axis in axes}
    idle = tuple(axis for axis in range(len(plan.mesh.device_matrix)) if axis not in used)
    if not idle:
        return []
    names = "".join(plan.mesh.alias_names[axis] for axis in idle)
    return [
        f"nothing is cut over {names}: groups of {plan.mesh.size(idle)} devices do the same work"
    ]


def explanation(plan: Plan, row: OperatorRow) -> str:
    """Where one operator's inputs come from, how it is cut, and what that costs."""
    lines = [f"{row.name}: {row.operator}" + (f"  ({row.source})" if row.source else "")]
    lines.append(f"  rule: {row.rule or 'none, computed whole on every device'}")
    lines.append(f"  cuts: {_cuts(row) or 'nothing'}")
    kind = "a main operator, decided by its cost" if row.main else "decided by its neighbours"
    if row.pinned:
        kind = f"pinned as {plan.pins[row.name]}"
    lines.append(f"  {kind}")
    lines += [f"  {line}" for line in _recomputed(plan, row)]
    ways = {c.input: c for c in row.conversions if c.input is not None}
    for index, ((name, shape, origin), parts) in enumerate(
        zip(row.inputs, row.strategy, strict=True)
    ):
        cut = f"read in {'·'.join(map(str, parts))} parts" if max(parts, default=1) > 1 else "whole"
        lines.append(f"  input {name} {_shape(shape)} ({origin}): {cut}")
        if origin == "parameter" and name in plan.storage:
            kept = tuple(plan.mesh.size(axes) for axes in plan.storage[name])
            lines.append(f"    stored in {'·'.join(map(str, kept)) or '1'} parts")
        if index in ways:
            lines += [f"    {line}" for line in _conversion_lines(ways[index])]
    for conversion in row.conversions:
        if conversion.input is None:
            lines += [f"  {line}" for line in _conversion_lines(conversion)]
    lines.append(f"  output {', '.join(_shape(shape) for shape in row.outputs)}")
    return "\n".join(lines)


def _recomputed(plan: Plan, row: OperatorRow) -> Iterable[str]:
    """How the operator is computed again in the backward pass, if that was asked."""
    said = plan.recompute.get(row.name)
    if row.segment and said is not None:
        count = sum(other.segment == row.segment for other in plan.operators)
        others = f", with {count - 1} more operators" if count > 1 else ""
        conversions = "are made again too" if said.communication else "are kept"
        yield f"computed again in the backward pass in segment {row.segment}{others};"
        yield f"conversions inside {conversions}"
    elif said is not None:
        yield f"in segment {said.segment}, but computed once: nothing is kept of it"


def _conversion_lines(conversion: ConversionRow) -> Iterable[str]:
    yield from conversion.steps
    shared = ", the rest shared with an operator before" if conversion.shared else ""
    yield (
        f"sends {size(conversion.forward_bytes)} forward, "
        f"{size(conversion.backward_bytes)} backward{shared}"
    )


@dataclass(frozen=True)
class _Pattern:
    """A row with the numbers in its names taken out."""

    key: tuple[object, ...]
    numbers: tuple[int, ...]


def folded(rows: Sequence[OperatorRow]) -> list[OperatorRow]:
    """Rows that differ only in one number of their names become one: `layers.{0..79}.mlp.up`."""
    groups: dict[tuple[object, ...], list[tuple[OperatorRow, tuple[int, ...]]]] = {}
    for row in rows:
        pattern = _pattern(row)
        groups.setdefault(pattern.key, []).append((row, pattern.numbers))
    result = []
    for members in groups.values():
        numbers = [number for _, number in members]
        varying = [i for i in range(len(numbers[0])) if len({n[i] for n in numbers}) > 1]
        if len(members) == 1 or len(varying) != 1:
            result += [row for row, _ in members]
        else:
            result.append(_fold(members, varying[0]))
    return result


def _pattern(row: OperatorRow) -> _Pattern:
    parts = row.name.split(".")
    numbers = tuple(int(part) for part in parts if part.isdigit())
    name = ".".join("*" if part.isdigit() else part for part in parts)
    conversions = tuple(
        (re.sub(r"\d+", "*", c.value), c.steps, c.forward_bytes, c.backward_bytes)
        for c in row.conversions
    )
    shapes = tuple(shape for _, shape, _ in row.inputs)
    cuts = tuple(row.cuts.items())
    again = bool(row.segment)
    said = (row.pinned, again, row.stage)
    key = (name, row.operator, shapes, row.outputs, cuts, conversions, said)
    return _Pattern(key, numbers)


def _fold(members: Sequence[tuple[OperatorRow, tuple[int, ...]]], place: int) -> OperatorRow:
    row, _ = members[0]
    numbers = [number[place] for _, number in members]
    parts, digit = row.name.split("."), -1
    for index, part in enumerate(parts):
        digit += part.isdigit()
        if part.isdigit() and digit == place:
            parts[index] = f"{{{_ranges(numbers)}}}"
    return replace(row, name=".".join(parts))


def _ranges(numbers: Sequence[int]) -> str:
    """`0..3,5` for 0 1 2 3 5."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(str(a) if a == b else f"{a}..{b}" for a, b in found)


def _shapes(row: OperatorRow) -> str:
    inputs = " ".join(_shape(shape) for _, shape, _ in row.inputs)
    return f"{inputs} → {' '.join(_shape(shape) for shape in row.outputs)}"


def _shape(shape: Shape) -> str:
    return "×".join(map(str, shape)) or "1"


def _cuts(row: OperatorRow) -> str:
    return ", ".join(f"{factor}/{''.join(axes)}" for factor, axes in row.cuts.items())


def _strategy(row: OperatorRow) -> str:
    """In how many parts each input is cut, where it is; marked where the user said so, and where
    the operator is computed again in the backward pass."""
    parts = strategy(row.strategy) if row.cuts or row.pinned else ""
    marks = [mark for mark, holds in (("pinned", row.pinned), ("again", row.segment)) if holds]
    return " ".join([parts, *marks]).strip()


def strategy(parts: Strategy) -> str:
    """`((2,4),(4,1))`"""
    inner = ",".join(f"({','.join(map(str, p))}{',' if len(p) == 1 else ''})" for p in parts)
    return f"({inner}{',' if len(parts) == 1 else ''})"


def _conversions(row: OperatorRow) -> Iterable[str]:
    for conversion in row.conversions:
        words = [part for part in conversion.value.split(".") if not part.isdigit()]
        short = ".".join(words[-2:]) or "inside"
        mark = " (shared)" if conversion.shared else ""
        yield f"{short}: {', then '.join(conversion.steps)}{mark}"


def size(number: int) -> str:
    """Bytes in binary units: 1536 → `1.5 KiB`."""
    value = float(number)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def seconds(number: float) -> str:
    """`1.24 s`, `35.1 ms`, `210 μs`."""
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if number * scale >= 1:
            return f"{number * scale:.3g} {unit}"
    return f"{number * 1e6:.3g} μs"
