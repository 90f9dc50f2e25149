"""Write all decisions of a plan as reproducible text (`dump`), and explain one operator.

Dumps of equal plans are equal, as they contain no timings, addresses or source lines. For example:

layer2: aten.linear, b k, j k -> b j
  cuts j/tp, b/dp, strategy ((2,1),(4,1))
  input relu [32, 512] activation: (dp, None; varying tp)
    vary over tp / all_reduce: 0 bytes forward, 49,152 backward
  input layer2.weight [512, 512] parameter: (tp, None; varying dp)
  output [32, 512]: (dp, tp)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shardwright.core.cost.memory import bytes_text
from shardwright.core.layout.layout import TensorLayout
from shardwright.core.plan.data import PlanData
from shardwright.core.plan.parallelism import parallelism_phrases
from shardwright.core.plan.reasons import choice_lines, cut_origin
from shardwright.core.plan.rows import (
    OperatorRow,
    RedistributionRow,
    cuts_text,
    devices_text,
    shape_text,
    strategy_text,
)
from shardwright.core.plan.text_columns import wrap_lines

SHARED_SUFFIX = ", the rest shared with an earlier operator"
"""Suffix for the bytes of a redistribution that shares collectives with that of an earlier
consumer."""


def dump(plan: PlanData) -> str:
    """Return all decisions of a plan as reproducible text, without timings and source lines."""
    lines = [*_format_header_lines(plan), "", "inputs", *_format_input_lines(plan)]
    if plan.parameters:
        lines += ["", "parameters", *_format_parameter_lines(plan)]
    lines += ["", "operators"]
    for row in plan.operators:
        lines += [f"  {line}" for line in _format_operator_lines(plan, row)]
    if plan.crossings:
        lines += ["", "between stages, per micro-batch", *_format_stage_crossing_lines(plan)]
    if plan.returned:
        lines += ["", "outputs"]
        lines += [
            f"  {line}"
            for row in plan.returned
            for line in (row.value, f"  {_format_redistribution(row)}")
        ]
    return "\n".join(lines) + "\n"


def _format_header_lines(plan: PlanData) -> Iterator[str]:
    yield f"plan for {devices_text(plan.mesh, plan.pipeline.stages)}"
    # Gradient accumulation has micro-batches in a single stage.
    if plan.pipeline.stages * plan.pipeline.micro_batches > 1:
        pipeline = plan.pipeline
        yield (
            f"{pipeline.stages} stages of {plan.mesh.num_devices} devices,"
            f" {pipeline.micro_batches} micro-batches, schedule {pipeline.schedule},"
            f" {pipeline.chunks} chunk{'s' if pipeline.chunks > 1 else ''} per stage"
        )
    purpose = "training" if plan.training else "evaluation"
    yield f"mode {plan.mode}({plan.options_text}), for {purpose}"
    yield (
        f"each device sends {plan.forward_bytes:,} bytes forward and {plan.backward_bytes:,}"
        f" backward per step, and stores {plan.parameter_bytes:,} bytes of parameters"
    )


def _format_stage_crossing_lines(plan: PlanData) -> Iterator[str]:
    for row in plan.crossings:
        yield (
            f"  stage {row.stage} to stage {row.to_stage}: {', '.join(row.values)}:"
            f" {row.forward_bytes:,} bytes forward, {row.backward_bytes:,} backward"
        )


def _format_input_lines(plan: PlanData) -> Iterator[str]:
    for leaf in plan.inputs:
        if isinstance(leaf, dict):
            yield f"  {leaf['name']} {leaf['dtype']} {list(leaf['shape'])}"
        else:
            # Leaves other than tensors are constants of the plan.
            yield f"  {leaf!r}"


def _format_parameter_lines(plan: PlanData) -> Iterator[str]:
    for name, (shape, dtype) in plan.parameters.items():
        stored = TensorLayout(plan.mesh, plan.storage[name])
        shard = list(stored.shard_shape(shape))
        yield f"  {name} {dtype} {list(shape)}: stored as {stored.placement}, {shard} per device"


def _format_operator_lines(plan: PlanData, row: OperatorRow) -> Iterator[str]:
    yield f"{row.name}: {row.operator}, {row.rule or 'no rule'}"
    if plan.pipeline.stages > 1:
        yield f"  in stage {row.stage}"
    if row.rule is None:
        yield "  replicated on every device"
    if row.pinned:
        yield f"  pinned to {plan.pins[row.name]}"
    if row.segment:
        communication = plan.recompute[row.name].communication
        suffix = "" if communication else ", without its communication"
        yield f"  recomputed in the backward pass, in segment {row.segment}{suffix}"
    yield f"  cuts {cuts_text(row) or 'none'}, strategy {strategy_text(row.strategy)}"
    # At most one per input; those of outputs and of kernels share the key None, which is not read.
    redistributed = {redistribution.input: redistribution for redistribution in row.redistributions}
    for index, ((name, shape, value_origin), layout) in enumerate(
        zip(row.inputs, row.input_layouts, strict=True)
    ):
        yield f"  input {name} {list(shape)} {value_origin}: {layout.placement}"
        if index in redistributed:
            yield f"    {_format_redistribution(redistributed[index])}"
    # Collectives inside a kernel redistribute no value.
    for redistribution in (
        redistribution for redistribution in row.redistributions if not redistribution.value
    ):
        yield f"  inside: {_format_redistribution(redistribution)}"
    pinned = plan.outputs.get(row.name, (None,) * len(row.outputs))
    for shape, layout, axes in zip(row.outputs, row.output_layouts, pinned, strict=True):
        yield f"  output {list(shape)}: {layout.placement}" + (
            "" if axes is None else f", redistributed to {TensorLayout(plan.mesh, axes).placement}"
        )
    # A pinned output is redistributed before any consumer reads it.
    for redistribution in (
        redistribution
        for redistribution in row.redistributions
        if redistribution.input is None and redistribution.value
    ):
        yield f"    {_format_redistribution(redistribution)}"


def _format_redistribution(row: RedistributionRow) -> str:
    sent = f"{row.forward_bytes:,} bytes forward, {row.backward_bytes:,} backward"
    return f"{row.steps_text}: {sent}{SHARED_SUFFIX if row.shared else ''}"


def explanation(plan: PlanData, row: OperatorRow) -> str:
    """Explain how one operator is sharded, why, and what its redistributions cost.

    Lines have at most 80 columns.
    """
    lines = [f"{row.name}: {row.operator}" + (f"  ({row.source})" if row.source else "")]
    lines.append(f"  rule: {row.rule or 'none, replicated on every device'}")
    lines.append(f"  cuts: {cuts_text(row) or 'none'}")
    lines.append(f"  {', '.join(parallelism_phrases(plan, row))}")
    # The sentence; the label is for the tree of a report.
    lines.append(f"  {cut_origin(plan, row)[1]}")
    for label, description in choice_lines(plan, row):
        lines.append(f"    {f'{label}: ' if label else '  '}{description}")
    lines += [f"  {line}" for line in _describe_recomputation(plan, row)]
    redistributed = {redistribution.input: redistribution for redistribution in row.redistributions}
    for index, ((name, shape, value_origin), counts) in enumerate(
        zip(row.inputs, row.strategy, strict=True)
    ):
        lines.append(
            f"  input {name} {shape_text(shape)} ({value_origin}): {_describe_shard_counts(counts)}"
        )
        if value_origin == "parameter" and name in plan.storage:
            stored = tuple(plan.mesh.size(axes) for axes in plan.storage[name])
            lines.append(f"    stored {_describe_shard_counts(stored)}")
        if index in redistributed:
            lines += [f"    {line}" for line in _format_redistribution_lines(redistributed[index])]
    for redistribution in row.redistributions:
        if redistribution.input is None:
            lines += [f"  {line}" for line in _format_redistribution_lines(redistribution)]
    for shape, layout in zip(row.outputs, row.output_layouts, strict=True):
        lines.append(f"  output {shape_text(shape)}: {layout.placement}")
    # Redistributions of an output are in the rows of its consumers.
    for _, consumer in plan.neighbors[1].get(row.name, ()):
        for redistribution in consumer.redistributions:
            if redistribution.value == row.name:
                lines.append(f"    for {consumer.name}: {redistribution.steps_text}")
                lines.append(f"      {_format_communication_volume(redistribution)}")
    return "\n".join(wrap_lines(lines))


def _describe_shard_counts(counts: tuple[int, ...]) -> str:
    """Describe the number of shards of each dimension of a tensor.

    >>> _describe_shard_counts((4, 1)), _describe_shard_counts((1, 1))
    ('sharded 4·1', 'replicated')
    """
    # A scalar has no counts.
    return f"sharded {'·'.join(map(str, counts))}" if max(counts, default=1) > 1 else "replicated"


def _describe_recomputation(plan: PlanData, row: OperatorRow) -> Iterable[str]:
    """Describe the activation checkpointing of an operator; yield nothing if it is not
    recomputed."""
    recompute = plan.recompute.get(row.name)
    # The row has the segment that runs, `plan.recompute` the request.
    if row.segment and recompute is not None:
        count = sum(other.segment == row.segment for other in plan.operators)
        with_others = f" with {count - 1} more operators" if count > 1 else ""
        repeated = "repeated" if recompute.communication else "not repeated"
        yield f"recomputed in the backward pass in segment {row.segment}{with_others};"
        yield f"communication inside the segment is {repeated}"
    elif recompute is not None:
        yield f"in segment {recompute.segment}, but not recomputed: autograd saves no tensor of it"


def _format_redistribution_lines(row: RedistributionRow) -> tuple[str, ...]:
    return (*row.steps, _format_communication_volume(row))


def _format_communication_volume(row: RedistributionRow) -> str:
    sent = f"{bytes_text(row.forward_bytes)} forward, {bytes_text(row.backward_bytes)} backward"
    return f"sends {sent}{SHARED_SUFFIX if row.shared else ''}"
