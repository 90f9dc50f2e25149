"""A plan's cuts for another mode or another batch of the same model, as far as they divide."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile

from shardwright.decided import Outputs
from shardwright.graph.graph import Graph
from shardwright.layout import Layout, TensorLayout
from shardwright.rules import rule_of
from shardwright.rules.rule import Cuts


def adapted_cuts(
    graph: Graph, mesh: Layout, cuts: Mapping[str, Cuts]
) -> dict[str, dict[str, tuple[int, ...]]]:
    """The cuts of the operators that `graph` has, by name; of each factor the most significant axes
    for which it still divides."""
    result = {}
    for op in graph.ops:
        found = rule_of(op)
        if found is not None and op.name in cuts:
            result[op.name] = {
                factor: _dividing(mesh, axes, found.capacity[factor])
                for factor, axes in cuts[op.name].items()
                if factor in found.factors
            }
    return result


def adapted_outputs(graph: Graph, mesh: Layout, outputs: Outputs) -> Outputs:
    """Likewise for the layouts in which operators are told to leave their outputs."""
    return {
        op.name: tuple(
            axes if axes is not None and _divides(mesh, axes, value.shape) else None
            for axes, value in zip(outputs[op.name], op.outputs, strict=False)
        )
        for op in graph.ops
        if op.name in outputs
    }


def _dividing(mesh: Layout, axes: tuple[int, ...], capacity: int) -> tuple[int, ...]:
    lengths = range(1, len(axes) + 1)
    fitting = list(takewhile(lambda n: capacity % mesh.size(axes[:n]) == 0, lengths))
    return axes[: fitting[-1]] if fitting else ()


def _divides(mesh: Layout, axes: tuple[tuple[int, ...], ...], shape: tuple[int, ...]) -> bool:
    counts = TensorLayout(mesh, axes).shard_counts if len(axes) == len(shape) else (0,)
    return all(parts and size % parts == 0 for size, parts in zip(shape, counts, strict=False))
