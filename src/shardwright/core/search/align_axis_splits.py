"""Split groups of equal mesh axes in the same way in all operators, for fewer mesh axes.

Where a matrix product is cut over eight devices, 2 shards of its rows by 4 of its columns often
take as long as 4 by 2, so a search may pick either for each product. All DTensors share one
`DeviceMesh`. It needs one more axis for each different split of equal axes, and the time of
DTensor's first step grows exponentially with the number of axes.

    w1: rows (a), columns (b, c)   w2: rows (a, b), columns (c)   ->   both rows (a), columns (b, c)
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from operator import itemgetter

from shardwright.core.graph.graph import Graph
from shardwright.core.layout.axes import Axes
from shardwright.core.layout.layout import DeviceMatrix
from shardwright.core.rules.rule import Cuts
from shardwright.core.search.indexed_graph import index_graph
from shardwright.core.search.request import CutsOfGraph


def align_axis_splits(
    graph: Graph,
    mesh: DeviceMatrix,
    cuts: Mapping[str, Cuts],
    pinned: Container[str],
    equal_axes: Axes,
) -> Iterator[CutsOfGraph]:
    """Yield variants of `cuts` in which all operators split a group of equal axes in the same way.

    A split gives the first axes of the group to one factor and the others to a second factor. There
    is one variant for each number of first axes that occurs in `cuts`; nothing is yielded if all
    operators agree. Operators with sizes that are not divisible keep their cuts.

    Args:
        pinned: names of operators whose cuts are fixed.
        equal_axes: a group of axes of equal size over equal links.
    """
    # Limits of the indexed graph: they divide the sizes of all dims with the factor, not only
    # capacity.
    limits = {
        op.name: dict(zip(op_type.factors, op_type.limits, strict=True))
        for op, op_type in zip(graph.ops, index_graph(graph).op_types, strict=True)
    }
    positions = {
        position
        for op_cuts in cuts.values()
        if (position := _find_split_position(op_cuts, equal_axes))
    }
    for position in sorted(positions) if len(positions) > 1 else ():
        # Every position is tried, as only the predictor of full plans knows which is cheapest.
        aligned = {name: dict(op_cuts) for name, op_cuts in cuts.items()}
        for name, op_cuts in cuts.items():
            # Only operators that split this group have a position.
            if name not in pinned and _find_split_position(op_cuts, equal_axes):
                moved = _split_axes_at_position(op_cuts, equal_axes, position)
                if all(limits[name][f] % mesh.size(axes) == 0 for f, axes in moved.items()):
                    aligned[name] = moved
        yield aligned


def _group_axes_by_factor(cuts: Cuts, equal_axes: Axes) -> dict[str, Axes]:
    """Return a dict from each factor to those of `equal_axes` that cut it, in order of the axes."""
    axes_by_factor = {f: tuple(a for a in axes if a in equal_axes) for f, axes in cuts.items()}
    return dict(
        sorted(((f, axes) for f, axes in axes_by_factor.items() if axes), key=itemgetter(1))
    )


def _find_split_position(cuts: Cuts, equal_axes: Axes) -> int:
    """Return the number of axes on the first factor if the first axes of `equal_axes` cut one
    factor and the others a second factor; else 0."""
    splits = list(_group_axes_by_factor(cuts, equal_axes).values())
    return len(splits[0]) if len(splits) == 2 and splits[0] + splits[1] == equal_axes else 0


def _split_axes_at_position(cuts: Cuts, equal_axes: Axes, position: int) -> dict[str, Axes]:
    """Return `cuts` with the first `position` axes of `equal_axes` on one factor, and the others on
    the second factor that `equal_axes` cut."""
    # In the order of the axes, so that the first factor keeps the outermost ones.
    first, second = _group_axes_by_factor(cuts, equal_axes)
    split = {first: equal_axes[:position], second: equal_axes[position:]}
    return {
        # Further axes stay; sorted, so that the outermost axis comes first.
        factor: (
            tuple(sorted({*axes} - {*equal_axes} | {*split[factor]})) if factor in split else axes
        )
        for factor, axes in cuts.items()
    }
