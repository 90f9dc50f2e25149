"""Resolve `dataset_strategy`: whether each device receives the full batch or only its shard."""

from __future__ import annotations

from typing import Any

from shardwright.core.constraints.named_strategy import (
    RequestedEntry,
    UserEntry,
    entry_with_layout,
    requested_entries,
)
from shardwright.core.constraints.resolve import axes_for_entry
from shardwright.core.constraints.strategy import Entry
from shardwright.core.graph.graph import Graph, Value
from shardwright.core.layout.axes import Axes
from shardwright.core.layout.layout import DeviceMatrix
from shardwright.errors import StrategyError

DatasetStrategy = str | tuple[UserEntry, ...]
"""`"full_batch"`, `"data_parallel"`, or one entry per tensor input of the model."""

STRATEGY_NAMES = ("full_batch", "data_parallel")


def requested_dataset_strategy(strategy: Any) -> str | tuple[RequestedEntry, ...]:
    """Validate a `dataset_strategy`; entries that name axes are converted to `AxisDims`.

    Raises:
        StrategyError: if `strategy` is neither a name nor a tuple of entries.
    """
    if isinstance(strategy, str):
        if strategy not in STRATEGY_NAMES:
            raise StrategyError(
                f"unknown dataset_strategy {strategy!r}\n"
                "use 'full_batch' (every device receives the full batch), 'data_parallel' (every"
                " device receives its own shard of the batch), or a tuple with one entry per input"
            )
        return strategy
    return requested_entries("dataset_strategy", strategy)


def input_entries(
    graph: Graph, strategy: DatasetStrategy, axes: DeviceMatrix | None = None
) -> dict[str, Entry]:
    """Return the strategy entry of each tensor input, by input name; empty if `strategy` is a
    string such as `"full_batch"`.

    Args:
        graph: the captured graph.
        strategy: the option of the user.
        axes: the axes that entries may name, with their sizes.

    Raises:
        StrategyError: if the number of entries differs from the number of inputs.
    """
    entries = requested_dataset_strategy(strategy)
    if isinstance(entries, str):
        return {}
    inputs = graph.input_values
    if len(entries) != len(inputs):
        names = ", ".join(str(value) for value in inputs)
        raise StrategyError(
            f"dataset_strategy has {len(entries)} entries, but the model has {len(inputs)} tensor"
            f" inputs: {names}\nuse one entry per input"
        )
    return {
        value.name: entry_with_layout(
            f"dataset_strategy of input {value.name}", entry, len(value.shape), axes
        )
        for value, entry in zip(inputs, entries, strict=True)
    }


def sharded_input_axes(
    graph: Graph,
    mesh: DeviceMatrix,
    strategy: DatasetStrategy,
    axes: DeviceMatrix | None = None,
) -> dict[str, tuple[Axes, ...]]:
    """Return the mesh axes that shard each dimension of the inputs that ranks pass as local shards,
    by input name.

    Raises:
        StrategyError: if an input cannot be sharded as requested; the message has its shape and the
            valid values.
    """
    # Before the names, since this also validates them.
    entries = input_entries(graph, strategy, axes)
    if strategy == "full_batch":
        return {}
    if strategy == "data_parallel":
        return {value.name: _shard_batch_dim(value, mesh) for value in _find_batch_inputs(graph)}
    sharded = {}
    for value in graph.input_values:
        # An input has no other tensor from which its sharding follows, so None is replicated.
        replicated: tuple[Axes, ...] = ((),) * len(value.shape)
        of_input = axes_for_entry(
            f"input {value.name}", "dataset_strategy", value, entries[value.name], mesh, replicated
        )
        if any(of_input):
            sharded[value.name] = of_input
    return sharded


def _find_batch_inputs(graph: Graph) -> list[Value]:
    """Return the inputs with a batch dimension: inputs whose dimension 0 has the same size as
    dimension 0 of the first non-scalar input."""
    non_scalar = [value for value in graph.input_values if value.shape]
    # Other inputs, such as positions, are shared by all samples.
    return [value for value in non_scalar if value.shape[0] == non_scalar[0].shape[0]]


def _shard_batch_dim(value: Value, mesh: DeviceMatrix) -> tuple[Axes, ...]:
    """Shard dimension 0 of an input over all devices; return the mesh axes of each dimension."""
    devices = mesh.num_devices
    if value.shape[0] % devices:
        raise StrategyError(
            f"input {value.name} {list(value.shape)}: dataset_strategy 'data_parallel' shards"
            f" dimension 0 evenly over the {devices} devices of a stage, but its size"
            f" {value.shape[0]} is not divisible by {devices}\n"
            f"use a multiple of {devices}, or dataset_strategy 'full_batch'"
        )
    # All axes, the outermost first: device i of a stage has shard i.
    return (tuple(range(len(mesh.device_matrix))), *((),) * (len(value.shape) - 1))
