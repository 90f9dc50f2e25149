"""Builds the page of a plan: key figures, then time, memory and communication, then the model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import accumulate
from math import prod
from pathlib import Path

from shardwright.core.cost.memory import StageMemory, binary
from shardwright.core.cost.pipeline_timeline import timeline
from shardwright.core.cost.time_parts import COMPUTATION, WAITING, TimePart
from shardwright.core.plan.data import PlanData
from shardwright.core.plan.measured import Measured
from shardwright.core.plan.parallelism import axis_purpose, sentence
from shardwright.core.plan.repeated_rows import fold_crossings, fold_names, fold_rows
from shardwright.core.plan.rows import StepRow, devices_text, is_notable, seconds_text
from shardwright.core.plan.summary import notes, speed
from shardwright.errors import PlanError
from shardwright.tools.report.measured import collectives_chart, kinds_chart, ranks_chart
from shardwright.tools.report.other_plans import other_plans
from shardwright.tools.report.page import (
    Axis,
    Bar,
    Chart,
    Curve,
    Headline,
    Lane,
    Page,
    Stack,
    page_html,
    stacked,
)
from shardwright.tools.report.tree import page_tree

MAX_TIMELINE_PASSES = 6_000
"""Forward and backward passes of chunks in a timeline. Each is an element of the page, and browsers
slow down beyond some ten thousand."""

MAX_ROWS = 12
"""Kinds of redistributions in the table."""

PLAN_AGAIN = "This plan file lacks it: plan again with this version, and save the plan."


def write_page(
    plan: PlanData,
    path: str | Path,
    others: Mapping[str, PlanData | str] | None = None,
    measured: Measured | None = None,
) -> None:
    """Writes the page of a plan; see `plan_page`.

    Raises:
        PlanError: as `plan_page`, or jinja2 is not installed.
    """
    Path(path).write_text(page_html(plan_page(plan, others, measured)), encoding="utf-8")


def plan_page(
    plan: PlanData,
    others: Mapping[str, PlanData | str] | None = None,
    measured: Measured | None = None,
) -> Page:
    """Returns the content of the page of a plan; a note replaces anything its file lacks.

    Args:
        others: plans to compare it with, by name; instead of a plan, why it does not exist.
        measured: profiled steps of the plan.

    Raises:
        PlanError: the plan has stages that its schedule cannot run, or `measured` is of another
            plan.
    """
    tree, pictures = page_tree(plan)
    lanes, note = _lanes(plan)
    return Page(
        title=f"Plan for {devices_text(plan.mesh, plan.pipeline.stages)}",
        sentence=sentence(plan),
        headlines=tuple(_headlines(plan)),
        notes=tuple(notes(plan)),
        time=_time(plan),
        measured=() if measured is None else tuple(_measured(plan, measured)),
        memory=_memory(plan),
        curves=tuple(_curves(plan)),
        largest=_largest(plan),
        lanes=lanes,
        pipeline_note=note,
        stages=_stages(plan),
        traffic=_traffic(plan),
        others=_others(plan, others or {}),
        other_plans=tuple(other_plans(plan, others or {})),
        axes=tuple(_axes(plan)),
        tree=tree,
        pictures=pictures,
        origin=_origin(plan),
    )


def _axes(plan: PlanData) -> Iterator[Axis]:
    for number, (name, size) in enumerate(
        zip(plan.mesh.alias_names, plan.mesh.device_matrix, strict=True)
    ):
        yield Axis(name, size, axis_purpose(plan, number))


def _headlines(plan: PlanData) -> Iterator[Headline]:
    """Yields the key figures."""
    stages = [f"pp {plan.pipeline.stages}"] if plan.pipeline.stages > 1 else []
    mesh = [f"{axis.name} {axis.size}" for axis in _axes(plan)]
    yield Headline("Devices", f"{plan.devices:,}", " × ".join(stages + mesh) or "one device")
    step = plan.step
    if step is None:
        yield Headline("Step", "not predicted", "name a cluster to predict seconds")
    else:
        yield Headline("Step", seconds_text(step.seconds), f"predicted on {step.cluster}")
        if plan.global_batch is not None and step.seconds:
            one = f"{speed(plan, step.seconds * plan.devices)} of one device"
            yield Headline("Speed", speed(plan, step.seconds), one)
        if step.utilization is not None:
            note = "of the peak, without recomputation"
            yield Headline("Utilization", f"{step.utilization:.1%}", note)
    count = sum(prod(shape) for shape, _ in plan.parameters.values())
    stored = f"{binary(plan.parameter_bytes)} stored per device"
    yield Headline("Parameters", _count_text(count), stored)
    yield _memory_headline(plan)
    sent = f"{binary(plan.forward_bytes)} forward, {binary(plan.backward_bytes)} backward"
    yield Headline("Sent per device", binary(plan.bytes), f"a step: {sent}")
    if plan.global_batch is not None:
        number, sequence = plan.pipeline.micro_batches, plan.sequence
        words = [] if sequence is None else [f"of {sequence:,} tokens"]
        words += [f"{number:,} micro-batches of {plan.global_batch // number:,}"] * (number > 1)
        kind = "samples" if sequence is None else "sequences"
        yield Headline("Global batch", f"{plan.global_batch:,} {kind}", ", ".join(words))


def _count_text(count: int) -> str:
    """
    >>> _count_text(68_976_648_192), _count_text(1_250_000), _count_text(9_000)
    ('69.0 billion', '1.2 million', '9,000')
    """
    for unit, size in (("billion", 1e9), ("million", 1e6)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:,}"


def _memory_headline(plan: PlanData) -> Headline:
    memory, limit = plan.known_memory, plan.memory_limit
    if memory is None:
        note = "" if limit is None else f"the limit is {binary(limit)}"
        return Headline("Memory per device", "not predicted", note)
    place = f"peak, stage {memory.largest_stage.stage}" if len(memory.stages) > 1 else "peak"
    if limit is None:
        return Headline("Memory per device", binary(memory.peak), f"{place}; no limit is known")
    verdict = "does not fit" if plan.over_limit else "fits"
    note = f"of {binary(limit)} ({memory.peak / limit:.0%}), {place}: {verdict}"
    state = "bad" if plan.over_limit else "good"
    return Headline("Memory per device", binary(memory.peak), note, state)


def _time(plan: PlanData) -> Chart:
    """The waterfall of a step's time."""
    step = plan.step
    if step is None:
        return Chart(note="No time is predicted: plan for a cluster.")
    coarse = step.utilization is None
    parts = tuple(_coarse_parts(step)) if coarse else step.parts
    whole = max(step.seconds, sum(part.seconds for part in parts)) or 1.0
    starts = accumulate((part.seconds for part in parts), initial=0.0)
    bars = tuple(
        Bar(
            label=_part_label(part),
            kind=part.kind,
            text=_share(part.seconds, whole),
            start=start / whole,
            length=part.seconds / whole,
            hidden=min(part.hidden, start) / whole,
            note=f"{seconds_text(part.hidden)} hidden" if part.hidden else "",
        )
        for part, start in zip(parts, starts, strict=False)
    )
    stages = "the busiest stage" if plan.pipeline.stages > 1 else "each device"
    note = f"Time of {stages}, ordered by kind, not by time."
    if any(part.hidden for part in parts):
        note += " Hatched: communication that overlaps computation and does not lengthen the step."
    if coarse:
        note = f"Computation by kind and communication by axis: {PLAN_AGAIN}"
    return Chart(bars, note=note)


