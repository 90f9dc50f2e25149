"""A plan as text in full, the same each time: no times, no addresses, no lines of source.

layer2: aten.linear, b k, j k -> b j
  cuts j/ab, b/c, strategy ((2,1),(4,1))
  input relu [32, 512] activation: (c, None; varying a b)
    vary over ab / all_reduce: 0 bytes forward, 49,152 backward
  input layer2.weight [512, 512] parameter: (a·b, None; varying c)
  output [32, 512]: (c, a·b)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shardwright.cost.memory import binary
from shardwright.layout.layout import TensorLayout
from shardwright.plan.data import PlanData
from shardwright.plan.rows import ConversionRow, OperatorRow, cuts_text, shape_text, strategy_text


def dump(plan: PlanData) -> str:
    """See `Plan.dump`."""
    lines = [*_head(plan), "", "inputs", *_inputs(plan)]
    if plan.parameters:
        lines += ["", "parameters", *_parameters(plan)]
    lines += ["", "operators"]
    for row in plan.operators:
        lines += [f"  {line}" for line in _operator(plan, row)]
    if plan.crossings:
        lines += ["", "from stage to stage, for one micro-batch", *_crossings(plan)]
    if plan.returned:
        lines += ["", "returned"]
        lines += [f"  {line}" for row in plan.returned for line in (row.value, _steps(row))]
    return "\n".join(lines) + "\n"


def _head(plan: PlanData) -> Iterator[str]:
    sizes = "·".join(map(str, plan.mesh.device_matrix)) or "1"
    names = f", axes {' '.join(plan.mesh.alias_names)}" if plan.mesh.alias_names else ""
    options = ", ".join(f"{key}={value}" for key, value in plan.options.items())
    yield f"plan for {plan.devices} devices = {sizes}{names}"
    if plan.pipeline.stages * plan.pipeline.micro_batches > 1:
        pipeline = plan.pipeline
        yield (
            f"{pipeline.stages} stages of {plan.mesh.num_devices} devices,"
            f" {pipeline.micro_batches} micro-batches, schedule {pipeline.schedule},"
            f" {pipeline.chunks} chunks a stage"
        )
    yield f"mode {plan.mode}({options}), for {'training' if plan.training else 'evaluation'}"
    yield (
        f"each device sends {plan.forward_bytes:,} bytes forward and {plan.backward_bytes:,}"
        f" backward a step, and keeps {plan.parameter_bytes:,} bytes of parameters"
    )


def _crossings(plan: PlanData) -> Iterator[str]:
    for row in plan.crossings:
        yield (
            f"  {row.stage} to {row.to_stage}: {', '.join(row.values)}: {row.forward_bytes:,} bytes"
            f" there, {row.backward_bytes:,} back"
        )


def _inputs(plan: PlanData) -> Iterator[str]:
    for leaf in plan.inputs:
        if isinstance(leaf, dict):
            yield f"  {leaf['name']} {leaf['dtype']} {list(leaf['shape'])}: whole"
        else:
            yield f"  {leaf!r}"


def _parameters(plan: PlanData) -> Iterator[str]:
    for name, (dims, dtype) in plan.parameters.items():
        stored = TensorLayout(plan.mesh, plan.storage[name])
        part = list(stored.shard_shape(dims))
        yield f"  {name} {dtype} {list(dims)}: stored {stored.placement}, {part} on a device"


def _operator(plan: PlanData, row: OperatorRow) -> Iterator[str]:
    yield f"{row.name}: {row.operator}, {row.rule or 'no rule'}"
    if plan.pipeline.stages > 1:
        yield f"  in stage {row.stage}"
    if row.rule is None:
        yield "  computed whole on every device"
    if row.pinned:
        yield f"  pinned {plan.pins[row.name]}"
    if row.segment:
        communication = plan.recompute[row.name].communication
        kept = "" if communication else ", conversions inside are kept"
        yield f"  computed again in the backward pass, in segment {row.segment}{kept}"
    cuts = ", ".join(f"{factor}/{''.join(axes)}" for factor, axes in row.cuts.items())
    yield f"  cuts {cuts or 'nothing'}, strategy {strategy_text(row.strategy)}"
    ways = {c.input: c for c in row.conversions if c.input is not None}
    for index, ((name, dims, kind), layout) in enumerate(zip(row.inputs, row.read, strict=True)):
        yield f"  input {name} {list(dims)} {kind}: {layout.placement}"
        if index in ways:
            yield f"  {_steps(ways[index])}"
    for inside in (c for c in row.conversions if not c.value):
        yield f"  inside: {_steps(inside).strip()}"
    told = plan.outputs.get(row.name, (None,) * len(row.outputs))
    for dims, layout, axes in zip(row.outputs, row.made, told, strict=True):
        left = "" if axes is None else f", left {TensorLayout(plan.mesh, axes).placement}"
        yield f"  output {list(dims)}: {layout.placement}{left}"
    for way in (c for c in row.conversions if c.input is None and c.value):
        yield f"  {_steps(way)}"


def _steps(conversion: ConversionRow) -> str:
    shared = ", the rest shared with an operator before" if conversion.shared else ""
    return (
        f"  {', then '.join(conversion.steps)}: {conversion.forward_bytes:,} bytes forward,"
        f" {conversion.backward_bytes:,} backward{shared}"
    )


def explanation(plan: PlanData, row: OperatorRow) -> str:
    """Where one operator's inputs come from, how it is cut, and what that costs."""
    lines = [f"{row.name}: {row.operator}" + (f"  ({row.source})" if row.source else "")]
    lines.append(f"  rule: {row.rule or 'none, computed whole on every device'}")
    lines.append(f"  cuts: {cuts_text(row) or 'nothing'}")
    kind = "a main operator, decided by its cost" if row.main else "decided by its neighbors"
    if row.pinned:
        kind = f"pinned as {plan.pins[row.name]}"
    lines.append(f"  {kind}")
    lines += [f"  {line}" for line in _recomputed(plan, row)]
    ways = {c.input: c for c in row.conversions if c.input is not None}
    for index, ((name, sizes, origin), parts) in enumerate(
        zip(row.inputs, row.strategy, strict=True)
    ):
        cut = f"read in {'·'.join(map(str, parts))} parts" if max(parts, default=1) > 1 else "whole"
        lines.append(f"  input {name} {shape_text(sizes)} ({origin}): {cut}")
        if origin == "parameter" and name in plan.storage:
            kept = tuple(plan.mesh.size(axes) for axes in plan.storage[name])
            lines.append(f"    stored in {'·'.join(map(str, kept)) or '1'} parts")
        if index in ways:
            lines += [f"    {line}" for line in _conversion_lines(ways[index])]
    for conversion in row.conversions:
        if conversion.input is None:
            lines += [f"  {line}" for line in _conversion_lines(conversion)]
    lines.append(f"  output {', '.join(map(shape_text, row.outputs))}")
    return "\n".join(lines)


def _recomputed(plan: PlanData, row: OperatorRow) -> Iterable[str]:
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
        f"sends {binary(conversion.forward_bytes)} forward, "
        f"{binary(conversion.backward_bytes)} backward{shared}"
    )
