"""The JSON file of a plan.

The dataclasses of a plan describe its file too: schema, reader and writer are derived from their
fields. Only what a file holds in another form, or within limits, stands here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache, partial, reduce
from operator import or_
from types import GenericAlias, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, BaseModel, Field, ValidationError, ValidationInfo, create_model

from shardwright.core.constraints import OperatorStrategy
from shardwright.core.cost.memory import StageMemory
from shardwright.core.cost.time_parts import KINDS, TimePart
from shardwright.core.layout.layout import DeviceMatrix, TensorLayout, one_layout
from shardwright.core.partition.axis_meaning import Meaning
from shardwright.core.partition.decisions import OptimizerParallel
from shardwright.core.partition.pipeline_spec import REDUCTIONS, PipelineSpec
from shardwright.core.partition.schedules import SCHEDULES
from shardwright.core.plan.contradictions import check_consistent
from shardwright.core.plan.data import PlanData
from shardwright.core.plan.rows import OperatorRow, StepRow
from shardwright.core.search.choices import KNOBS, OtherChoice
from shardwright.errors import PlanError
from shardwright.text_files import parse_json, short_repr

AnyPlan = TypeVar("AnyPlan", bound=PlanData)
Made = TypeVar("Made")

VERSION = 3

FILE_KEYS = {
    "input_layouts": "read",
    "output_layouts": "made",
    "redistributions": "conversions",
    "chunk_of": "part_of",
    "saved_gap": "gap",
}
"""Keys in the file, where they differ from the field; files keep them."""

OF_THIS_RUN = ("graph", "optimizer", "dry_runs", "pricing")
"""Fields of a plan that are not written; without them, its memory cannot be predicted again."""

ADDED_LATER: dict[type, tuple[str, ...]] = {
    PlanData: ("memory_limit", "chunk_seconds", "saved_memory", "saved_choices", "saved_gap"),
    OperatorRow: ("seconds", "meanings"),
    StepRow: ("utilization", "parts"),
    StageMemory: ("largest", "curve"),
}
"""Fields that files of earlier releases lack."""

Natural = Annotated[int, Field(ge=0)]
AtLeastOne = Annotated[int, Field(ge=1)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Sizes = tuple[Natural, ...]


class _InFile(BaseModel, extra="forbid", strict=True):
    """An object in the file."""


class _Mesh(_InFile):
    device_matrix: tuple[AtLeastOne, ...]
    alias_names: tuple[str, ...]


class _LayoutOnMesh(_InFile):
    """A layout on the mesh of the plan, as axes."""

    axes: tuple[Sizes, ...]
    partial: Sizes = ()
    varying: Sizes = ()


class _OwnLayout(_Mesh):
    """A layout on a mesh of its own, as `TensorLayout.to_dict` writes it."""

    tensor_map: tuple[int | tuple[int, ...], ...]
    rank_list: Sizes | None = None
    partial: tuple[str, ...] = ()
    varying: tuple[str, ...] = ()


class _Pin(_InFile):
    inputs: tuple[tuple[AtLeastOne, ...] | _OwnLayout | None, ...]
    outputs: tuple[tuple[AtLeastOne, ...] | _OwnLayout | None, ...] | None


class _Input(_InFile):
    name: str
    shape: Sizes
    dtype: str


def _mesh(read: _Mesh, info: ValidationInfo) -> DeviceMatrix:
    """The mesh, on which the layouts that are read after it are."""
    context: Any = info.context
    context["mesh"] = mesh = DeviceMatrix(read.device_matrix, read.alias_names)
    return mesh


def _on_mesh(read: _LayoutOnMesh, info: ValidationInfo) -> TensorLayout | None:
    """The layout; None if the mesh is invalid, which is the error that is reported."""
    context: Any = info.context
    mesh = context.get("mesh")
    axes = (read.axes, frozenset(read.partial), frozenset(read.varying))
    return None if mesh is None else one_layout(mesh, *axes)


def _pin(read: _Pin) -> OperatorStrategy:
    return OperatorStrategy.from_dict(read.model_dump())


_IN_FILE: dict[Any, Any] = {
    int: Natural,
    float: Amount,
    DeviceMatrix: Annotated[_Mesh, AfterValidator(_mesh)],
    TensorLayout: Annotated[_LayoutOnMesh, AfterValidator(_on_mesh)],
    OperatorStrategy: Annotated[_Pin, AfterValidator(_pin)],
}
"""What the file holds of a value, by its type: numbers are at least 0."""

MEANINGS = tuple(each.name.lower() for each in Meaning)

_LIMITED: dict[type, dict[str, Any]] = {
    PlanData: {
        "memory_limit": AtLeastOne | None,
        "inputs": tuple[
            Annotated[_Input, AfterValidator(dict)] | str | int | float | bool | None, ...
        ],
    },
    OperatorRow: {"meanings": GenericAlias(dict, (str, Literal[MEANINGS]))},
    TimePart: {"kind": Literal[KINDS]},
    OtherChoice: {
        "cost": Annotated[float, Field(allow_inf_nan=False)],
        "turns": GenericAlias(dict, (Literal[KNOBS], Amount)),
    },
    OptimizerParallel: {"shard_size": int},
    PipelineSpec: {
        "stages": AtLeastOne,
        "micro_batches": AtLeastOne,
        "schedule": Literal[tuple(SCHEDULES)],
        "chunks": AtLeastOne,
        "loss_reduction": Literal[REDUCTIONS],
    },
}
"""Fields whose values have other limits than their types."""


@cache
def _in_file(kind: Any) -> Any:
    """The type of what the file holds of values of the type `kind`."""
    if kind in _IN_FILE:
        return _IN_FILE[kind]
    if isinstance(kind, type) and is_dataclass(kind):
        return Annotated[_model(kind), AfterValidator(partial(_made, kind))]
    origin = get_origin(kind)
    if origin is None:
        return kind
    parts = tuple(each if each is ... else _in_file(each) for each in get_args(kind))
    if origin in (Union, UnionType):
        return reduce(or_, parts)
    return GenericAlias(dict if origin is Mapping else origin, parts)


def _model(of: Any, **more: Any) -> type[BaseModel]:
    """What the file holds of the dataclass `of`, under its keys there, and `more`."""
    hints, limited, optional = get_type_hints(of), _LIMITED.get(of, {}), ADDED_LATER.get(of, ())
    definitions: Any = {
        name: (
            limited[name] if name in limited else _in_file(hints[name]),
            Field(None if name in optional else ..., alias=key),
        )
        for name, key in _keys(of).items()
    }
    return create_model(of.__name__, __base__=_InFile, **definitions, **more)


@cache
def _keys(of: Any) -> dict[str, str]:
    """The fields of a dataclass that are in the file, with their keys there."""
    left_out = OF_THIS_RUN if issubclass(of, PlanData) else ()
    names = (field.name for field in fields(of) if field.name not in left_out)
    return {name: FILE_KEYS.get(name, name) for name in names}


def _made(of: type[Made], read: BaseModel) -> Made:
    """The value of the dataclass `of` that was read."""
    return of(**{name: getattr(read, name) for name in read.model_fields_set - BESIDE.keys()})


BESIDE: dict[str, Any] = {"version": int, "devices": AtLeastOne}
"""What a file says beside the fields of the plan."""

PlanFile = _model(PlanData, **BESIDE)


def json_schema() -> str:
    """The JSON Schema of plan files, as `plan.schema.json` publishes it."""
    title = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Shardwright plan"}
    return json.dumps({**PlanFile.model_json_schema(), **title}, indent=1) + "\n"


def plan_from_json(kind: type[AnyPlan], text: str, where: str) -> AnyPlan:
    """The plan in `text`.

    Raises:
        PlanError: it is of another version, or a field is missing, unknown, of another type or
            contradicts others; names the first one.
    """
    data = parse_json(text, f"{where}: not a plan", PlanError)
    version = data.get("version") if isinstance(data, dict) else None
    if version != VERSION:
        raise PlanError(
            f"{where}: plan version {short_repr(version)} is not supported, only version {VERSION}"
            " is; run `shardwright plan` again"
        )
    try:
        read: Any = PlanFile.model_validate_json(text, strict=True, context={})
    except ValidationError as error:
        details = error.errors(include_url=False)[0]
        if details["type"] == "value_error":
            raise PlanError(f"{where}: {details['ctx']['error']}") from None
        key = ".".join(str(part) for part in details["loc"])
        got = "" if details["type"] == "missing" else f", not {short_repr(details['input'])}"
        raise PlanError(f"{where}: incomplete plan: {key}: {details['msg']}{got}") from None
    plan = _made(kind, read)
    check_consistent(plan, read.devices, where)
    return plan


def plan_to_json(plan: PlanData, **known: Any) -> str:
    """The plan as JSON, with values that are `known` now for some of its keys."""
    data = {"version": VERSION, "devices": plan.devices, **_as_json(plan), **known}
    return json.dumps(data, indent=1, default=_as_json)


def _as_json(value: Any) -> dict[str, Any]:
    if isinstance(value, DeviceMatrix | OperatorStrategy):
        return value.to_dict()
    if not isinstance(value, TensorLayout):
        return {key: getattr(value, name) for name, key in _keys(value.__class__).items()}
    # Axes as indices; `partial` and `varying` only where there are any.
    marks = {"partial": sorted(value.partial), "varying": sorted(value.varying)}
    return {"axes": value.axes} | {key: axes for key, axes in marks.items() if axes}
