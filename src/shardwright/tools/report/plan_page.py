"""Build the page of a plan: key figures, then time, memory and communication, then the model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import accumulate
from math import prod
from pathlib import Path

from shardwright.core.cost.memory import StageMemory, bytes_text
from shardwright.core.cost.pipeline_timeline import timeline
from shardwright.core.cost.time_parts import COMPUTATION, WAITING, TimePart
from shardwright.core.plan.data import PlanData
from shardwright.core.plan.measured import Measured
from shardwright.core.plan.parallelism import axis_parallelism, parallelism_sentence
from shardwright.core.plan.repeated_rows import fold_crossings, fold_names, fold_rows
from shardwright.core.plan.rows import StepRow, devices_text, is_notable, seconds_text
from shardwright.core.plan.summary import plan_notes, throughput_text
from shardwright.errors import PlanError
from shardwright.text_files import write_text
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
    stack_bars,
)
from shardwright.tools.report.tree import page_tree

MAX_TIMELINE_PASSES = 6_000
"""Maximum number of forward and backward passes in the timeline. Each pass is an element of the
page, and browsers slow down beyond some ten thousand elements."""

MAX_REDISTRIBUTION_KINDS = 12
"""Maximum number of rows in the table of redistributions, with one row per collective and mesh
axes."""

OLD_FILE_NOTE = "Not in this plan file of an older version: plan again, and save the plan."


def write_page(
    plan: PlanData,
    path: str | Path,
    others: Mapping[str, PlanData | str] | None = None,
    measured: Measured | None = None,
) -> None:
    """Write the page of a plan as HTML.

    Args:
        path: the file to write.
        others: for each plan to compare with `plan`, by name, the plan or the reason why it could
            not be made.
        measured: measurements of a run with this plan; None for a page of predictions only.

    Raises:
        PlanError: if the schedule cannot run the stages of the plan, `measured` belongs to another
            plan, or `jinja2` is not installed.
    """
    write_text(path, page_html(plan_page(plan, others, measured)))


def plan_page(
    plan: PlanData,
    others: Mapping[str, PlanData | str] | None = None,
    measured: Measured | None = None,
) -> Page:
    """Return the content of a plan's page.

    Notes replace charts whose data is missing in plan files of earlier releases.

    Args:
        others: for each plan to compare with, by name, the plan or the reason why it could not be
            made.
        measured: measurements of a run with this plan.

    Raises:
        PlanError: if the schedule cannot run the stages of the plan, or `measured` belongs to
            another plan.
    """
    tree, pictures = page_tree(plan)
    lanes, note = _make_stage_timelines(plan)
    return Page(
        title=f"Plan for {devices_text(plan.mesh, plan.pipeline.stages)}",
        sentence=parallelism_sentence(plan),
        headlines=tuple(_iterate_key_figures(plan)),
        notes=tuple(plan_notes(plan)),
        time=_make_step_time_chart(plan),
        measured=() if measured is None else tuple(_iterate_measured_charts(plan, measured)),
        memory=_make_memory_chart(plan),
        curves=tuple(_iterate_memory_curves(plan)),
        largest=_make_largest_tensors_chart(plan),
        lanes=lanes,
        pipeline_note=note,
        stages=_make_stage_table(plan),
        traffic=_make_communication_chart(plan),
        others=_make_other_plans_chart(plan, others or {}),
        other_plans=tuple(other_plans(plan, others or {})),
        axes=tuple(_iterate_mesh_axes(plan)),
        tree=tree,
        pictures=pictures,
        origin=_format_plan_origin(plan),
    )


def _iterate_mesh_axes(plan: PlanData) -> Iterator[Axis]:
    for index, (name, size) in enumerate(
        zip(plan.mesh.alias_names, plan.mesh.device_matrix, strict=True)
    ):
        yield Axis(name, size, axis_parallelism(plan, index))


def _iterate_key_figures(plan: PlanData) -> Iterator[Headline]:
    # Pipeline stages are not an axis of the mesh, which is that of one stage.
    stages = [f"pp {plan.pipeline.stages}"] if plan.pipeline.stages > 1 else []
    mesh = [f"{axis.name} {axis.size}" for axis in _iterate_mesh_axes(plan)]
    # The mesh of one device has no axes.
    yield Headline("Devices", f"{plan.devices:,}", " × ".join(stages + mesh) or "one device")
    step = plan.step
    if step is None:
        yield Headline("Step", "not predicted", "name a cluster to predict seconds")
    else:
        yield Headline("Step", seconds_text(step.seconds), f"predicted on {step.cluster}")
        # A step of 0 s, without any cost, has no throughput.
        if plan.global_batch is not None and step.seconds:
            # As if a step took `devices` times as long.
            note = f"{throughput_text(plan, step.seconds * plan.devices)} of one device"
            yield Headline("Speed", throughput_text(plan, step.seconds), note)
        if step.utilization is not None:
            note = "of the peak, without recomputation"
            yield Headline("Utilization", f"{step.utilization:.1%}", note)
    # Shapes of `plan.parameters` are those of full tensors.
    count = sum(prod(shape) for shape, _ in plan.parameters.values())
    stored = f"{bytes_text(plan.parameter_bytes)} stored per device"
    yield Headline("Parameters", _format_param_count(count), stored)
    yield _make_memory_headline(plan)
    sent = f"{bytes_text(plan.forward_bytes)} forward, {bytes_text(plan.backward_bytes)} backward"
    yield Headline("Sent per device", bytes_text(plan.bytes), f"a step: {sent}")
    if plan.global_batch is not None:
        count, sequence = plan.pipeline.micro_batches, plan.sequence
        details = [] if sequence is None else [f"of {sequence:,} tokens"]
        details += [f"{count:,} micro-batches of {plan.global_batch // count:,}"] * (count > 1)
        unit = "samples" if sequence is None else "sequences"
        yield Headline("Global batch", f"{plan.global_batch:,} {unit}", ", ".join(details))


def _format_param_count(count: int) -> str:
    """Format a number of parameters.

    >>> _format_param_count(68_976_648_192), _format_param_count(1_250_000)
    ('69.0 billion', '1.2 million')
    >>> _format_param_count(9_000)
    '9,000'
    """
    for unit, size in (("billion", 1e9), ("million", 1e6)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:,}"


def _make_memory_headline(plan: PlanData) -> Headline:
    memory, limit = plan.known_memory, plan.memory_limit
    if memory is None:
        note = "" if limit is None else f"the limit is {bytes_text(limit)}"
        return Headline("Memory per device", "not predicted", note)
    peak_name = f"peak, stage {memory.largest_stage.stage}" if len(memory.stages) > 1 else "peak"
    if limit is None:
        return Headline(
            "Memory per device", bytes_text(memory.peak), f"{peak_name}; no limit is known"
        )
    verdict = "does not fit" if plan.over_limit else "fits"
    note = f"of {bytes_text(limit)} ({memory.peak / limit:.0%}), {peak_name}: {verdict}"
    state = "bad" if plan.over_limit else "good"
    return Headline("Memory per device", bytes_text(memory.peak), note, state)


def _make_step_time_chart(plan: PlanData) -> Chart:
    """Return the waterfall chart of a step's time."""
    step = plan.step
    if step is None:
        return Chart(note="No time is predicted: plan for a cluster.")
    # Plan files of earlier releases have no utilization.
    coarse = step.utilization is None
    time_parts = tuple(_iterate_time_parts_of_old_plan(step)) if coarse else step.parts
    # The chart ends with the longer of the two: parts of an old plan file may exceed its step.
    total = max(step.seconds, sum(time_part.seconds for time_part in time_parts)) or 1.0
    starts = accumulate((time_part.seconds for time_part in time_parts), initial=0.0)
    bars = tuple(
        Bar(
            label=_format_time_part_label(time_part),
            category=time_part.kind,
            size_text=_format_seconds_and_share(time_part.seconds, total),
            start=start / total,
            length=time_part.seconds / total,
            # Not beyond the left edge of the chart.
            hidden=min(time_part.hidden, start) / total,
            note=f"{seconds_text(time_part.hidden)} hidden" if time_part.hidden else "",
        )
        for time_part, start in zip(time_parts, starts, strict=False)
    )
    stages = "the busiest stage" if plan.pipeline.stages > 1 else "each device"
    note = f"Time of {stages}, ordered by kind, not by time."
    if any(time_part.hidden for time_part in time_parts):
        note += " Hatched: communication that overlaps computation and does not lengthen the step."
    if coarse:
        note = f"Computation by kind and communication by axis: {OLD_FILE_NOTE}"
    return Chart(bars, note=note)


