"""Plans as JSON text."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import Any

from shardwright.errors import PlanError
from shardwright.layout import Layout
from shardwright.plan.plan import Plan
from shardwright.plan.rows import ConversionRow, OperatorRow
from shardwright.strategy import OperatorStrategy

VERSION = 1


def written(plan: Plan) -> str:
    """See `Plan.to_json`."""
    data = {f.name: getattr(plan, f.name) for f in fields(Plan) if f.name != "graph"}
    data["mesh"] = {
        "device_matrix": plan.mesh.device_matrix,
        "alias_names": plan.mesh.alias_names,
    }
    data["operators"] = [asdict(row) for row in plan.operators]
    data["pins"] = {name: strategy.to_dict() for name, strategy in plan.pins.items()}
    return json.dumps({"version": VERSION, "devices": plan.devices, **data}, indent=1)


def read(text: str, where: str) -> Plan:
    """See `Plan.from_json`."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise PlanError(f"{where}: not a plan, it is not JSON: {error}") from None
    if not isinstance(data, dict) or data.get("version") != VERSION:
        found = data.get("version") if isinstance(data, dict) else None
        raise PlanError(
            f"{where}: a plan of version {found!r}; this Shardwright reads version {VERSION}: "
            "make the plan again with `shardwright plan`"
        )
    try:
        return _plan(data)
    except (KeyError, TypeError) as error:
        raise PlanError(f"{where}: not a complete plan: {error!r}") from None


def _plan(data: dict[str, Any]) -> Plan:
    known = {f.name for f in fields(Plan)} - {"graph"}
    values = {key: data[key] for key in known}
    mesh = data["mesh"]
    values["mesh"] = Layout(tuple(mesh["device_matrix"]), tuple(mesh["alias_names"]))
    values["cuts"] = {
        name: {f: tuple(axes) for f, axes in factors.items()}
        for name, factors in data["cuts"].items()
    }
    values["storage"] = {name: _tuples(axes) for name, axes in data["storage"].items()}
    values["outputs"] = {name: _tuples(left) for name, left in data["outputs"].items()}
    values["pins"] = {n: OperatorStrategy.from_dict(pin) for n, pin in data["pins"].items()}
    values["parameters"] = {name: _tuples(entry) for name, entry in data["parameters"].items()}
    values["inputs"] = tuple(
        {**leaf, "shape": tuple(leaf["shape"])} if isinstance(leaf, dict) else leaf
        for leaf in data["inputs"]
    )
    values["operators"] = tuple(_operator_row(row) for row in data["operators"])
    return Plan(**values)


def _operator_row(data: dict[str, Any]) -> OperatorRow:
    tupled = {key: _tuples(data[key]) for key in ("inputs", "outputs", "strategy")}
    cuts = {factor: tuple(axes) for factor, axes in data["cuts"].items()}
    conversions = tuple(
        ConversionRow(**{**row, "steps": tuple(row["steps"])}) for row in data["conversions"]
    )
    return OperatorRow(**{**data, **tupled, "cuts": cuts, "conversions": conversions})


def _tuples(data: Any) -> Any:
    return tuple(_tuples(item) for item in data) if isinstance(data, list) else data
