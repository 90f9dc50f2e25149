"""What was decided, as data: one `Plan` holds every cut and every parameter's storage.

Search writes plans, lowering reads them, and neither knows the other. A plan is saved as JSON,
printed as a table and explained operator by operator, without the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from shardwright.communication import (
    NO_OUTPUTS,
    Communication,
    Outputs,
    Storage,
    Transfer,
    communication,
)
from shardwright.errors import PlanError
from shardwright.graph.graph import Graph, Op, Value
from shardwright.layout import Layout, TensorLayout
from shardwright.rules import rule
from shardwright.rules.rule import Cuts
from shardwright.strategy import OperatorStrategy

VERSION = 1

Shape = tuple[int, ...]
Strategy = tuple[tuple[int, ...], ...]
NO_PINS: Mapping[str, OperatorStrategy] = MappingProxyType({})


@dataclass(frozen=True)
class ConversionRow:
    """A value's way from the layout in which it is made to the one in which it is read.

    Args:
        value: its name; empty for the all-reduces inside an operator.
        steps: the collectives, in words.
        forward_bytes, backward_bytes: what one device sends for the steps that no other consumer
            of the value has asked for before.
        shared: whether some step is shared with an operator above.
    """

    value: str
    steps: tuple[str, ...]
    forward_bytes: int
    backward_bytes: int
    shared: bool


@dataclass(frozen=True)
class OperatorRow:
    """What was decided about one operator.

    Args:
        name: module path.
        operator: what it computes, `aten.linear`.
        rule: its sharding rule in words; None if it has none and is computed whole everywhere.
        inputs: name, shape and kind of each tensor input.
        outputs: shapes.
        cuts: factor → the axes that cut it, by name.
        strategy: in how many equal parts each dimension of each input is cut.
        conversions: of its inputs, and all-reduces inside it.
        source: the user's line.
        main: whether the search decided it by cost.
        pinned: whether the user said how it is cut.
    """

    name: str
    operator: str
    rule: str | None
    inputs: tuple[tuple[str, Shape, str], ...]
    outputs: tuple[Shape, ...]
    cuts: dict[str, tuple[str, ...]]
    strategy: Strategy
    conversions: tuple[ConversionRow, ...]
    source: str
    main: bool
    pinned: bool = False

    @property
    def bytes(self) -> int:
        """Bytes that one device sends for the conversions of its inputs, forward and backward."""
        return sum(c.forward_bytes + c.backward_bytes for c in self.conversions)


@dataclass(frozen=True)
class Plan:
    """Everything decided for one model on a number of devices.

    Args:
        mesh: the device matrix, outermost axis first.
        mode, options: how it was found.
        cuts: for each cut operator its factors with the axes that cut them.
        storage: for each parameter the axes that cut each dimension of what a device keeps.
        outputs: for operators that are told how to leave their outputs, the axes of each dimension.
        pins: what users said of operators, by name.
        parameters: shape and dtype of each, by name.
        inputs: name, shape and dtype of each input tensor; other leaves as they are.
        structure: how the inputs nest, as PyTorch's pytrees write it.
        fingerprint: of the graph that it was made for.
        operators: one row each, in order.
        forward_bytes, backward_bytes: that one device sends in one step.
        search_seconds, capture_seconds: what planning took.
        graph: the captured model; a plan from a file has none until `parallelize` captures it.
    """

    mesh: Layout
    mode: str
    options: dict[str, Any]
    cuts: dict[str, dict[str, tuple[int, ...]]]
    storage: dict[str, tuple[tuple[int, ...], ...]]
    outputs: dict[str, tuple[tuple[tuple[int, ...], ...] | None, ...]]
    parameters: dict[str, tuple[Shape, str]]
    inputs: tuple[Any, ...]
    structure: str
    fingerprint: str
    operators: tuple[OperatorRow, ...]
    forward_bytes: int
    backward_bytes: int
    training: bool = True
    pins: dict[str, OperatorStrategy] = field(default_factory=dict)
    search_seconds: float = 0.0
    capture_seconds: float = 0.0
    graph: Graph | None = field(default=None, compare=False, repr=False)

    @property
    def devices(self) -> int:
        return self.mesh.num_devices

    @property
    def bytes(self) -> int:
        """Bytes that one device sends in one training step."""
        return self.forward_bytes + self.backward_bytes

    @property
    def strategies(self) -> dict[str, Strategy]:
        """For each operator in how many parts each dimension of each input is cut, as torch stores
        them: a linear layer's weight is (out_features, in_features)."""
        return {row.name: row.strategy for row in self.operators}

    @property
    def without_rule(self) -> tuple[str, ...]:
        """Operators that have no sharding rule; each device computes them whole."""
        return tuple(row.name for row in self.operators if row.rule is None)

    @property
    def parameter_bytes(self) -> int:
        """Bytes of parameters that one device keeps."""
        total = 0
        for name, (shape, dtype) in self.parameters.items():
            layout = TensorLayout(self.mesh, self.storage[name])
            numel = 1
            for extent in layout.shard_shape(shape):
                numel *= extent
            total += numel * _itemsize(dtype)
        return total

    def row(self, name: str) -> OperatorRow:
        """What was decided about the operator `name`.

        Raises:
            PlanError: if there is none of that name; lists the nearest.
        """
        for row in self.operators:
            if row.name == name:
                return row
        raise PlanError(_unknown(name, [row.name for row in self.operators]))

    def explain(self, name: str) -> str:
        """How the operator `name` is cut, where its inputs come from and what they cost."""
        from shardwright.plan_table import explanation

        return explanation(self, self.row(name))

    def __str__(self) -> str:
        from shardwright.plan_table import text

        return text(self)

    def text(self, every: bool = False) -> str:
        """The table; with `every` also operators that only follow their neighbours."""
        from shardwright.plan_table import text

        return text(self, every)

    def to_json(self) -> str:
        """The plan as JSON text; it holds everything but the captured graph."""
        data = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "graph"}
        data["mesh"] = {
            "device_matrix": self.mesh.device_matrix,
            "alias_names": self.mesh.alias_names,
        }
        data["operators"] = [asdict(row) for row in self.operators]
        data["pins"] = {name: strategy.to_dict() for name, strategy in self.pins.items()}
        return json.dumps({"version": VERSION, "devices": self.devices, **data}, indent=1)

    @classmethod
    def from_json(cls, text: str, where: str = "plan") -> Plan:
        """The plan that `to_json` wrote.

        Raises:
            PlanError: if the text is no plan, or one of another version.
        """
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
            return _from_data(cls, data)
        except (KeyError, TypeError) as error:
            raise PlanError(f"{where}: not a complete plan: {error!r}") from None

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON."""
        Path(path).write_text(self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Reads a plan that was saved.

        Raises:
            PlanError: if the file is missing or holds no plan of this version.
        """
        if not Path(path).is_file():
            raise PlanError(f"{path}: there is no such file")
        return cls.from_json(Path(path).read_text(), str(path))

    def check_fits(self, graph: Graph) -> None:
        """Raises:
        PlanError: if `graph` is not the model that the plan was made for; says what differs.
        """
        if graph.fingerprint == self.fingerprint:
            return
        raise PlanError(
            f"the plan was made for another model (fingerprint {self.fingerprint}, "
            f"this one has {graph.fingerprint}): {_difference(self, graph)}; plan this model"
        )


