"""Parts of a plan that contradict each other, which a file can hold and a search never decides."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shardwright.core.layout.axes import Shape
from shardwright.core.layout.layout import DeviceMatrix, TensorLayout
from shardwright.core.partition.decisions import CutAxes
from shardwright.core.plan.data import PlanData
from shardwright.core.plan.rows import OperatorRow
from shardwright.errors import LayoutError, PlanError
from shardwright.text_files import short_repr


def check_consistent(plan: PlanData, devices: int, where: str) -> None:
    """Raises: PlanError: parts of the plan that contradict each other; names the first."""
    try:
        problem = next(_contradictions(plan, devices), None)
    except LayoutError as error:
        problem = str(error)
    if problem is not None:
        raise PlanError(f"{where}: {problem}")


def _contradictions(plan: PlanData, devices: int) -> Iterator[str]:
    pipeline, names = plan.pipeline, {row.name for row in plan.operators}
    if plan.devices != devices:
        yield f"devices is {devices}, but mesh and stages are of {plan.devices}"
    for key, known in (
        ("cuts", plan.cuts),
        ("outputs", plan.outputs),
        ("recompute", plan.recompute),
        ("pipeline.part_of", pipeline.chunk_of),
        ("saved_choices", [name for each in plan.saved_choices for name in each.operators]),
    ):
        for name in known:
            if name not in names:
                yield f"{key}: there is no operator {short_repr(name)}"
    for name, chunk in pipeline.chunk_of.items():
        if chunk >= pipeline.num_chunks:
            yield f"pipeline.part_of: {name} is in part {chunk} of {pipeline.num_chunks}"
    if len(plan.chunk_seconds) not in (0, pipeline.num_chunks):
        yield f"chunk_seconds: {len(plan.chunk_seconds)} chunks, not {pipeline.num_chunks}"
    memory = plan.saved_memory
    if memory is not None and len(memory.stages) != pipeline.stages:
        yield f"saved_memory: {len(memory.stages)} stages, not {pipeline.stages}"
    for name, factors in plan.cuts.items():
        _ = TensorLayout(plan.mesh, tuple(factors.values()))
        if not all(factors.values()):
            yield f"cuts: {name}: a factor without axes"
    yield from _contradictions_of_tensors(plan)
    for row in plan.operators:
        yield from _contradictions_of_row(row, plan)


def _contradictions_of_tensors(plan: PlanData) -> Iterator[str]:
    if set(plan.storage) != set(plan.parameters):
        yield "storage and parameters are of different names"
        return
    for name, (shape, dtype) in plan.parameters.items():
        yield from _misfit(f"storage: {name}", plan.storage[name], shape, plan.mesh)
        yield from _no_dtype(f"parameters: {name}", dtype)
    inputs = {leaf["name"]: leaf for leaf in plan.inputs if isinstance(leaf, dict)}
    for name, axes in plan.arrivals.items():
        if name not in inputs:
            yield f"arrivals: there is no input {short_repr(name)}"
        else:
            yield from _misfit(f"arrivals: {name}", axes, inputs[name]["shape"], plan.mesh)
    for name, leaf in inputs.items():
        yield from _no_dtype(f"inputs: {name}", leaf["dtype"])
    if plan.compute_dtype is not None:
        yield from _no_dtype("compute_dtype", plan.compute_dtype)


def _contradictions_of_row(row: OperatorRow, plan: PlanData) -> Iterator[str]:
    where, mark = f"operators: {row.name}", plan.recompute.get(row.name)
    if row.segment and mark is None:
        yield f"{where}: is in segment {row.segment!r}, but recompute does not say so"
    for name, _, kind in row.inputs:
        if kind == "parameter" and name not in plan.parameters:
            yield f"{where}: there is no parameter {short_repr(name)}"
    if row.stage >= plan.pipeline.stages:
        yield f"{where}: is on stage {row.stage} of {plan.pipeline.stages}"
    for axes in row.cuts.values():
        for axis in axes:
            _ = plan.mesh.axis(axis)
    if any((each.input or 0) >= max(1, len(row.inputs)) for each in row.redistributions):
        yield f"{where}: a redistribution of an input that it does not have"
    if len(row.input_layouts) != len(row.inputs) or len(row.output_layouts) != len(row.outputs):
        yield f"{where}: does not say the layout of each input and output"
        return
    layouts = (*row.input_layouts, *row.output_layouts)
    shapes = (*(shape for _, shape, _ in row.inputs), *row.outputs)
    for layout, shape in zip(layouts, shapes, strict=True):
        yield from _misfit(where, layout.axes, shape, plan.mesh)
    for axes_of_each, shape in zip(plan.outputs.get(row.name, ()), row.outputs, strict=False):
        if axes_of_each is not None:
            yield from _misfit(f"outputs: {row.name}", axes_of_each, shape, plan.mesh)


def _misfit(where: str, axes: CutAxes, shape: Shape, mesh: DeviceMatrix) -> Iterator[str]:
    counts = TensorLayout(mesh, axes).shard_counts
    if len(counts) != len(shape) or any(n % c for n, c in zip(shape, counts, strict=False)):
        yield f"{where}: shards {short_repr(counts)} do not divide the shape {short_repr(shape)}"


def _no_dtype(where: str, name: str) -> Iterator[str]:
    if not isinstance(getattr(torch, name, None), torch.dtype):
        yield f"{where}: {short_repr(name)} is not a torch dtype"
