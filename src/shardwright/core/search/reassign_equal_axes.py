"""Permute mesh axes of equal size per operator, so that equal factors use equal axes.

A search decides one axis after another, so equal operators may get permuted axes: batch over a and
b and heads over c in one operator, batch over a and c in the next. Where all links are equal, the
cost depends only on the number of axes of each size. The batch takes the first axes, sequence
positions the next, and parameters and features the last. Neighbors then share as many axes as
possible, which saves redistributions and mesh axes.

    batch (a, b), heads (c)  and  batch (a, c), heads (b)   ->   batch (a, b), heads (c)  in both
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence

from shardwright.core.graph.graph import Graph
from shardwright.core.layout.axes import Axes
from shardwright.core.layout.layout import DeviceMatrix
from shardwright.core.partition.axis_meaning import Meaning, trace_meanings
from shardwright.core.rules.rule import Cuts
from shardwright.core.search.request import CutsOfGraph

PrioritizedAxis = tuple[int, int]
"""Pair of a priority and a mesh axis; the priority is 0 if the axis shards the batch, 1 for
sequence positions, else 2."""


def reassign_equal_axes(
    graph: Graph, mesh: DeviceMatrix, cuts: Mapping[str, Cuts], pinned: Container[str]
) -> CutsOfGraph:
    """Return `cuts` with axes of equal size permuted; each factor keeps its number of shards.

    Args:
        cuts: the axes that cut each factor of each operator, by operator name.
        pinned: names of operators whose cuts stay as they are.
    """
    factors = trace_meanings(graph).factors
    new_axes: dict[str, dict[int, int]] = {name: {} for name in cuts if name not in pinned}
    # Sizes do not interact, so the order of the set does not matter.
    for size in set(mesh.device_matrix):
        equal_axes = tuple(axis for axis, each in enumerate(mesh.device_matrix) if each == size)
        axes_of_ops = {
            name: _list_prioritized_axes(cuts[name], factors[name], equal_axes) for name in new_axes
        }
        orders = _order_axes_by_priority(equal_axes, list(axes_of_ops.values()))
        for name, prioritized_axes in axes_of_ops.items():
            new_axes[name].update(_axis_replacements(prioritized_axes, orders))
    return {
        name: {
            factor: tuple(new_axes[name].get(a, a) for a in axes)
            for factor, axes in op_cuts.items()
        }
        if name in new_axes
        else dict(op_cuts)
        for name, op_cuts in cuts.items()
    }


def _list_prioritized_axes(
    cuts: Cuts, meanings: Mapping[str, Meaning], equal_axes: Axes
) -> list[PrioritizedAxis]:
    # The batch first: nearly all operators have it, so that sharing its axes saves the most.
    priority = {Meaning.BATCH: 0, Meaning.POSITION: 1}
    return sorted(
        # A factor without a meaning is treated as a feature, which takes the last axes.
        (priority.get(meanings.get(factor, Meaning.FEATURE), 2), axis)
        for factor, axes in cuts.items()
        for axis in axes
        if axis in equal_axes
    )


def _order_axes_by_priority(
    equal_axes: Axes, axes_of_ops: Sequence[list[PrioritizedAxis]]
) -> tuple[Axes, Axes, Axes]:
    """Return the orders in which axes are assigned to the batch, to positions, and to all others.

    The order for positions begins after as many axes as the batch needs in any operator, so that
    positions avoid the axes of another operator's batch; the skipped axes come last, in reverse.
    The third order begins after as many axes as batch and positions need.

    Args:
        axes_of_ops: (priority, axis) pairs of each operator; see `PrioritizedAxis`.
    """
    num_batch_axes, num_data_axes = (
        max((sum(priority <= last for priority, _ in each) for each in axes_of_ops), default=0)
        for last in (0, 1)
    )
    orders = [
        (*equal_axes[start:], *reversed(equal_axes[:start]))
        for start in (0, num_batch_axes, num_data_axes)
    ]
    return orders[0], orders[1], orders[2]


def _axis_replacements(
    prioritized_axes: list[PrioritizedAxis], orders: tuple[Axes, Axes, Axes]
) -> Iterator[tuple[int, int]]:
    """Yield (axis, new axis) for each axis that cuts an operator; new axes are distinct."""
    taken_axes: set[int] = set()
    for priority, axis in prioritized_axes:
        # In the order of priorities: each axis is replaced by the first axis that is not taken yet,
        # in the order of its priority.
        new_axis = next(each for each in orders[priority] if each not in taken_axes)
        taken_axes.add(new_axis)
        yield axis, new_axis
