"""A plan as one strategy per operator, in the form in which users write them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardwright.core.constraints import Entry, OperatorStrategy
from shardwright.core.constraints.parse import StrategyParser
from shardwright.core.constraints.strategy_file import FileEntry
from shardwright.core.layout.axes import Axes
from shardwright.core.layout.layout import TensorLayout
from shardwright.core.layout.prime_mesh import prime_mesh
from shardwright.core.partition.fold_axes import split_axes
from shardwright.core.partition.partitioned import Partitioned
from shardwright.core.plan.data import PlanData
from shardwright.core.plan.rows import OperatorRow
from shardwright.errors import StrategyError


def strategies(plan: PlanData) -> dict[str, FileEntry]:
    """The strategies of operators and modules that reproduce the cuts of `plan`.

    Operators without a sharding rule are left out: they have no strategy.
    """
    primes = _on_prime_axes(plan)
    entries = {
        row.name: FileEntry(plan.pins.get(row.name) or _strategy(plan, row, primes))
        for row in plan.operators
        if row.rule is not None
    }
    for name, entry in _stored(plan):
        module, _, parameter = name.rpartition(".")
        of_module = entries.get(module, FileEntry(None))
        parameters = {**of_module.parameters, parameter: entry}
        entries[module] = replace(of_module, parameters=parameters)
    return entries


def _strategy(plan: PlanData, row: OperatorRow, primes: Partitioned | None) -> OperatorStrategy:
    outputs = _outputs(plan, row)
    counts = OperatorStrategy(tuple(layout.shard_counts for layout in row.input_layouts), outputs)
    exact = OperatorStrategy(tuple(_placed(layout) for layout in row.input_layouts), outputs)
    return counts if not row.cuts or _suffice(row, counts, primes) else exact


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


def _on_prime_axes(plan: PlanData) -> Partitioned | None:
    """What was planned, on the device matrix on which counts of shards are resolved; None if there
    is another or no graph."""
    mesh, decisions = split_axes(plan.mesh, plan.decisions)
    if plan.graph is None or mesh.device_matrix != prime_mesh(plan.devices).device_matrix:
        return None
    return Partitioned(plan.graph, mesh, decisions)


def _suffice(row: OperatorRow, counts: OperatorStrategy, primes: Partitioned | None) -> bool:
    """Whether counts of shards alone are resolved to the same cuts."""
    if primes is None:
        return False
    try:
        cuts = StrategyParser(primes.graph.by_name[row.name], counts, primes.mesh).cuts()
    except StrategyError:
        return False
    return cuts == primes.decisions.cuts[row.name]


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
