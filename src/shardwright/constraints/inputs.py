"""How the model's inputs arrive: whole on every device, or each device with its own part."""

from __future__ import annotations

from typing import Any

from shardwright.constraints.resolve import cut_axes
from shardwright.constraints.strategy import Entry, check_entries
from shardwright.errors import StrategyError
from shardwright.graph.graph import Graph, Value
from shardwright.layout.axes import Axes
from shardwright.layout.layout import Layout

DatasetStrategy = str | tuple[Entry, ...]
"""`full_batch`, `data_parallel`, or an entry for each tensor input."""

NAMES = ("full_batch", "data_parallel")


def check_dataset_strategy(said: Any) -> None:
    """Raises:
    StrategyError: if `said` is neither a name nor a tuple of entries.
    """
    if isinstance(said, str):
        if said not in NAMES:
            raise StrategyError(
                f"dataset_strategy is {said!r}; valid are 'full_batch' (every device is given the"
                " whole batch), 'data_parallel' (every device its own part of it), or a tuple with"
                " an entry for each input"
            )
        return
    check_entries("dataset_strategy", said)


def input_entries(graph: Graph, said: DatasetStrategy) -> dict[str, Entry]:
    """What is said of each input by itself, by name; empty if one word is said of all.

    Raises:
        StrategyError: if the entries are not as many as the inputs.
    """
    check_dataset_strategy(said)
    if isinstance(said, str):
        return {}
    inputs = graph.input_values
    if len(said) != len(inputs):
        names = ", ".join(str(value) for value in inputs)
        raise StrategyError(
            f"dataset_strategy has {len(said)} entries, but the model has {len(inputs)} tensor"
            f" inputs: {names}; give one entry for each"
        )
    return {value.name: entry for value, entry in zip(inputs, said, strict=True)}


def arrivals(graph: Graph, mesh: Layout, said: DatasetStrategy) -> dict[str, tuple[Axes, ...]]:
    """The axes that cut each dimension of the inputs that do not arrive whole, by name.

    Raises:
        StrategyError: if an input cannot be cut so; names it, its shape and what is valid.
    """
    entries = input_entries(graph, said)
    if said == "full_batch":
        return {}
    if said == "data_parallel":
        return {value.name: _along_batch(value, mesh) for value in _of_the_batch(graph)}
    cut = {}
    for value in graph.input_values:
        whole: tuple[Axes, ...] = ((),) * len(value.shape)
        axes = cut_axes(
            f"input {value.name}", "dataset_strategy", value, entries[value.name], mesh, whole
        )
        if any(axes):
            cut[value.name] = axes
    return cut


def _of_the_batch(graph: Graph) -> list[Value]:
    """The inputs that have a batch: dimension 0 of the first one that has dimensions."""
    sized = [value for value in graph.input_values if value.shape]
    return [value for value in sized if value.shape[0] == sized[0].shape[0]]


def _along_batch(value: Value, mesh: Layout) -> tuple[Axes, ...]:
    devices = mesh.num_devices
    if value.shape[0] % devices:
        raise StrategyError(
            f"input {value.name} {list(value.shape)}: dataset_strategy 'data_parallel' gives each"
            f" of the {devices} devices of a stage an equal part of dimension 0, which"
            f" {value.shape[0]} does not allow; valid are multiples of {devices}, or 'full_batch'"
        )
    return (tuple(range(len(mesh.device_matrix))), *((),) * (len(value.shape) - 1))