def _iterate_measured_charts(plan: PlanData, measured: Measured) -> Iterator[Chart]:
    # A model may have plans for several numbers of devices.
    if measured.fingerprint != plan.fingerprint or len(measured.ranks) != plan.devices:
        raise PlanError(
            "the profile and the plan have different models or numbers of ranks\n"
            "use the log folder of a run that trained with this plan"
        )
    yield kinds_chart(plan, measured)
    yield collectives_chart(plan, measured)
    yield ranks_chart(plan, measured)


def _format_seconds_and_share(seconds: float, total: float) -> str:
    return f"{seconds_text(seconds)}, {seconds / total:.1%}" if seconds else ""


def _iterate_time_parts_of_old_plan(step: StepRow) -> Iterator[TimePart]:
    """Yield the components of step time in plan files of earlier releases: computation,
    communication and waiting time."""
    yield TimePart("computation", (), step.computation)
    yield TimePart("communication", (), step.communication)
    remaining = step.seconds - step.computation - step.communication
    if step.bubble and remaining > 0:
        yield TimePart(WAITING, (), remaining)


def _format_time_part_label(time_part: TimePart) -> str:
    over = f" over {'·'.join(time_part.axes)}" if time_part.axes else ""
    return time_part.kind if time_part.kind in COMPUTATION else f"{time_part.kind}{over}"


