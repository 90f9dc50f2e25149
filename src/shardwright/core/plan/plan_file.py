"""Read and write a plan as JSON.

Schema, reader and writer are derived from the fields of the plan's dataclasses. This module defines
only exceptions: values that have another form in the file, and limits of values, such as a minimum.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import cache, partial, reduce
from operator import or_
from types import GenericAlias, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, BaseModel, Field, ValidationError, ValidationInfo, create_model

from shardwright.core.constraints import OperatorStrategy
from shardwright.core.cost.cluster import LOCAL
from shardwright.core.cost.dry_run import DryRunCache
from shardwright.core.cost.memory import StageMemory
from shardwright.core.cost.time_parts import KINDS, TimePart
from shardwright.core.layout.layout import DeviceMatrix, TensorLayout, interned_layout
from shardwright.core.micro_batches.batch_norms import BATCH_NORMS
from shardwright.core.partition.axis_meaning import Meaning
from shardwright.core.partition.decisions import OptimizerParallel
from shardwright.core.partition.pipeline_spec import REDUCTIONS, PipelineSpec
from shardwright.core.partition.schedules import SCHEDULES
from shardwright.core.plan.contradictions import check_consistent
from shardwright.core.plan.data import PlanData
from shardwright.core.plan.rows import OperatorRow, StepRow
from shardwright.core.search.choices import SCALED_QUANTITIES, OtherChoice
from shardwright.errors import PlanError, has_control_characters
from shardwright.plain_data import DIGEST, content_digest, parse_json, short_repr, warn_if_edited

AnyPlan = TypeVar("AnyPlan", bound=PlanData)
DataclassT = TypeVar("DataclassT")

VERSION = 3

FILE_KEYS = {
    "input_layouts": "read",
    "output_layouts": "made",
    "redistributions": "conversions",
    "chunk_of": "part_of",
    "saved_gap": "gap",
    "multipliers": "turns",
}
"""JSON keys that differ from the name of the dataclass field, by field name.

Renaming a field must not change the file format.
"""

UNSAVED_FIELDS = ("graph", "optimizer", "dry_runs", "timed_step")
"""Fields of a plan that are not saved. Without them, a loaded plan cannot predict its memory."""

OPTIONAL_FIELDS: dict[type, tuple[str, ...]] = {
    PlanData: ("memory_limit", "chunk_seconds", "saved_memory", "saved_choices", "saved_gap"),
    OperatorRow: ("seconds", "meanings"),
    StepRow: ("utilization", "parts"),
    StageMemory: ("largest", "curve"),
    PipelineSpec: ("batch_dims", "batch_norm"),
}
"""Fields that are missing in files of earlier releases, by dataclass."""

Natural = Annotated[int, Field(ge=0)]
AtLeastOne = Annotated[int, Field(ge=1)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Sizes = tuple[Natural, ...]


class _FileObject(BaseModel, extra="forbid", strict=True):
    """Base of the pydantic models of JSON objects: unknown keys and conversions are errors."""


class _FileDeviceMatrix(_FileObject):
    device_matrix: tuple[AtLeastOne, ...]
    alias_names: tuple[str, ...]


class _FileLayout(_FileObject):
    """A layout in a plan file: indices of axes of the plan's mesh."""

    axes: tuple[Sizes, ...]
    partial: Sizes = ()
    varying: Sizes = ()


class _FilePinnedLayout(_FileDeviceMatrix):
    """A pinned layout in a plan file, with its own mesh, in the form of `TensorLayout.to_dict`."""

    tensor_map: tuple[int | tuple[int, ...], ...]
    rank_list: Sizes | None = None
    partial: tuple[str, ...] = ()
    varying: tuple[str, ...] = ()


class _FilePin(_FileObject):
    inputs: tuple[tuple[AtLeastOne, ...] | _FilePinnedLayout | None, ...]
    outputs: tuple[tuple[AtLeastOne, ...] | _FilePinnedLayout | None, ...] | None


class _FileInput(_FileObject):
    name: str
    shape: Sizes
    dtype: str


def _to_device_matrix(parsed: _FileDeviceMatrix, info: ValidationInfo) -> DeviceMatrix:
    """Convert the mesh, and store the result in the validation context for `_to_layout`.

    `mesh` is the first field of a plan, so pydantic validates the mesh before all layouts.
    """
    context: Any = info.context
    # Raises `LayoutError`, a `ValueError`, which pydantic reports as an error of this field.
    context["mesh"] = mesh = DeviceMatrix(parsed.device_matrix, parsed.alias_names)
    return mesh


