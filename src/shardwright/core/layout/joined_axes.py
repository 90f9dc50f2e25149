"""Joining axes of a device matrix that are always used together."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from shardwright.core.layout.axes import Axes
from shardwright.core.layout.layout import DeviceMatrix, TensorLayout
from shardwright.errors import LayoutError


def join_axes(
    count: int, lists: Iterable[Axes], may_join: Callable[[int, int], bool] = lambda *_: True
) -> tuple[Axes, ...]:
    """Group the axes of a device matrix: those that occur in `lists` only next to each other.

    Two axes are joined if wherever the first occurs, the second follows, and vice versa.

    Args:
        count: number of axes of the matrix.
        lists: the axes that shard each dimension of each tensor.
        may_join: further condition for joining two axes, of which the second is further right.

    Returns:
        The groups, most significant axis first, in the order of their first axes.
    """
    occurrences: list[set[tuple[int, int]]] = [set() for _ in range(count)]
    for number, axes in enumerate(dict.fromkeys(lists)):
        for index, axis in enumerate(axes):
            occurrences[axis].add((number, index))
    joined: list[list[int]] = []
    for axis in range(count):
        for group in joined:
            following = {(number, index + 1) for number, index in occurrences[group[-1]]}
            if following == occurrences[axis] and may_join(group[-1], axis):
                group.append(axis)
                break
        else:
            joined.append([axis])
    return tuple(map(tuple, joined))


def joined_layout(layout: DeviceMatrix, joined: tuple[Axes, ...]) -> DeviceMatrix:
    """Returns the device matrix whose axes are groups of axes of `layout`."""
    sizes = tuple(map(layout.size, joined))
    names = tuple(layout.named(axes, "_") for axes in joined)
    ranks = sorted(layout.ranks, key=TensorLayout(layout, joined).block)
    in_order = ranks == list(range(len(ranks)))
    return DeviceMatrix(sizes, names, None if in_order else tuple(ranks))


def on_joined_axes(
    where: TensorLayout, joined: tuple[Axes, ...], mesh: DeviceMatrix
) -> TensorLayout:
    """Express a layout on joined axes.

    Args:
        mesh: the result of `joined_layout`.

    Raises:
        LayoutError: if the layout uses only some of the axes of a group, or in another order.
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
