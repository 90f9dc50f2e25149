"""Export a plan as operator strategies in the format of strategy files."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

from shardwright.core.constraints import Entry, OperatorStrategy
from shardwright.core.constraints.parse import StrategyParser
from shardwright.core.constraints.strategy_file import FileEntry
from shardwright.core.layout.axes import Axes
from shardwright.core.layout.layout import TensorLayout
from shardwright.core.layout.prime_mesh import prime_mesh
from shardwright.core.micro_batches.micro_batch_graph import ADDED_SUFFIXES
from shardwright.core.partition.fold_axes import split_axes
from shardwright.core.partition.partitioned import Partitioned
from shardwright.core.plan.data import PlanData
from shardwright.core.plan.rows import OperatorRow
from shardwright.errors import StrategyError


def strategies(plan: PlanData) -> dict[str, FileEntry]:
    """Return the strategies of operators and storage layouts of parameters that reproduce `plan`.

    Entries are by operator name or module path. Operators without a sharding rule have no entry.
    """
    plan_on_prime_axes = _partition_on_prime_axes(plan)
    names = {row.name for row in plan.operators}
    entries = {
        row.name: FileEntry(
            # A pin is written as the user wrote it, not as it was resolved.
            plan.pins.get(row.name) or _find_shortest_strategy(plan, row, plan_on_prime_axes)
        )
        for row in plan.operators
        if row.rule is not None and not _is_added_for_micro_batches(row.name, names)
    }
    for name, storage in _find_non_default_storage_layouts(plan):
        module, _, parameter = name.rpartition(".")
        # A module that is no operator of the plan gets an entry for its parameters alone.
        module_entry = entries.get(module, FileEntry(None))
        parameters = {**module_entry.parameters, parameter: storage}
        entries[module] = replace(module_entry, parameters=parameters)
    return entries


def _is_added_for_micro_batches(name: str, names: Collection[str]) -> bool:
    """Whether an operator was added for micro-batches, and so is not part of the user's model."""
    return any(
        name.endswith(f"_{suffix}") and name.removesuffix(f"_{suffix}") in names
        for suffix in ADDED_SUFFIXES
    )


def _find_shortest_strategy(
    plan: PlanData, row: OperatorRow, plan_on_prime_axes: Partitioned | None
) -> OperatorStrategy:
    """Return an operator's strategy as numbers of shards, or as layouts if numbers of shards do not
    resolve to the planned cuts."""
    outputs = _find_required_output_layouts(plan, row)
    counts = OperatorStrategy(tuple(layout.shard_counts for layout in row.input_layouts), outputs)
    layouts = OperatorStrategy(
        tuple(_drop_partial_axes(layout) for layout in row.input_layouts), outputs
    )
    # Counts leave open which axes shard a dimension; without cuts there is nothing to choose.
    return (
        counts
        if not row.cuts or _strategy_matches_cuts(row, counts, plan_on_prime_axes)
        else layouts
    )


def _find_required_output_layouts(plan: PlanData, row: OperatorRow) -> tuple[Entry, ...] | None:
    """Return the output layouts that a strategy must contain, as the inputs do not imply them; None
    if they do.

    Output layouts are needed if outputs are pinned, or if a mesh axis shards outputs only.
    """
    pinned = plan.outputs.get(row.name)
    if pinned is not None:
        return tuple(None if axes is None else TensorLayout(plan.mesh, axes) for axes in pinned)
    input_axes = {axis for layout in row.input_layouts for axis in layout.sharded}
    cut_axes = {plan.mesh.axis(axis) for axes in row.cuts.values() for axis in axes}
    # Inputs that carry all cut axes determine the output.
    if not cut_axes - input_axes:
        return None
    return tuple(_drop_partial_axes(layout) for layout in row.output_layouts)


def _drop_partial_axes(layout: TensorLayout) -> TensorLayout:
    """Return a copy of a layout without `partial` and `varying` axes, which strategy files lack."""
    return replace(layout, partial=frozenset(), varying=frozenset())


def _partition_on_prime_axes(plan: PlanData) -> Partitioned | None:
    """Return the plan's partitioned graph on a device matrix of prime sizes, on which strategies
    are resolved.

    None if the plan has no graph, or if its axes are not products of consecutive axes of prime
    size.
    """
    # A plan is stored on folded axes, while the parser assigns counts to axes of prime sizes.
    mesh, decisions = split_axes(plan.mesh, plan.decisions)
    # Each stage has this device matrix, on which the strategies of its operators are resolved.
    if plan.graph is None or mesh.device_matrix != prime_mesh(mesh.num_devices).device_matrix:
        return None
    return Partitioned(plan.graph, mesh, decisions)


def _strategy_matches_cuts(
    row: OperatorRow, counts: OperatorStrategy, plan_on_prime_axes: Partitioned | None
) -> bool:
    """Whether a strategy of shard counts resolves to the planned sharding; False if unknown.

    Args:
        row: the operator in the plan.
        counts: the strategy, with a number of shards for each dimension.
        plan_on_prime_axes: the plan on a device matrix with axes of prime size; None if unknown.
    """
    if plan_on_prime_axes is None:
        return False
    try:
        cuts = StrategyParser(
            plan_on_prime_axes.graph.by_name[row.name], counts, plan_on_prime_axes.mesh
        ).cuts()
    except StrategyError:
        # Counts that do not determine the sharding are an error of the parser.
        return False
    return cuts == plan_on_prime_axes.decisions.cuts[row.name]


def _find_non_default_storage_layouts(plan: PlanData) -> Iterator[tuple[str, Entry]]:
    """Yield (parameter name, storage layout) for each parameter with a storage layout other than
    the default.

    By default a parameter is stored as the first operator that shards it reads it.
    """
    used: dict[str, tuple[Axes, ...]] = {}
    for row in plan.operators:
        for (name, _, origin), layout in zip(row.inputs, row.input_layouts, strict=True):
            # By default a parameter is stored as its first sharded use reads it.
            if origin == "parameter" and layout.sharded:
                used.setdefault(name, layout.axes)
    for name, axes in plan.storage.items():
        if axes != used.get(name, ((),) * len(axes)):
            yield name, TensorLayout(plan.mesh, axes)