def _to_layout(parsed: _FileLayout, info: ValidationInfo) -> TensorLayout | None:
    """Convert a layout; None if the mesh is invalid, which pydantic reports as an error."""
    context: Any = info.context
    mesh = context.get("mesh")
    axes = (parsed.axes, frozenset(parsed.partial), frozenset(parsed.varying))
    # A plan has few different layouts, each in many rows.
    return None if mesh is None else interned_layout(mesh, *axes)


def _to_operator_strategy(parsed: _FilePin) -> OperatorStrategy:
    return OperatorStrategy.from_dict(parsed.model_dump())


_FILE_TYPES: dict[Any, Any] = {
    # Most numbers are counts, sizes, indices or seconds; `_FIELD_TYPES` has the others.
    int: Natural,
    float: Amount,
    DeviceMatrix: Annotated[_FileDeviceMatrix, AfterValidator(_to_device_matrix)],
    TensorLayout: Annotated[_FileLayout, AfterValidator(_to_layout)],
    OperatorStrategy: Annotated[_FilePin, AfterValidator(_to_operator_strategy)],
}
"""Pydantic annotations that validate and convert a field, by the field's type."""

MEANINGS = tuple(meaning.name.lower() for meaning in Meaning)

_FIELD_TYPES: dict[type, dict[str, Any]] = {
    PlanData: {
        "memory_limit": AtLeastOne | None,
        "inputs": tuple[
            Annotated[_FileInput, AfterValidator(dict)] | str | int | float | bool | None, ...
        ],
    },
    OperatorRow: {"meanings": GenericAlias(dict, (str, Literal[MEANINGS]))},
    TimePart: {"kind": Literal[KINDS]},
    OtherChoice: {
        # Negative for an alternative that is cheaper by itself.
        "cost": Annotated[float, Field(allow_inf_nan=False)],
        "multipliers": GenericAlias(dict, (Literal[SCALED_QUANTITIES], Amount)),
    },
    # Not `Natural`: -1 means all devices.
    OptimizerParallel: {"shard_size": int},
    PipelineSpec: {
        "stages": AtLeastOne,
        "micro_batches": AtLeastOne,
        "schedule": Literal[tuple(SCHEDULES)],
        "chunks": AtLeastOne,
        "loss_reduction": Literal[REDUCTIONS],
        "batch_dims": tuple[Natural | None, ...],
        "batch_norm": Literal[BATCH_NORMS],
    },
}
"""Pydantic annotations of fields with other limits than `_FILE_TYPES`, by dataclass and field."""


@cache
def _annotate_file_type(field_type: Any) -> Any:
    """Return the pydantic annotation that validates and converts a field of type `field_type`."""
    if field_type in _FILE_TYPES:
        return _FILE_TYPES[field_type]
    if isinstance(field_type, type) and is_dataclass(field_type):
        return Annotated[
            _create_pydantic_model(field_type), AfterValidator(partial(_to_dataclass, field_type))
        ]
    origin = get_origin(field_type)
    if origin is None:
        return field_type
    # `...` is the second argument of a tuple of any length.
    arguments = tuple(
        each if each is ... else _annotate_file_type(each) for each in get_args(field_type)
    )
    # `Optional[X]` has the origin `Union`, `X | None` has `UnionType`.
    if origin in (Union, UnionType):
        return reduce(or_, arguments)
    # The reader makes dictionaries, whatever mapping a field may have.
    return GenericAlias(dict if origin is Mapping else origin, arguments)


def _create_pydantic_model(dataclass: Any, **extra_keys: Any) -> type[BaseModel]:
    """Create the pydantic model that parses JSON objects of a dataclass.

    Args:
        dataclass: the dataclass.
        extra_keys: types of keys that are not fields of the dataclass, by key.
    """
    hints = get_type_hints(dataclass)
    limited, optional = _FIELD_TYPES.get(dataclass, {}), OPTIONAL_FIELDS.get(dataclass, ())
    definitions: Any = {
        name: (
            limited[name] if name in limited else _annotate_file_type(hints[name]),
            # `...` makes a field required in pydantic.
            Field(None if name in optional else ..., alias=key),
        )
        for name, key in _map_fields_to_file_keys(dataclass).items()
    }
    return create_model(dataclass.__name__, __base__=_FileObject, **definitions, **extra_keys)


@cache
def _map_fields_to_file_keys(dataclass: Any) -> dict[str, str]:
    """Return the keys of the file for the saved fields of a dataclass, by field."""
    # Also of `Plan`, which is written, while the schema is made of `PlanData`.
    unsaved = UNSAVED_FIELDS if issubclass(dataclass, PlanData) else ()
    names = (field.name for field in fields(dataclass) if field.name not in unsaved)
    return {name: FILE_KEYS.get(name, name) for name in names}