def _make_memory_chart(plan: PlanData) -> Chart:
    """Return the chart of each stage's peak memory by type of tensor, with the memory limit."""
    memory, limit = plan.known_memory, plan.memory_limit
    if memory is None:
        return Chart(
            note=OLD_FILE_NOTE if plan.training else "Only plans for training predict memory."
        )
    # All stages and the limit on one scale.
    width = max(memory.peak, limit or 0) or 1
    # The categories that any stage uses, for one legend and one header of the table.
    used = [name for name in StageMemory.NAMES if any(getattr(s, name) for s in memory.stages)]
    rows, table = [], []
    for stage in memory.stages:
        sizes = {name: getattr(stage, name) for name in used}
        over_limit = limit is not None and stage.peak > limit
        rows.append(
            Stack(
                label=f"stage {stage.stage}" if len(memory.stages) > 1 else "each device",
                size_text=bytes_text(stage.peak),
                bars=stack_bars(sizes, width, bytes_text),
                limit=None if limit is None else limit / width,
                state="bad" if over_limit else "",
            )
        )
        table.append(
            (rows[-1].label, *map(bytes_text, (*sizes.values(), stage.peak)), stage.moment)
        )
    note = f"One device at its peak, with {memory.optimizer}"
    note += "." if limit is None else f"; the line is the limit of {bytes_text(limit)}."
    return Chart(tuple(rows), tuple(used), note, ("", *used, "peak", "when"), tuple(table))


