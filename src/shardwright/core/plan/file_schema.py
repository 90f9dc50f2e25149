"""What the JSON file of a plan must hold: the types of its fields, and what must agree in them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from functools import partial
from types import GenericAlias
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

import torch
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    create_model,
)

from shardwright.core.constraints import OperatorStrategy
from shardwright.core.cost.memory import Memory, StageMemory
from shardwright.core.cost.pipeline_timeline import ChunkSeconds
from shardwright.core.cost.time_parts import KINDS, TimePart
from shardwright.core.layout.axes import Shape
from shardwright.core.layout.layout import Layout, TensorLayout
from shardwright.core.partition.axis_meaning import Meaning
from shardwright.core.partition.decisions import CutAxes, OptimizerParallel, Recompute
from shardwright.core.partition.pipeline_spec import REDUCTIONS, PipelineSpec
from shardwright.core.partition.schedules import SCHEDULES
from shardwright.core.plan.data import PlanData
from shardwright.core.plan.rows import CrossingRow, OperatorRow, RedistributionRow, StepRow
from shardwright.core.search.choices import KNOBS, AxisChoice, OtherChoice
from shardwright.errors import LayoutError, PlanError
from shardwright.text_files import shown

AnyPlan = TypeVar("AnyPlan", bound=PlanData)
Made = TypeVar("Made")

FILE_KEYS = {
    "input_layouts": "read",
    "output_layouts": "made",
    "redistributions": "conversions",
    "chunk_of": "part_of",
    "saved_gap": "gap",
}
"""Keys in the file, where they differ from the field; files keep them."""

OF_THIS_RUN = ("graph", "optimizer", "dry_runs", "pricing")
"""Fields that are not written; without them, a plan from a file cannot predict its memory."""

Natural = Annotated[int, Field(ge=0)]
AtLeastOne = Annotated[int, Field(ge=1)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Sizes = tuple[Natural, ...]
_STRICT = ConfigDict(extra="forbid", strict=True)


def _schema(of: type, optional: Iterable[str] = (), **changed: Any) -> Any:
    """What a file holds of the dataclass `of`, one of which is made when it is read."""
    return Annotated[_model(of, optional=optional, **changed), AfterValidator(partial(_made, of))]


def _model(
    of: type, without: Iterable[str] = (), optional: Iterable[str] = (), **changed: Any
) -> type[BaseModel]:
    """A model of what a file holds of the dataclass `of`: all its fields but those in `without`,
    with the types of `changed` where the file holds another; other numbers are at least 0. Files of
    earlier releases lack those in `optional`."""
    numbers: dict[Any, Any] = {int: Natural, float: Amount, Shape: Sizes}
    hints = get_type_hints(of)
    kinds = {f.name: numbers.get(hints[f.name], hints[f.name]) for f in fields(of)} | changed
    definitions: Any = {
        name: (kind, Field(None if name in optional else ..., alias=FILE_KEYS.get(name)))
        for name, kind in kinds.items()
        if name not in without
    }
    return create_model(of.__name__, __config__=_STRICT, **definitions)


def _made(of: type[Made], read: BaseModel, without: Iterable[str] = ()) -> Made:
    """The value of the dataclass `of` that was read."""
    return of(**{n: getattr(read, n) for n in read.model_fields_set if n not in without})


def _many(kind: Any) -> Any:
    """A list of them in the file."""
    return GenericAlias(tuple, (kind, ...))


def _named(kind: Any) -> Any:
    return GenericAlias(dict, (str, kind))


class _Mesh(BaseModel, extra="forbid", strict=True):
    device_matrix: tuple[AtLeastOne, ...]
    alias_names: tuple[str, ...]


class _LayoutOnMesh(BaseModel, extra="forbid", strict=True):
    """A layout on the mesh of the plan, as axes."""

    axes: tuple[Sizes, ...]
    partial: Sizes = ()
    varying: Sizes = ()

    def on(self, mesh: Layout) -> TensorLayout:
        return TensorLayout(mesh, self.axes, frozenset(self.partial), frozenset(self.varying))


class _OwnLayout(_Mesh):
    """A layout on a mesh of its own, as `TensorLayout.to_dict` writes it."""

    tensor_map: tuple[int | tuple[int, ...], ...]
    rank_list: Sizes | None = None
    partial: tuple[str, ...] = ()
    varying: tuple[str, ...] = ()


class _Pin(BaseModel, extra="forbid", strict=True):
    inputs: tuple[tuple[AtLeastOne, ...] | _OwnLayout | None, ...]
    outputs: tuple[tuple[AtLeastOne, ...] | _OwnLayout | None, ...] | None


def _pin(read: _Pin) -> OperatorStrategy:
    return OperatorStrategy.from_dict(read.model_dump())


class _Input(BaseModel, extra="forbid", strict=True):
    name: str
    shape: Sizes
    dtype: str


def _on_mesh(rows: tuple[OperatorRow, ...], info: ValidationInfo) -> tuple[OperatorRow, ...]:
    """The rows with their layouts on the mesh that was read before; none if it is invalid."""
    mesh = info.data.get("mesh")
    if mesh is None:
        return ()
    return tuple(
        replace(
            row,
            input_layouts=tuple(layout.on(mesh) for layout in row.input_layouts),
            output_layouts=tuple(layout.on(mesh) for layout in row.output_layouts),
        )
        for row in rows
    )


MEANINGS = tuple(each.name.lower() for each in Meaning)

_Redistribution = _schema(RedistributionRow, input=Natural | None)
_OtherChoice = _schema(
    OtherChoice,
    cost=Annotated[float, Field(allow_inf_nan=False)],
    turns=GenericAlias(dict, (Literal[KNOBS], Amount)),
)
_StageMemory = _schema(
    StageMemory,
    optional=("largest", "curve"),
    largest=_many(tuple[str, str, Natural]),
    curve=_many(tuple[str, Natural]),
)
_Operator = _schema(
    OperatorRow,
    optional=("seconds", "meanings"),
    meanings=_named(Literal[MEANINGS]),
    inputs=tuple[tuple[str, Sizes, str], ...],
    outputs=tuple[Sizes, ...],
    input_layouts=tuple[_LayoutOnMesh, ...],
    output_layouts=tuple[_LayoutOnMesh, ...],
    redistributions=_many(_Redistribution),
)
_Pipeline = _schema(
    PipelineSpec,
    stages=AtLeastOne,
    micro_batches=AtLeastOne,
    schedule=Literal[tuple(SCHEDULES)],
    chunks=AtLeastOne,
    chunk_of=dict[str, Natural],
    loss_reduction=Literal[REDUCTIONS],
)
_Step = _schema(
    StepRow,
    optional=("utilization", "parts"),
    utilization=Amount | None,
    parts=_many(_schema(TimePart, kind=Literal[KINDS])),
)
PlanFile = _model(
    PlanData,
    without=OF_THIS_RUN,
    optional=("memory_limit", "chunk_seconds", "saved_memory", "saved_choices", "saved_gap"),
    memory_limit=AtLeastOne | None,
    chunk_seconds=_many(_schema(ChunkSeconds, of_weight=Amount | None)),
    saved_memory=_schema(Memory, stages=_many(_StageMemory)) | None,
    saved_gap=Amount | None,
    saved_choices=_many(_schema(AxisChoice, alternatives=_many(_OtherChoice))),
    version=int,
    devices=AtLeastOne,
    mesh=Annotated[_Mesh, AfterValidator(partial(_made, Layout))],
    parameters=dict[str, tuple[Sizes, str]],
    inputs=tuple[Annotated[_Input, AfterValidator(dict)] | str | int | float | bool | None, ...],
    operators=Annotated[_many(_Operator), AfterValidator(_on_mesh)],
    returned=_many(_Redistribution),
    crossings=_many(_schema(CrossingRow)),
    sharding=_schema(OptimizerParallel, shard_size=int) | None,
    recompute=_named(_schema(Recompute)),
    pipeline=_Pipeline,
    step=_Step | None,
    pins=_named(Annotated[_Pin, AfterValidator(_pin)]),
)


def json_schema() -> str:
    """The JSON Schema of plan files, as `plan/plan.schema.json` publishes it."""
    title = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Shardwright plan"}
    return json.dumps({**PlanFile.model_json_schema(), **title}, indent=1) + "\n"


def read_plan(kind: type[AnyPlan], text: str, where: str) -> AnyPlan:
    """The plan in a file.

    Raises:
        PlanError: a field is missing, unknown, of another type or contradicts others; names the
            first one.
    """
    try:
        read: Any = PlanFile.model_validate_json(text, strict=True)
    except ValidationError as error:
        details = error.errors(include_url=False)[0]
        if details["type"] == "value_error":
            raise PlanError(f"{where}: {details['ctx']['error']}") from None
        key = ".".join(str(part) for part in details["loc"])
        got = "" if details["type"] == "missing" else f", not {shown(details['input'])}"
        raise PlanError(f"{where}: incomplete plan: {key}: {details['msg']}{got}") from None
    plan = _made(kind, read, without=("version", "devices"))
    check_agreement(plan, read.devices, where)
    return plan


def check_agreement(plan: PlanData, devices: int, where: str) -> None:
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
                yield f"{key}: there is no operator {shown(name)}"
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
            yield f"arrivals: there is no input {shown(name)}"
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
            yield f"{where}: there is no parameter {shown(name)}"
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


def _misfit(where: str, axes: CutAxes, shape: Shape, mesh: Layout) -> Iterator[str]:
    counts = TensorLayout(mesh, axes).shard_counts
    if len(counts) != len(shape) or any(n % c for n, c in zip(shape, counts, strict=False)):
        yield f"{where}: shards {shown(counts)} do not divide the shape {shown(shape)}"


def _no_dtype(where: str, name: str) -> Iterator[str]:
    if not isinstance(getattr(torch, name, None), torch.dtype):
        yield f"{where}: {shown(name)} is not a torch dtype"
