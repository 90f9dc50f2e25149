"""Check that a plan read from a file, which may have been edited, is consistent."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shardwright.core.layout.axes import Shape
from shardwright.core.layout.layout import DeviceMatrix, TensorLayout
from shardwright.core.partition.decisions import CutAxes
from shardwright.core.plan.data import PlanData
from shardwright.core.plan.rows import OperatorRow
from shardwright.errors import LayoutError, PlanError
from shardwright.plain_data import short_repr


def check_consistent(plan: PlanData, devices: int, where: str) -> None:
    """Check that the fields of a plan do not contradict each other.

    Args:
        plan: the plan as read.
        devices: number of devices that the file states.
        where: path of the file, for errors.

    Raises:
        PlanError: for the first contradiction between fields.
    """
    try:
        # Lazy: the checks build layouts of the file's axes, which raise `LayoutError` themselves.
        problem = next(_find_contradictions(plan, devices), None)
    except LayoutError as error:
        problem = str(error)
    if problem is not None:
        raise PlanError(
            f"{where}: the plan contradicts itself: {problem}\nplan the model again to write a "
            "valid file"
        )


def _find_contradictions(plan: PlanData, devices: int) -> Iterator[str]:
    pipeline, names = plan.pipeline, {row.name for row in plan.operators}
    # `devices` is in the file for readers; plans compute it.
    if plan.devices != devices:
        yield f"`devices` is {devices}, but `mesh` and `stages` need {plan.devices}"
    # By the keys of the file, which differ from the names of some fields.
    for key, operator_names in (
        ("cuts", plan.cuts),
        ("outputs", plan.outputs),
        ("recompute", plan.recompute),
        ("pipeline.part_of", pipeline.chunk_of),
        ("saved_choices", [name for choice in plan.saved_choices for name in choice.operators]),
    ):
        for name in operator_names:
            if name not in names:
                yield f"`{key}`: there is no operator {short_repr(name)}"
    for name, chunk in pipeline.chunk_of.items():
        if chunk >= pipeline.num_chunks:
            last = pipeline.num_chunks - 1
            yield f"`pipeline.part_of`: {name} is in chunk {chunk}, but the last is {last}"
    # A plan with one stage has no `chunk_seconds`.
    if len(plan.chunk_seconds) not in (0, pipeline.num_chunks):
        count = len(plan.chunk_seconds)
        yield f"`chunk_seconds` has {count} chunks, but the pipeline has {pipeline.num_chunks}"
    memory = plan.saved_memory
    if memory is not None and len(memory.stages) != pipeline.stages:
        stages = len(memory.stages)
        yield f"`saved_memory` has {stages} stages, but the pipeline has {pipeline.stages}"
    for name, factors in plan.cuts.items():
        # The constructor raises LayoutError for unknown axes and for an axis that is used twice.
        _ = TensorLayout(plan.mesh, tuple(factors.values()))
        if not all(factors.values()):
            yield f"`cuts`: operator {name!r} has a factor without axes"
    yield from _find_tensor_contradictions(plan)
    for row in plan.operators:
        yield from _find_row_contradictions(row, plan)


def _find_tensor_contradictions(plan: PlanData) -> Iterator[str]:
    if set(plan.storage) != set(plan.parameters):
        # The checks below look each parameter up in both.
        yield "`storage` and `parameters` list different parameters"
        return
    for name, (shape, dtype) in plan.parameters.items():
        yield from _find_indivisible_dims(
            f"`storage`: {name}", plan.storage[name], shape, plan.mesh
        )
        yield from _find_unknown_dtype(f"`parameters`: {name}", dtype)
    inputs = {leaf["name"]: leaf for leaf in plan.inputs if isinstance(leaf, dict)}
    for name, axes in plan.arrivals.items():
        if name not in inputs:
            yield f"`arrivals`: there is no input {short_repr(name)}"
        else:
            where = f"`arrivals`: {name}"
            yield from _find_indivisible_dims(where, axes, inputs[name]["shape"], plan.mesh)
    for name, leaf in inputs.items():
        yield from _find_unknown_dtype(f"`inputs`: {name}", leaf["dtype"])
    if plan.compute_dtype is not None:
        yield from _find_unknown_dtype("`compute_dtype`", plan.compute_dtype)


def _find_row_contradictions(row: OperatorRow, plan: PlanData) -> Iterator[str]:
    where, recompute = f"`operators`: {row.name}", plan.recompute.get(row.name)
    # Not the converse: an operator of which autograd saves nothing is in `recompute`, but in no
    # segment.
    if row.segment and recompute is None:
        yield f"{where}: is in segment {row.segment!r}, but missing in `recompute`"
    for name, _, origin in row.inputs:
        if origin == "parameter" and name not in plan.parameters:
            yield f"{where}: there is no parameter {short_repr(name)}"
    if row.stage >= plan.pipeline.stages:
        yield f"{where}: is on stage {row.stage}, but the last is {plan.pipeline.stages - 1}"
    for axes in row.cuts.values():
        for axis in axes:
            _ = plan.mesh.axis(axis)  # raises LayoutError for an unknown axis
    # `input` is None for a redistribution of an output, and for collectives inside the operator.
    if any((each.input or 0) >= max(1, len(row.inputs)) for each in row.redistributions):
        yield f"{where}: redistributes an input that the operator does not have"
    if len(row.input_layouts) != len(row.inputs) or len(row.output_layouts) != len(row.outputs):
        # The strict `zip` below needs equal numbers.
        yield f"{where}: must have one layout for each input and output"
        return
    layouts = (*row.input_layouts, *row.output_layouts)
    shapes = (*(shape for _, shape, _ in row.inputs), *row.outputs)
    for layout, shape in zip(layouts, shapes, strict=True):
        yield from _find_indivisible_dims(where, layout.axes, shape, plan.mesh)
    # Only pinned operators are in `outputs`.
    for output_axes, shape in zip(plan.outputs.get(row.name, ()), row.outputs, strict=False):
        if output_axes is not None:
            yield from _find_indivisible_dims(
                f"`outputs`: {row.name}", output_axes, shape, plan.mesh
            )


def _find_indivisible_dims(
    where: str, axes: CutAxes, shape: Shape, mesh: DeviceMatrix
) -> Iterator[str]:
    # Shards are even: a dimension that its number of shards does not divide is never planned.
    counts = TensorLayout(mesh, axes).shard_counts
    if len(counts) != len(shape) or any(n % c for n, c in zip(shape, counts, strict=False)):
        shards = short_repr(counts)
        yield f"{where}: shape {short_repr(shape)} is not divisible into {shards} shards"


def _find_unknown_dtype(where: str, name: str) -> Iterator[str]:
    # The name comes from a file, and could be that of any attribute of `torch`.
    if not isinstance(getattr(torch, name, None), torch.dtype):
        yield f"{where}: {short_repr(name)} is not the name of a torch dtype, such as 'float32'"