def _iterate_memory_curves(plan: PlanData) -> Iterator[Curve]:
    """Yield a chart of memory over time for each stage, with the limit line if it is near the
    peak."""
    memory, limit = plan.known_memory, plan.memory_limit
    if memory is None:
        return
    # A limit far above the peak would flatten the curves.
    near = limit is not None and limit < 2 * memory.peak
    top = max(memory.peak, limit if limit is not None and near else 0) or 1
    for stage in memory.stages:
        columns = tuple(
            (
                _COLUMN_KINDS.get(name.partition(" ")[0], ""),
                f"{name}: {bytes_text(size)}",
                size / top,
            )
            for name, size in stage.curve
        )
        if columns:
            label = f"stage {stage.stage}" if len(memory.stages) > 1 else "each device"
            line = limit / top if limit is not None and near else None
            yield Curve(label, f"at most {bytes_text(stage.peak)}", columns, line)


_COLUMN_KINDS = {"forward": "F0", "backward": "B0"}
"""Color category of a column in a memory chart, by the first word of the column's text."""


def _make_largest_tensors_chart(plan: PlanData) -> Chart:
    """Return the table of the largest tensors at the peak of the stage with the highest peak."""
    if plan.known_memory is None:
        return Chart()
    # This stage decides whether the plan fits.
    stage = plan.known_memory.largest_stage
    header = ("produced by, or for", "kind", "size")
    note = f"The largest tensors of one micro-batch at the peak ({stage.moment})."
    rows = tuple((name, category, bytes_text(size)) for name, category, size in stage.largest)
    return Chart(note=note, header=header, table=rows)


def _make_stage_timelines(plan: PlanData) -> tuple[tuple[Lane, ...], str]:
    """Return the timeline of each stage, and a note if the timelines cannot be drawn.

    There are no timelines for a single stage, or for more than `MAX_TIMELINE_PASSES` passes.
    """
    pipeline, chunks = plan.pipeline, plan.chunk_seconds
    if pipeline.stages == 1:
        return (), ""
    if not chunks:
        return (), OLD_FILE_NOTE
    if pipeline.num_chunks * pipeline.micro_batches > MAX_TIMELINE_PASSES:
        return (), f"{pipeline.micro_batches:,} micro-batches are too many to draw."
    line = timeline(pipeline, chunks)
    # A timeline without costs ends at 0.
    total = line.seconds or 1.0
    has_chunks = pipeline.chunks > 1

    # Without a cluster, lengths are of operations instead of seconds.
    def duration(seconds: float) -> str:
        return "" if plan.step is None else f", {seconds_text(seconds)}"

    lanes = tuple(
        Lane(
            f"stage {stage}",
            f"idle {line.bubbles[stage]:.1%}" if line.seconds else "",
            tuple(
                (
                    span.action.pass_type,
                    span.action.micro_batch,
                    f"{span.action}{f' of chunk {span.action.chunk}' if has_chunks else ''}"
                    f"{duration(span.end - span.start)}",
                    span.start / total,
                    (span.end - span.start) / total,
                )
                for span in spans
            ),
        )
        for stage, spans in enumerate(line.stages)
    )
    unit = "floating-point operations" if plan.step is None else "predicted seconds"
    idle = f"{line.bubble:.1%} of the stages' time is bubbles" if line.seconds else "no time"
    return lanes, f"Schedule {pipeline.schedule}, by {unit}: {idle}. The optimizer's step follows."


def _make_stage_table(plan: PlanData) -> Chart:
    """Return the table of each stage's blocks, named by module path up to the first index."""
    if plan.pipeline.stages == 1:
        return Chart()
    # Dictionaries as sets that keep the order of the model.
    blocks: dict[int, dict[str, None]] = {}
    for row in filter(is_notable, plan.operators):
        # Up to the first index: `layers.3` of `layers.3.mlp.up`.
        block = re.match(r"(.*?\.\d+)(?:\.|$)", row.name)
        blocks.setdefault(row.stage, {})[block[1] if block else row.name] = None
    table = [(f"stage {stage}", ", ".join(fold_names(blocks[stage]))) for stage in sorted(blocks)]
    return Chart(header=("", "computes"), table=tuple(table))


