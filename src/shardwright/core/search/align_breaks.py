"""Operators that divide axes between two factors in the same places, so that axes fold.

Where a product is cut over eight devices, two parts of its rows by four of its columns often take
as long as four by two, and a search takes either. Every place in which the parameters divide equal
axes is one more axis of the mesh of all DTensors.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping

from shardwright.core.graph.graph import Graph
from shardwright.core.layout.axes import Axes
from shardwright.core.layout.layout import DeviceMatrix
from shardwright.core.rules.rule import Cuts
from shardwright.core.search.indexed_graph import index_graph
from shardwright.core.search.request import CutsOfGraph


def aligned_breaks(
    graph: Graph,
    mesh: DeviceMatrix,
    cuts: Mapping[str, Cuts],
    pinned: Container[str],
    alike: Axes,
) -> Iterator[CutsOfGraph]:
    """For each place in which operators divide axes that are alike, the cuts with all others that
    divide these between two factors doing so there, as far as that divides their sizes.

    Args:
        alike: axes of one size and equal links.
    """
    limits = {
        op.name: dict(zip(kind.factors, kind.limits, strict=True))
        for op, kind in zip(graph.ops, index_graph(graph).kinds, strict=True)
    }
    places = {place for each in cuts.values() if (place := _break(each, alike))}
    for place in sorted(places) if len(places) > 1 else ():
        changed = {name: dict(each) for name, each in cuts.items()}
        for name, each in cuts.items():
            if name not in pinned and _break(each, alike):
                moved = _broken_at(each, alike, place)
                if all(limits[name][f] % mesh.size(axes) == 0 for f, axes in moved.items()):
                    changed[name] = moved
        yield changed


def _parts(cuts: Cuts, group: Axes) -> dict[str, Axes]:
    """What each factor has of these axes, the one with the first of them first."""
    parts = {f: tuple(axis for axis in axes if axis in group) for f, axes in cuts.items()}
    return dict(sorted(((f, p) for f, p in parts.items() if p), key=lambda part: part[1]))


def _break(cuts: Cuts, group: Axes) -> int:
    """How many of these axes the first of two factors has that divide them; else 0."""
    parts = list(_parts(cuts, group).values())
    return len(parts[0]) if len(parts) == 2 and parts[0] + parts[1] == group else 0


def _broken_at(cuts: Cuts, group: Axes, place: int) -> dict[str, Axes]:
    first, second = _parts(cuts, group)
    dealt = {first: group[:place], second: group[place:]}
    return {
        factor: tuple(sorted({*axes} - {*group} | {*dealt[factor]})) if factor in dealt else axes
        for factor, axes in cuts.items()
    }
