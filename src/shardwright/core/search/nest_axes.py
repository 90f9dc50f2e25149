"""Axes of equal size over equal links, dealt out anew so that operators use them alike.

A search decides one axis after another, and equal operators may decide the same in another order:
the batch over a and b and heads over c, next to the batch over a and c. Where all links are alike
it does not matter over which axes of one size an operator is cut, only over how many. So the batch
takes the first, positions those behind it, and parameters and features the last, and each of two
operators uses the axes of the other as far as it can.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence

from shardwright.core.graph.graph import Graph
from shardwright.core.layout.axes import Axes
from shardwright.core.layout.layout import DeviceMatrix
from shardwright.core.partition.axis_meaning import Meaning, trace_meanings
from shardwright.core.rules.rule import Cuts
from shardwright.core.search.request import CutsOfGraph

Slot = tuple[int, int]
"""For the batch 0, for positions 1, else 2; and an axis."""


def nest_axes(
    graph: Graph, mesh: DeviceMatrix, cuts: Mapping[str, Cuts], pinned: Container[str]
) -> CutsOfGraph:
    """The cuts with as many axes of each size for each factor; those of pinned operators stay."""
    factors = trace_meanings(graph).factors
    moves: dict[str, dict[int, int]] = {name: {} for name in cuts if name not in pinned}
    for size in set(mesh.device_matrix):
        alike = tuple(axis for axis, each in enumerate(mesh.device_matrix) if each == size)
        slots = {name: _slots(cuts[name], factors[name], alike) for name in moves}
        orders = _orders(alike, list(slots.values()))
        for name, each in slots.items():
            moves[name].update(_deal(each, orders))
    return {
        name: {factor: tuple(moves[name].get(a, a) for a in axes) for factor, axes in each.items()}
        if name in moves
        else dict(each)
        for name, each in cuts.items()
    }


def _slots(cuts: Cuts, meanings: Mapping[str, Meaning], alike: Axes) -> list[Slot]:
    rank = {Meaning.BATCH: 0, Meaning.POSITION: 1}
    return sorted(
        (rank.get(meanings.get(factor, Meaning.FEATURE), 2), axis)
        for factor, axes in cuts.items()
        for axis in axes
        if axis in alike
    )


def _orders(alike: Axes, slots: Sequence[list[Slot]]) -> tuple[Axes, Axes, Axes]:
    """The axes in the order in which the batch, positions and the rest take them: where those
    before begin to leave them free, then towards the first."""
    batch, data = (
        max((sum(rank <= last for rank, _ in each) for each in slots), default=0) for last in (0, 1)
    )
    ordered = [(*alike[start:], *reversed(alike[:start])) for start in (0, batch, data)]
    return ordered[0], ordered[1], ordered[2]


def _deal(slots: list[Slot], orders: tuple[Axes, Axes, Axes]) -> Iterator[tuple[int, int]]:
    taken: set[int] = set()
    for rank, axis in slots:
        new = next(each for each in orders[rank] if each not in taken)
        taken.add(new)
        yield axis, new