def _measured(plan: PlanData, measured: Measured) -> Iterator[Chart]:
    if measured.fingerprint != plan.fingerprint or len(measured.ranks) != plan.devices:
        raise PlanError(
            "the profile is of another model or another number of ranks than the plan\n"
            "pass the log folder of a run that trained with this plan"
        )
    yield kinds_chart(plan, measured)
    yield collectives_chart(plan, measured)
    yield ranks_chart(plan, measured)


def _share(seconds: float, whole: float) -> str:
    return f"{seconds_text(seconds)}, {seconds / whole:.1%}" if seconds else ""


def _coarse_parts(step: StepRow) -> Iterator[TimePart]:
    """The parts of a step from an older plan file, which has no finer ones."""
    yield TimePart("computation", (), step.computation)
    yield TimePart("communication", (), step.communication)
    rest = step.seconds - step.computation - step.communication
    if step.bubble and rest > 0:
        yield TimePart(WAITING, (), rest)


def _part_label(part: TimePart) -> str:
    over = f" over {'·'.join(part.axes)}" if part.axes else ""
    return part.kind if part.kind in COMPUTATION else f"{part.kind}{over}"


def _memory(plan: PlanData) -> Chart:
    """Peak memory of each stage by kind, with the limit."""
    memory, limit = plan.known_memory, plan.memory_limit
    if memory is None:
        return Chart(
            note=PLAN_AGAIN if plan.training else "Only plans for training predict memory."
        )
    width = max(memory.peak, limit or 0) or 1
    used = [name for name in StageMemory.NAMES if any(getattr(s, name) for s in memory.stages)]
    rows, table = [], []
    for stage in memory.stages:
        sizes = {name: getattr(stage, name) for name in used}
        over = limit is not None and stage.peak > limit
        rows.append(
            Stack(
                label=f"stage {stage.stage}" if len(memory.stages) > 1 else "each device",
                text=binary(stage.peak),
                bars=stacked(sizes, width, binary),
                limit=None if limit is None else limit / width,
                state="bad" if over else "",
            )
        )
        table.append((rows[-1].label, *map(binary, (*sizes.values(), stage.peak)), stage.moment))
    note = f"One device at its peak, with {memory.optimizer}"
    note += "." if limit is None else f"; the line is the limit of {binary(limit)}."
    return Chart(tuple(rows), tuple(used), note, ("", *used, "peak", "when"), tuple(table))


