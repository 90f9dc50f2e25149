"""Several axes of a device matrix as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from shardwright.core.layout.axes import Axes
from shardwright.core.layout.layout import DeviceMatrix, TensorLayout
from shardwright.errors import LayoutError


def join_axes(
    count: int, lists: Iterable[Axes], may_join: Callable[[int, int], bool] = lambda *_: True
) -> tuple[Axes, ...]:
    """All axes of a device matrix, together those that are alike: where one of them is in a list,
    the next comes directly behind it.

    Args:
        count: of the axes of the matrix.
        may_join: whether the second of two axes, further right, may come directly behind the first.
    """
    places: list[set[tuple[int, int]]] = [set() for _ in range(count)]
    for number, axes in enumerate(dict.fromkeys(lists)):
        for place, axis in enumerate(axes):
            places[axis].add((number, place))
    joined: list[list[int]] = []
    for axis in range(count):
        for group in joined:
            behind = {(number, place + 1) for number, place in places[group[-1]]}
            if behind == places[axis] and may_join(group[-1], axis):
                group.append(axis)
                break
        else:
            joined.append([axis])
    return tuple(map(tuple, joined))


def joined_layout(layout: DeviceMatrix, joined: tuple[Axes, ...]) -> DeviceMatrix:
    """The device matrix whose axes are the `joined` ones of `layout`."""
    sizes = tuple(map(layout.size, joined))
    names = tuple(layout.named(axes, "_") for axes in joined)
    ranks = sorted(layout.ranks, key=TensorLayout(layout, joined).block)
    in_order = ranks == list(range(len(ranks)))
    return DeviceMatrix(sizes, names, None if in_order else tuple(ranks))


def on_joined_axes(
    where: TensorLayout, joined: tuple[Axes, ...], mesh: DeviceMatrix
) -> TensorLayout:
    """The same placement on joined axes.

    Args:
        mesh: the `joined_layout`.

    Raises:
        LayoutError: if the placement parts axes that are joined.
    """
    number = {axes[0]: new for new, axes in enumerate(joined)}

    def coarse(axes: Axes) -> Axes:
        result = tuple(number[axis] for axis in axes if axis in number)
        if tuple(axis for new in result for axis in joined[new]) != axes:
            raise LayoutError(f"{where} parts axes of {mesh.device_matrix}, which are joined")
        return result

    def coarse_set(axes: frozenset[int]) -> frozenset[int]:
        return frozenset(coarse(tuple(axis for group in joined for axis in group if axis in axes)))

    dims = tuple(map(coarse, where.axes))
    return TensorLayout(mesh, dims, coarse_set(where.partial), coarse_set(where.varying))
