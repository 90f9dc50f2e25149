"""Plans as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import Any, TypeVar

from shardwright.constraints import OperatorStrategy
from shardwright.cost.memory import Memory, StageMemory
from shardwright.cost.pipeline_timeline import ChunkSeconds
from shardwright.cost.time_parts import TimePart
from shardwright.errors import LayoutError, PlanError, StrategyError
from shardwright.layout.layout import Layout, TensorLayout
from shardwright.partition.decisions import OptimizerParallel, Recompute
from shardwright.partition.pipeline_spec import PipelineSpec
from shardwright.plan.data import PlanData
from shardwright.plan.file_schema import check_agreement, check_types
from shardwright.plan.rows import CrossingRow, OperatorRow, RedistributionRow, StepRow
from shardwright.search.choices import AxisChoice, OtherChoice
from shardwright.text_files import parse_json, shown

AnyPlan = TypeVar("AnyPlan", bound=PlanData)

VERSION = 3

ROW_KEYS = {
    "input_layouts": "read",
    "output_layouts": "made",
    "redistributions": "conversions",
}
"""Keys of an operator's row in the file, where they differ from the field; files keep them."""

OF_THIS_RUN = {"graph", "optimizer", "dry_runs", "pricing"}
"""Fields that are not written; without them, a plan from a file cannot predict its memory."""


def plan_to_json(
    plan: PlanData,
    memory: Memory | None,
    choices: tuple[AxisChoice, ...] = (),
    gap: float | None = None,
) -> str:
    """See `Plan.to_json`."""
    data = {f.name: getattr(plan, f.name) for f in fields(PlanData) if f.name not in OF_THIS_RUN}
    data["mesh"] = plan.mesh.to_dict()
    data["operators"] = [_row_data(row) for row in plan.operators]
    data["returned"] = [asdict(row) for row in plan.returned]
    data["crossings"] = [asdict(row) for row in plan.crossings]
    data["step"] = None if plan.step is None else asdict(plan.step)
    data["sharding"] = None if plan.sharding is None else asdict(plan.sharding)
    data["recompute"] = {name: asdict(mark) for name, mark in plan.recompute.items()}
    data["pipeline"] = asdict(plan.pipeline)
    data["pipeline"]["part_of"] = data["pipeline"].pop("chunk_of")
    data["chunk_seconds"] = [asdict(chunk) for chunk in plan.chunk_seconds]
    data["saved_memory"] = None if memory is None else asdict(memory)
    data["gap"] = gap
    del data["saved_gap"]
    data["saved_choices"] = [asdict(choice) for choice in choices]
    data["pins"] = {name: strategy.to_dict() for name, strategy in plan.pins.items()}
    return json.dumps({"version": VERSION, "devices": plan.devices, **data}, indent=1)


def plan_from_json(kind: type[AnyPlan], text: str, where: str) -> AnyPlan:
    """The plan in `text`; see `Plan.from_json`."""
    data = parse_json(text, f"{where}: not a plan", PlanError)
    version = data.get("version") if isinstance(data, dict) else None
    if version != VERSION:
        raise PlanError(
            f"{where}: plan version {shown(version)} is not supported, only version {VERSION} is; "
            "run `shardwright plan` again"
        )
    check_types(text, where)
    try:
        plan = kind(**_fields(data))
    except (LayoutError, StrategyError) as error:
        raise PlanError(f"{where}: {error}") from None
    check_agreement(plan, data["devices"], where)
    return plan