def make_plan(
    graph: Graph,
    mesh: Layout,
    cuts: Mapping[str, Cuts],
    storage: Storage,
    *,
    mode: str,
    options: dict[str, Any],
    search_seconds: float,
    training: bool,
    outputs: Outputs = NO_OUTPUTS,
    pins: Mapping[str, OperatorStrategy] = NO_PINS,
) -> Plan:
    """Joins what a search decided with what follows from it: conversions and their bytes."""
    flow = communication(graph, mesh, cuts, storage, outputs)
    leaves = tuple(
        {"name": leaf.name, "shape": leaf.shape, "dtype": _dtype(leaf)}
        if isinstance(leaf, Value)
        else leaf
        for leaf in graph.inputs
    )
    return Plan(
        mesh=mesh,
        mode=mode,
        options=options,
        cuts={
            name: {f: tuple(axes) for f, axes in factors.items() if axes}
            for name, factors in cuts.items()
            if any(factors.values())
        },
        storage={name: tuple(axes) for name, axes in storage.items()},
        outputs=dict(outputs),
        pins=dict(pins),
        parameters={v.name: (v.shape, _dtype(v)) for v in graph.parameters},
        inputs=leaves,
        structure=pytree.treespec_dumps(graph.in_spec),
        fingerprint=graph.fingerprint,
        operators=_rows(graph, mesh, cuts, flow, pins),
        forward_bytes=flow.forward_bytes,
        backward_bytes=flow.backward_bytes,
        training=training,
        search_seconds=search_seconds,
        capture_seconds=graph.capture_seconds,
        graph=graph,
    )


def _rows(
    graph: Graph,
    mesh: Layout,
    cuts: Mapping[str, Cuts],
    flow: Communication,
    pins: Mapping[str, OperatorStrategy],
) -> tuple[OperatorRow, ...]:
    seen: set[int] = set()
    rows = (_row(op, mesh, cuts.get(op.name, {}), flow, seen) for op in graph.ops)
    return tuple(replace(row, pinned=row.name in pins) for row in rows)