def _to_dataclass(dataclass: type[DataclassT], parsed: BaseModel) -> DataclassT:
    """Convert a parsed JSON object to a dataclass; missing fields get their defaults."""
    # Only keys in the file: the model's default of an optional field is None, not the dataclass's.
    names = parsed.model_fields_set - EXTRA_KEYS.keys()
    return dataclass(**{name: getattr(parsed, name) for name in names})


EXTRA_KEYS: dict[str, Any] = {
    "version": int,
    "devices": AtLeastOne,
    DIGEST: (str | None, None),
}
"""Types of the values of plan-file keys that are not fields of a plan, by key."""

PlanFile = _create_pydantic_model(PlanData, **EXTRA_KEYS)


def json_schema() -> str:
    """Return the JSON Schema of plan files, which `plan.schema.json` publishes."""
    title = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Shardwright plan"}
    return json.dumps({**PlanFile.model_json_schema(), **title}, indent=1) + "\n"


def plan_from_json(plan_type: type[AnyPlan], text: str, where: str) -> AnyPlan:
    """Read a plan from JSON.

    Args:
        plan_type: the class of the plan to return.
        text: the JSON text.
        where: path of the file, for errors.

    Raises:
        PlanError: if the file has another version, or a field is missing, unknown, of a wrong type
            or contradicts others; the message names the first invalid field.
    """
    data = parse_json(text, f"{where}: not a plan", PlanError)
    version = data.get("version") if isinstance(data, dict) else None
    # In most files all names are ASCII without escapes, and need no search.
    name = (
        next(_find_strings_with_control_characters(data), None)
        if re.search(r"\\[bfnrtu]|[^\0-~]", text)
        else None
    )
    if name is not None:
        raise PlanError(
            f"{where}: invalid plan: the name {short_repr(name)} has control characters\n"
            "plan the model again to write a valid file"
        )
    # Before validation, which would report a field that another version has not.
    if version != VERSION:
        raise PlanError(
            f"{where}: plan version {short_repr(version)} is not supported; the supported version"
            f" is {VERSION}\nrun `shardwright plan` again"
        )
    try:
        # From text, not from `data`: pydantic's strict mode takes lists for tuples only in JSON.
        parsed: Any = PlanFile.model_validate_json(text, strict=True, context={})
    except ValidationError as error:
        details = error.errors(include_url=False)[0]
        # Raised by a converter, such as `_to_device_matrix`, whose text is written for users.
        if details["type"] == "value_error":
            raise PlanError(f"{where}: {details['ctx']['error']}") from None
        key = ".".join(str(entry) for entry in details["loc"])
        got = "" if details["type"] == "missing" else f", not {short_repr(details['input'])}"
        raise PlanError(
            f"{where}: invalid plan: `{key}`: {details['msg']}{got}\nplan the model again to write"
            " a valid file"
        ) from None
    warn_if_edited(data, where)
    plan = _to_dataclass(plan_type, parsed)
    if plan.step is not None:
        # With the kernels of the plan's cluster, not with those of this machine.
        plan = replace(plan, dry_runs=DryRunCache(plan.step.cluster != LOCAL))
    # Last, as the fields that it compares must exist and have their types.
    check_consistent(plan, parsed.devices, where)
    return plan


def _find_strings_with_control_characters(data: Any) -> Iterator[str]:
    """Yield the strings in parsed JSON that contain control characters, which would break the lines
    of a table."""
    pending = [data]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            pending += [*value, *value.values()]
        elif isinstance(value, list):
            pending += value
        elif isinstance(value, str) and has_control_characters(value):
            yield value


def plan_to_json(plan: PlanData, **overrides: Any) -> str:
    """Write a plan as JSON.

    Args:
        plan: the plan.
        overrides: values to write in place of fields of the plan, by key in the file.
    """
    data = {"version": VERSION, "devices": plan.devices, **_to_json_object(plan), **overrides}
    content = json.dumps(data, indent=1, default=_to_json_object)
    # Of the parsed text, as the reader computes it: JSON has lists where the plan has tuples.
    digest = content_digest(json.loads(content))
    # The digest comes last, as it is one of all other keys.
    body = content.removesuffix("\n}")
    return f'{body},\n "{DIGEST}": "{digest}"\n}}'


def _to_json_object(value: Any) -> dict[str, Any]:
    """Convert a mesh, strategy, layout or other dataclass to a dictionary, without converting its
    values."""
    # Their form in files is also that of strategy files.
    if isinstance(value, DeviceMatrix | OperatorStrategy):
        return value.to_dict()
    if not isinstance(value, TensorLayout):
        return {
            key: getattr(value, name)
            for name, key in _map_fields_to_file_keys(value.__class__).items()
        }
    # Axes as indices; empty `partial` and `varying` are left out to keep files small.
    states = {"partial": sorted(value.partial), "varying": sorted(value.varying)}
    return {"axes": value.axes} | {key: axes for key, axes in states.items() if axes}