def _fields(data: dict[str, Any]) -> dict[str, Any]:
    known = {f.name for f in fields(PlanData)} - OF_THIS_RUN
    values = {key: data[key] for key in known & set(data)}
    values["mesh"] = Layout.from_dict(data["mesh"])
    values["cuts"] = {
        name: {f: tuple(axes) for f, axes in factors.items()}
        for name, factors in data["cuts"].items()
    }
    values["storage"] = {name: _tuples(axes) for name, axes in data["storage"].items()}
    values["outputs"] = {name: _tuples(entries) for name, entries in data["outputs"].items()}
    values["arrivals"] = {name: _tuples(axes) for name, axes in data["arrivals"].items()}
    values["step"] = None if data["step"] is None else _step_row(data["step"])
    values["chunk_seconds"] = tuple(ChunkSeconds(**c) for c in data.get("chunk_seconds", ()))
    memory = data.get("saved_memory")
    if memory is not None:
        stages = tuple(
            StageMemory(**{k: _tuples(v) for k, v in stage.items()}) for stage in memory["stages"]
        )
        values["saved_memory"] = Memory(stages, memory["optimizer"])
    values["saved_choices"] = tuple(map(_axis_choice, data.get("saved_choices", ())))
    values["saved_gap"] = data.get("gap")
    sharding = data["sharding"]
    values["sharding"] = None if sharding is None else OptimizerParallel(**sharding)
    values["recompute"] = {name: Recompute(**mark) for name, mark in data["recompute"].items()}
    pipeline = {**data["pipeline"], "chunk_of": data["pipeline"]["part_of"]}
    del pipeline["part_of"]
    values["pipeline"] = PipelineSpec(**pipeline)
    values["pins"] = {n: OperatorStrategy.from_dict(pin) for n, pin in data["pins"].items()}
    values["parameters"] = {name: _tuples(entry) for name, entry in data["parameters"].items()}
    values["inputs"] = tuple(
        {**leaf, "shape": tuple(leaf["shape"])} if isinstance(leaf, dict) else leaf
        for leaf in data["inputs"]
    )
    rows = data["operators"]
    values["operators"] = tuple(_operator_row(row, values["mesh"]) for row in rows)
    values["returned"] = tuple(_redistribution_row(row) for row in data["returned"])
    values["crossings"] = tuple(
        CrossingRow(**{**row, "values": tuple(row["values"])}) for row in data["crossings"]
    )
    return values


def _row_data(row: OperatorRow) -> dict[str, Any]:
    data = {f.name: getattr(row, f.name) for f in fields(row)}
    for key in ("input_layouts", "output_layouts"):
        data[key] = [_layout_data(layout) for layout in data[key]]
    data["redistributions"] = [asdict(one) for one in row.redistributions]
    return {ROW_KEYS.get(name, name): value for name, value in data.items()}


def _operator_row(data: dict[str, Any], mesh: Layout) -> OperatorRow:
    names = {ROW_KEYS.get(f.name, f.name): f.name for f in fields(OperatorRow)}
    values = {names[key]: value for key, value in data.items()}
    for key in ("inputs", "outputs"):
        values[key] = _tuples(values[key])
    for key in ("input_layouts", "output_layouts"):
        values[key] = tuple(_layout(layout, mesh) for layout in values[key])
    values["cuts"] = {factor: tuple(axes) for factor, axes in data["cuts"].items()}
    values["redistributions"] = tuple(_redistribution_row(r) for r in values["redistributions"])
    return OperatorRow(**values)


def _step_row(data: dict[str, Any]) -> StepRow:
    parts = (TimePart(**{**part, "axes": tuple(part["axes"])}) for part in data.get("parts", ()))
    return StepRow(**{**data, "parts": tuple(parts)})


def _axis_choice(data: dict[str, Any]) -> AxisChoice:
    others = tuple(OtherChoice(**each) for each in data["alternatives"])
    return AxisChoice(**{**data, "operators": tuple(data["operators"]), "alternatives": others})


def _redistribution_row(data: dict[str, Any]) -> RedistributionRow:
    return RedistributionRow(**{**data, "steps": tuple(data["steps"])})


def _layout_data(layout: TensorLayout) -> dict[str, Any]:
    """Axes as indices; `partial` and `varying` only where there are any."""
    data: dict[str, Any] = {"axes": layout.axes}
    for key, axes in (("partial", layout.partial), ("varying", layout.varying)):
        if axes:
            data[key] = sorted(axes)
    return data


def _layout(data: dict[str, Any], mesh: Layout) -> TensorLayout:
    partial, varying = data.get("partial", ()), data.get("varying", ())
    return TensorLayout(mesh, _tuples(data["axes"]), frozenset(partial), frozenset(varying))


def _tuples(data: Any) -> Any:
    return tuple(_tuples(item) for item in data) if isinstance(data, list) else data