def _row(op: Op, mesh: Layout, cuts: Cuts, flow: Communication, seen: set[int]) -> OperatorRow:
    found = rule(op)
    conversions = []
    for index, value in enumerate(op.inputs):
        route = flow.routes[op.name, index]
        if route:
            conversions.append(_conversion(value, route, seen))
    for value in op.outputs:
        if value in flow.left:
            conversions.append(_conversion(value, flow.left[value], seen))
    if op.name in flow.reductions:
        conversions.append(_inside(op, flow))
    return OperatorRow(
        name=op.name,
        operator=_operator_name(op),
        rule=str(found) if found is not None else None,
        inputs=tuple((v.name, v.shape, v.kind.value) for v in op.inputs),
        outputs=tuple(v.shape for v in op.outputs),
        cuts={f: tuple(mesh.alias_names[a] for a in axes) for f, axes in cuts.items() if axes},
        strategy=tuple(layout.shard_counts for layout in flow.read[op.name]),
        conversions=tuple(conversions),
        source=op.source,
        main=found is not None and found.main is not None,
    )


def _inside(op: Op, flow: Communication) -> ConversionRow:
    """The all-reduces that the operator makes itself."""
    steps, forward, backward = [], 0, 0
    for inner in flow.reductions[op.name]:
        over = "".join(flow.mesh.alias_names[a] for a in inner.axes)
        steps.append(f"all_reduce {inner.reduction.kind} over {over}")
        there, back = inner.bytes(flow.mesh, op.output.requires_grad)
        forward, backward = forward + there, backward + back
    return ConversionRow("", tuple(steps), forward, backward, False)


def _conversion(value: Value, route: tuple[Transfer, ...], seen: set[int]) -> ConversionRow:
    fresh = [t for t in route if id(t) not in seen]
    seen.update(id(t) for t in fresh)
    return ConversionRow(
        value=value.name,
        steps=tuple(describe(t) for t in route),
        forward_bytes=sum(t.forward_bytes for t in fresh),
        backward_bytes=sum(t.backward_bytes for t in fresh),
        shared=len(fresh) < len(route),
    )


def describe(transfer: Transfer) -> str:
    """A step in words: `all_gather dim 1 over bc / reduce_scatter`."""
    step = transfer.step
    names = step.source.layout.alias_names
    words = [step.kind]
    if step.dim is not None:
        words.append(f"dim {step.dim}")
    if step.to_dim is not None:
        words.append(f"to dim {step.to_dim}")
    words.append(f"over {''.join(names[a] for a in step.axes)}")
    if transfer.differentiable and step.backward is not None:
        words.append(f"/ {step.backward}")
    return " ".join(words)


def _from_data(cls: type[Plan], data: dict[str, Any]) -> Plan:
    known = {f.name for f in fields(cls)} - {"graph"}
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
    return cls(**values)


def _operator_row(data: dict[str, Any]) -> OperatorRow:
    tupled = {key: _tuples(data[key]) for key in ("inputs", "outputs", "strategy")}
    cuts = {factor: tuple(axes) for factor, axes in data["cuts"].items()}
    conversions = tuple(
        ConversionRow(**{**row, "steps": tuple(row["steps"])}) for row in data["conversions"]
    )
    return OperatorRow(**{**data, **tupled, "cuts": cuts, "conversions": conversions})


def _tuples(data: Any) -> Any:
    return tuple(_tuples(item) for item in data) if isinstance(data, list) else data


def _difference(plan: Plan, graph: Graph) -> str:
    """The first thing in which the plan's model and `graph` differ."""
    mine = {v.name: (v.shape, _dtype(v)) for v in graph.parameters}
    for name, entry in plan.parameters.items():
        if name not in mine:
            return f"it has no parameter {name!r}"
        if mine[name] != entry:
            return f"parameter {name!r} is {mine[name]}, planned as {entry}"
    extra = [name for name in mine if name not in plan.parameters]
    if extra:
        return f"parameter {extra[0]!r} is not in the plan"
    for index, (row, op) in enumerate(zip(plan.operators, graph.ops, strict=False)):
        if row.name != op.name or row.operator != _operator_name(op):
            return (
                f"operator {index} is {op.name!r} ({_operator_name(op)}), "
                f"planned as {row.name!r} ({row.operator})"
            )
        shapes = tuple(v.shape for v in op.outputs)
        if shapes != row.outputs:
            return f"operator {op.name!r} gives {shapes}, planned as {row.outputs}"
    if len(plan.operators) != len(graph.ops):
        return f"it has {len(graph.ops)} operators, planned {len(plan.operators)}"
    return "its operators have other arguments"


def _operator_name(op: Op) -> str:
    target = str(op.target) if hasattr(op.target, "_schema") else op.target.__name__
    return target.removesuffix(".default")


def _dtype(value: Value) -> str:
    return str(value.dtype).removeprefix("torch.")


def _itemsize(dtype: str) -> int:
    size: int = getattr(torch, dtype).itemsize
    return size


def _unknown(name: str, known: list[str]) -> str:
    near = get_close_matches(name, known, n=3, cutoff=0.3)
    hint = f"; nearest: {', '.join(near)}" if near else ""
    return f"the plan has no operator {name!r}{hint}"