def _curves(plan: PlanData) -> Iterator[Curve]:
    """Memory of a device of each stage after each action, with the limit if it is near."""
    memory, limit = plan.known_memory, plan.memory_limit
    if memory is None:
        return
    # A limit far above the peak would flatten the curves.
    near = limit is not None and limit < 2 * memory.peak
    top = max(memory.peak, limit if limit is not None and near else 0) or 1
    for stage in memory.stages:
        columns = tuple(
            (_MOMENTS.get(name.partition(" ")[0], ""), f"{name}: {binary(size)}", size / top)
            for name, size in stage.curve
        )
        if columns:
            label = f"stage {stage.stage}" if len(memory.stages) > 1 else "each device"
            text = f"at most {binary(stage.peak)}"
            yield Curve(label, text, columns, limit / top if limit is not None and near else None)


_MOMENTS = {"forward": "F0", "backward": "B0"}


def _largest(plan: PlanData) -> Chart:
    """The largest tensors at the peak of the stage that needs most memory, by repeated block."""
    if plan.known_memory is None:
        return Chart()
    stage = plan.known_memory.largest_stage
    header = ("produced by, or for", "kind", "size")
    note = f"The largest tensors of one micro-batch at the peak ({stage.moment})."
    rows = tuple((name, kind, binary(size)) for name, kind, size in stage.largest)
    return Chart(note=note, header=header, table=rows)


def _lanes(plan: PlanData) -> tuple[tuple[Lane, ...], str]:
    """The timeline of each stage, and a note on it."""
    pipeline, chunks = plan.pipeline, plan.chunk_seconds
    if pipeline.stages == 1:
        return (), ""
    if not chunks:
        return (), PLAN_AGAIN
    if pipeline.num_chunks * pipeline.micro_batches > MAX_TIMELINE_PASSES:
        return (), f"{pipeline.micro_batches:,} micro-batches are too many to draw."
    line = timeline(pipeline, chunks)
    whole = line.seconds or 1.0
    several = pipeline.chunks > 1

    def text(seconds: float) -> str:
        return "" if plan.step is None else f", {seconds_text(seconds)}"

    lanes = tuple(
        Lane(
            f"stage {number}",
            f"idle {line.bubbles[number]:.1%}" if line.seconds else "",
            tuple(
                (
                    span.action.kind,
                    span.action.micro_batch,
                    f"{span.action}{f' of chunk {span.action.chunk}' if several else ''}"
                    f"{text(span.end - span.start)}",
                    span.start / whole,
                    (span.end - span.start) / whole,
                )
                for span in spans
            ),
        )
        for number, spans in enumerate(line.stages)
    )
    by = "floating-point operations" if plan.step is None else "predicted seconds"
    idle = f"{line.bubble:.1%} of the stages' time is bubbles" if line.seconds else "no time"
    return lanes, f"Schedule {pipeline.schedule}, by {by}: {idle}. The optimizer's step follows."