def _make_communication_chart(plan: PlanData) -> Chart:
    """Return the table of communication volume by type of collective and mesh axes, and between
    stages."""
    sent: dict[str, list[int]] = {}
    # Equal operators of repeated blocks count as often as they occur.
    rows = [(fold.count, fold.row.redistributions) for fold in fold_rows(plan.operators)]
    # The outputs of the plan are redistributed once.
    for fold_count, redistributions in (*rows, (1, plan.returned)):
        for each in redistributions:
            # Without dimensions and operations, so that a row has all steps of its kind over these
            # axes.
            steps = (re.sub(r" (dim \d+|sum|mean|max)( to dim \d+)?", "", s) for s in each.steps)
            entry = sent.setdefault(", then ".join(steps), [0, 0, 0])
            # The first number counts redistributions.
            sizes = (1, each.forward_bytes, each.backward_bytes)
            entry[:] = [total + fold_count * size for total, size in zip(entry, sizes, strict=True)]
    # Most bytes first, because only the first rows are shown.
    ranked = sorted(sent.items(), key=lambda entry: -sum(entry[1][1:]))
    # Steps that send nothing, such as slices, are not listed.
    ranked = [entry for entry in ranked if sum(entry[1][1:])]
    table = [
        (steps, f"{count:,}", bytes_text(forward), bytes_text(backward))
        for steps, (count, forward, backward) in ranked[:MAX_REDISTRIBUTION_KINDS]
    ]
    for stages, crossing in fold_crossings(plan.crossings):
        forward, backward = crossing.forward_bytes, crossing.backward_bytes
        table.append((f"send: {stages}", "each", bytes_text(forward), bytes_text(backward)))
    omitted = len(ranked) - MAX_REDISTRIBUTION_KINDS
    devices = "one device sends" if plan.pipeline.stages == 1 else "one device of each stage sends"
    note = (
        f"Bytes that {devices} when each redistribution runs once. Activations are redistributed in"
        " every micro-batch, parameters and gradients as their ZeRO level requires."
    )
    if omitted > 0:
        note += f" {omitted} smaller kinds are not shown."
    header = ("forward / backward", "count", "forward", "backward")
    return Chart(note=note, header=header, table=tuple(table))


def _make_other_plans_chart(plan: PlanData, others: Mapping[str, PlanData | str]) -> Chart:
    """Return the table that compares this plan with each other plan."""
    if not others:
        return Chart()
    header = ("", "devices", "step", "of this", "speed", "memory", "sent", "parallelism")
    rows = ((name, *_format_plan_row(other, plan)) for name, other in others.items())
    note = "All are predicted. “of this” is the step time relative to this plan's."
    table = (("this plan", *_format_plan_row(plan, plan)), *rows)
    return Chart(note=note, header=header, table=table)


def _format_plan_row(plan: PlanData | str, page_plan: PlanData) -> tuple[str, ...]:
    """Return the row of a plan in the comparison with the page's plan.

    If `plan` is the reason why it could not be made, the row has only the reason.
    """
    if isinstance(plan, str):
        # The reason is in the last column, that of the parallelism.
        return ("", "", "", "", "", "", plan)
    step, memory, page_step = plan.step_time, plan.known_memory, page_plan.step_time
    size = "" if memory is None else bytes_text(memory.peak)
    size += ", does not fit" * plan.over_limit
    return (
        f"{plan.devices:,}",
        "" if step is None else seconds_text(step),
        f"{step / page_step:.2f}" if step and page_step else "",
        "" if step is None else throughput_text(plan, step),
        size,
        bytes_text(plan.bytes),
        parallelism_sentence(plan),
    )


def _format_plan_origin(plan: PlanData) -> str:
    return (
        f"{plan.mode}({plan.options_text}); captured in {plan.capture_seconds:.2f} s, searched in"
        f" {plan.search_seconds:.2f} s; fingerprint of the model {plan.fingerprint}"
    )
