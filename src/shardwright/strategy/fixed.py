"""What the strategies of a model's pinned operators fix before any search starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.graph.graph import Graph, Op
from shardwright.layout import Axes, Layout, TensorLayout
from shardwright.rules import rule_of
from shardwright.rules.rule import Cuts
from shardwright.strategy.entry import Entry, OperatorStrategy
from shardwright.strategy.mesh import mesh_of
from shardwright.strategy.outputs import OutputAxes, outputs_of
from shardwright.strategy.reading import Reading
from shardwright.strategy.storage import storage_of

Storage = Mapping[str, tuple[Axes, ...]]
"""For each parameter the axes that cut each dimension as it is stored."""


@dataclass(frozen=True)
class Fixed:
    """What is fixed of a plan.

    Args:
        mesh: the device matrix, in which all layouts that were given can be expressed.
        cuts: of every pinned operator; `{}` for one that is whole. Biases of pinned operators are
            cut like the output that they are added to.
        outputs: of the operators that have an out_strategy.
    """

    mesh: Layout
    cuts: dict[str, Cuts]
    outputs: dict[str, OutputAxes]


def fix(
    graph: Graph,
    devices: int,
    strategies: Mapping[str, OperatorStrategy],
    parameters: Mapping[str, Entry],
) -> Fixed:
    """Reads strategies as cuts on a common device matrix.

    Args:
        strategies: by name of the operator.
        parameters: how parameters are to be stored; only their layouts count here.

    Raises:
        StrategyError: if an operator cannot be cut so; names it, its shapes and what is valid.
        LayoutError: if the layouts are of another number of devices, or have no common axes.
    """
    layouts = [(name, layout) for name, s in strategies.items() for layout in s.layouts]
    layouts += [(name, e) for name, e in parameters.items() if isinstance(e, TensorLayout)]
    mesh = mesh_of(devices, layouts)
    cuts: dict[str, Cuts] = {}
    outputs: dict[str, OutputAxes] = {}
    for name, strategy in strategies.items():
        reading = Reading(graph.by_name[name], strategy, mesh)
        cuts[name] = reading.cuts()
        if (said_of_outputs := outputs_of(reading, cuts[name])) is not None:
            outputs[name] = said_of_outputs
    for name in strategies:
        bias = graph.by_name.get(f"{name}.bias")
        if bias is not None and bias.inputs[0] is graph.by_name[name].output:
            left = outputs.get(name, (None,))[0]
            axes = _made(graph.by_name[name], mesh, cuts[name]) if left is None else left
            cuts.setdefault(bias.name, _reading_first(bias, axes))
    return Fixed(mesh, cuts, outputs)


def _made(op: Op, mesh: Layout, cuts: Cuts) -> tuple[Axes, ...]:
    """The axes that cut the output of a pinned operator; axes of a sum count as all-reduced."""
    found = rule_of(op)
    assert found is not None
    return found.layouts(mesh, cuts)[1][0].axes


def _reading_first(op: Op, axes: tuple[Axes, ...]) -> dict[str, Axes]:
    """The cuts with which an operator reads its first input cut by `axes`."""
    found = rule_of(op)
    assert found is not None
    factors = zip(found.inputs[0], axes, strict=True)
    return {f: cut for f, cut in factors if f is not None and f in found.factors and cut}


def storage_as_said(
    graph: Graph, mesh: Layout, parameters: Mapping[str, Entry], used: Storage
) -> dict[str, tuple[Axes, ...]]:
    """How every parameter is stored: as `used`, but where the user says how.

    Raises:
        StrategyError: if a parameter cannot be cut as it is said.
    """
    stored = {name: tuple(axes) for name, axes in used.items()}
    for value in graph.parameters:
        if value.name in parameters:
            entry = parameters[value.name]
            stored[value.name] = storage_of(value, entry, mesh, stored[value.name])
    return stored