def _stages(plan: PlanData) -> Chart:
    """The blocks of each stage, by the first number of their module paths."""
    if plan.pipeline.stages == 1:
        return Chart()
    blocks: dict[int, dict[str, None]] = {}
    for row in filter(is_notable, plan.operators):
        block = re.match(r"(.*?\.\d+)(?:\.|$)", row.name)
        blocks.setdefault(row.stage, {})[block[1] if block else row.name] = None
    table = [(f"stage {n}", ", ".join(fold_names(blocks[n]))) for n in sorted(blocks)]
    return Chart(header=("", "computes"), table=tuple(table))


def _traffic(plan: PlanData) -> Chart:
    """Communication volume of one micro-batch by kind and axes, and from stage to stage."""
    sent: dict[str, list[int]] = {}
    rows = [(fold.count, fold.row.redistributions) for fold in fold_rows(plan.operators)]
    for number, redistributions in (*rows, (1, plan.returned)):
        for each in redistributions:
            steps = (re.sub(r" (dim \d+|sum|mean|max)( to dim \d+)?", "", s) for s in each.steps)
            entry = sent.setdefault(", then ".join(steps), [0, 0, 0])
            sizes = (1, each.forward_bytes, each.backward_bytes)
            entry[:] = [total + number * size for total, size in zip(entry, sizes, strict=True)]
    ranked = sorted(sent.items(), key=lambda entry: -sum(entry[1][1:]))
    ranked = [entry for entry in ranked if sum(entry[1][1:])]
    table = [
        (steps, f"{count:,}", binary(there), binary(back))
        for steps, (count, there, back) in ranked[:MAX_ROWS]
    ]
    for stages, crossing in fold_crossings(plan.crossings):
        there, back = crossing.forward_bytes, crossing.backward_bytes
        table.append((f"send: {stages}", "each", binary(there), binary(back)))
    omitted = len(ranked) - MAX_ROWS
    devices = "one device sends" if plan.pipeline.stages == 1 else "one device of each stage sends"
    note = (
        f"Bytes that {devices} when each redistribution runs once. Activations are redistributed in"
        " every micro-batch, parameters and gradients as their sharding level requires."
    )
    if omitted > 0:
        note += f" {omitted} smaller kinds are not shown."
    header = ("forward / backward", "count", "forward", "backward")
    return Chart(note=note, header=header, table=tuple(table))


def _others(plan: PlanData, others: Mapping[str, PlanData | str]) -> Chart:
    """A row for this plan and each other."""
    if not others:
        return Chart()
    header = ("", "devices", "step", "of this", "speed", "memory", "sent", "parallelism")
    rows = ((name, *_plan_cells(other, plan)) for name, other in others.items())
    note = "All are predicted. “of this” is the step time relative to this plan's."
    table = (("this plan", *_plan_cells(plan, plan)), *rows)
    return Chart(note=note, header=header, table=table)


def _plan_cells(plan: PlanData | str, to: PlanData) -> tuple[str, ...]:
    """The cells of a plan, or the reason why it does not exist."""
    if isinstance(plan, str):
        return ("", "", "", "", "", "", plan)
    step, memory, own = plan.step_time, plan.known_memory, to.step_time
    size = "" if memory is None else binary(memory.peak)
    size += ", does not fit" * plan.over_limit
    return (
        f"{plan.devices:,}",
        "" if step is None else seconds_text(step),
        f"{step / own:.2f}" if step and own else "",
        "" if step is None else speed(plan, step),
        size,
        binary(plan.bytes),
        sentence(plan),
    )


def _origin(plan: PlanData) -> str:
    return (
        f"{plan.mode}({plan.options_text}); captured in {plan.capture_seconds:.2f} s, searched in"
        f" {plan.search_seconds:.2f} s; fingerprint of the model {plan.fingerprint}"
    )
