"""A plan as text in full, the same each time: no times, no addresses, no lines of source.

layer2: aten.linear, b k, j k -> b j
  cuts j/ab, b/c, strategy ((2,1),(4,1))
  input relu [32, 512] activation: (c, None; varying a b)
    vary over ab / all_reduce: 0 bytes forward, 49,152 backward
  input layer2.weight [512, 512] parameter: (a·b, None; varying c)
  output [32, 512]: (c, a·b)
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwright.layout import TensorLayout
from shardwright.plan.plan import Plan
from shardwright.plan.rows import ConversionRow, OperatorRow
from shardwright.plan.words import strategy


def dump(plan: Plan) -> str:
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


def _head(plan: Plan) -> Iterator[str]:
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


def _crossings(plan: Plan) -> Iterator[str]:
    for row in plan.crossings:
        yield (
            f"  {row.stage} to {row.to_stage}: {', '.join(row.values)}: {row.forward_bytes:,} bytes"
            f" there, {row.backward_bytes:,} back"
        )


def _inputs(plan: Plan) -> Iterator[str]:
    for leaf in plan.inputs:
        if isinstance(leaf, dict):
            yield f"  {leaf['name']} {leaf['dtype']} {list(leaf['shape'])}: whole"
        else:
            yield f"  {leaf!r}"


def _parameters(plan: Plan) -> Iterator[str]:
    for name, (shape, dtype) in plan.parameters.items():
        stored = TensorLayout(plan.mesh, plan.storage[name])
        part = list(stored.shard_shape(shape))
        yield f"  {name} {dtype} {list(shape)}: stored {stored.placement}, {part} on a device"


def _operator(plan: Plan, row: OperatorRow) -> Iterator[str]:
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
    yield f"  cuts {cuts or 'nothing'}, strategy {strategy(row.strategy)}"
    ways = {c.input: c for c in row.conversions if c.input is not None}
    for index, ((name, shape, kind), layout) in enumerate(zip(row.inputs, row.read, strict=True)):
        yield f"  input {name} {list(shape)} {kind}: {layout.placement}"
        if index in ways:
            yield f"  {_steps(ways[index])}"
    for inside in (c for c in row.conversions if not c.value):
        yield f"  inside: {_steps(inside).strip()}"
    told = plan.outputs.get(row.name, (None,) * len(row.outputs))
    for shape, layout, axes in zip(row.outputs, row.made, told, strict=True):
        left = "" if axes is None else f", left {TensorLayout(plan.mesh, axes).placement}"
        yield f"  output {list(shape)}: {layout.placement}{left}"
    for way in (c for c in row.conversions if c.input is None and c.value):
        yield f"  {_steps(way)}"


def _steps(conversion: ConversionRow) -> str:
    shared = ", the rest shared with an operator before" if conversion.shared else ""
    return (
        f"  {', then '.join(conversion.steps)}: {conversion.forward_bytes:,} bytes forward,"
        f" {conversion.backward_bytes:,} backward{shared}"
    )
