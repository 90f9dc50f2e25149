"""Plans as JSON."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

from shardwright.core.constraints import OperatorStrategy
from shardwright.core.cost.memory import Memory
from shardwright.core.layout.layout import Layout, TensorLayout
from shardwright.core.plan.data import PlanData
from shardwright.core.plan.file_schema import FILE_KEYS, OF_THIS_RUN, AnyPlan, read_plan
from shardwright.core.search.choices import AxisChoice
from shardwright.errors import PlanError
from shardwright.text_files import parse_json, shown

VERSION = 3


def plan_to_json(
    plan: PlanData, memory: Memory | None, choices: tuple[AxisChoice, ...], gap: float | None
) -> str:
    """See `Plan.to_json`."""
    known = {"saved_memory": memory, "saved_choices": choices, "gap": gap}
    data = {"version": VERSION, "devices": plan.devices, **_fields(plan), **known}
    return json.dumps(data, indent=1, default=_as_json)


def plan_from_json(kind: type[AnyPlan], text: str, where: str) -> AnyPlan:
    """The plan in `text`; see `Plan.from_json`."""
    data = parse_json(text, f"{where}: not a plan", PlanError)
    version = data.get("version") if isinstance(data, dict) else None
    if version != VERSION:
        raise PlanError(
            f"{where}: plan version {shown(version)} is not supported, only version {VERSION} is; "
            "run `shardwright plan` again"
        )
    return read_plan(kind, text, where)


def _as_json(value: Any) -> dict[str, Any]:
    if isinstance(value, TensorLayout):
        return _layout_data(value)
    if isinstance(value, Layout | OperatorStrategy):
        return value.to_dict()
    return _fields(value)


def _fields(value: Any) -> dict[str, Any]:
    """Those of a dataclass, under their keys in the file."""
    left_out = OF_THIS_RUN if isinstance(value, PlanData) else ()
    names = (f.name for f in fields(value) if f.name not in left_out)
    return {FILE_KEYS.get(name, name): getattr(value, name) for name in names}


def _layout_data(layout: TensorLayout) -> dict[str, Any]:
    """Axes as indices; `partial` and `varying` only where there are any."""
    data: dict[str, Any] = {"axes": layout.axes}
    for key, axes in (("partial", layout.partial), ("varying", layout.varying)):
        if axes:
            data[key] = sorted(axes)
    return data
