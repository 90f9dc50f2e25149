"""A plan as one strategy per operator, in the form in which users write them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardwright.constraints import Entry, OperatorStrategy
from shardwright.constraints.parse import StrategyParser
from shardwright.constraints.strategy_file import FileEntry
from shardwright.errors import StrategyError
from shardwright.graph.graph import Graph
from shardwright.layout.axes import Axes
from shardwright.layout.layout import TensorLayout, prime_mesh
from shardwright.plan.data import PlanData
from shardwright.plan.rows import OperatorRow


def strategies(plan: PlanData) -> dict[str, FileEntry]:
    """The strategies of operators and modules that reproduce the cuts of `plan`.

    Operators without a sharding rule are left out: they have no strategy.
    """
    entries = {
        row.name: FileEntry(plan.pins.get(row.name) or _strategy(plan, row))
        for row in plan.operators
        if row.rule is not None
    }
    for name, entry in _stored(plan):
        module, _, parameter = name.rpartition(".")
        of_module = entries.get(module, FileEntry(None))
        parameters = {**of_module.parameters, parameter: entry}
        entries[module] = replace(of_module, parameters=parameters)
    return entries


def _strategy(plan: PlanData, row: OperatorRow) -> OperatorStrategy:
    outputs = _outputs(plan, row)
    counts = OperatorStrategy(tuple(layout.shard_counts for layout in row.input_layouts), outputs)
    exact = OperatorStrategy(tuple(_placed(layout) for layout in row.input_layouts), outputs)
    if not row.cuts:
        return counts
    return counts if plan.graph is not None and _suffice(plan, plan.graph, counts, row) else exact


def _outputs(plan: PlanData, row: OperatorRow) -> tuple[Entry, ...] | None:
    """Layouts of the outputs where they are pinned, or where a factor appears only in them."""
    pinned = plan.outputs.get(row.name)
    if pinned is not None:
        return tuple(None if axes is None else TensorLayout(plan.mesh, axes) for axes in pinned)
    read = {axis for layout in row.input_layouts for axis in layout.sharded}
    cut = {plan.mesh.axis(axis) for axes in row.cuts.values() for axis in axes}
    return tuple(_placed(layout) for layout in row.output_layouts) if cut - read else None


def _placed(layout: TensorLayout) -> TensorLayout:
    """Only the sharding: users do not write that a value is a partial sum."""
    return replace(layout, partial=frozenset(), varying=frozenset())


def _suffice(plan: PlanData, graph: Graph, counts: OperatorStrategy, row: OperatorRow) -> bool:
    """Whether counts of shards alone are resolved to the same cuts."""
    if plan.mesh.device_matrix != prime_mesh(plan.devices).device_matrix:
        return False
    try:
        cuts = StrategyParser(graph.by_name[row.name], counts, plan.mesh).cuts()
    except StrategyError:
        return False
    return cuts == plan.cuts.get(row.name, {})


def _stored(plan: PlanData) -> Iterator[tuple[str, Entry]]:
    """The parameters whose storage layout differs from the one in which they are used."""
    used: dict[str, tuple[Axes, ...]] = {}
    for row in plan.operators:
        for (name, _, kind), layout in zip(row.inputs, row.input_layouts, strict=True):
            if kind == "parameter" and layout.sharded:
                used.setdefault(name, layout.axes)
    for name, axes in plan.storage.items():
        if axes != used.get(name, ((),) * len(axes)):
            yield name, TensorLayout(plan.mesh, axes)
