"""Join axes of a device matrix that are always used together."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from shardwright.core.layout.axes import Axes
from shardwright.core.layout.layout import DeviceMatrix, TensorLayout
from shardwright.errors import LayoutError


def join_axes(
    count: int, lists: Iterable[Axes], may_join: Callable[[int, int], bool] = lambda *_: True
) -> tuple[Axes, ...]:
    """Group the axes of a device matrix that always shard dimensions together, in the same order.

    Two axes are joined if one follows the other in every list that has either.

    Args:
        count: number of axes of the matrix.
        lists: the axes that shard each dimension of each tensor.
        may_join: whether two axes, the left and the right, may be joined.

    Returns:
        The groups in the order of their first axes; in each, the most significant axis first.
    """
    # (index of the list, index in the list) of each occurrence, by axis.
    occurrences: list[set[tuple[int, int]]] = [set() for _ in range(count)]
    # Equal lists impose equal constraints.
    for list_index, axes in enumerate(dict.fromkeys(lists)):
        for index, axis in enumerate(axes):
            occurrences[axis].add((list_index, index))
    joined: list[list[int]] = []
    for axis in range(count):
        for group in joined:
            following = {(list_index, index + 1) for list_index, index in occurrences[group[-1]]}
            # Axes that occur in no list follow each other, as their sets are empty.
            if following == occurrences[axis] and may_join(group[-1], axis):
                group.append(axis)
                break
        else:
            joined.append([axis])
    return tuple(map(tuple, joined))


def joined_device_matrix(matrix: DeviceMatrix, joined: tuple[Axes, ...]) -> DeviceMatrix:
    """Return the device matrix with one axis for each group of axes of `matrix`.

    Args:
        matrix: the device matrix with the axes to join.
        joined: the groups, as `join_axes` returns them.
    """
    sizes = tuple(map(matrix.size, joined))
    names = tuple(matrix.named(axes, "_") for axes in joined)
    # The joined axes may be in another order than those of `matrix`, and the ranks with them.
    ranks = sorted(matrix.ranks, key=TensorLayout(matrix, joined).block)
    in_order = ranks == list(range(len(ranks)))
    return DeviceMatrix(sizes, names, None if in_order else tuple(ranks))


def layout_on_joined_axes(
    layout: TensorLayout, joined: tuple[Axes, ...], mesh: DeviceMatrix
) -> TensorLayout:
    """Express the layout of a tensor on joined axes.

    Args:
        layout: a layout on the device matrix before joining.
        joined: the groups of axes, as `join_axes` returns them.
        mesh: the device matrix with joined axes, from `joined_device_matrix`.

    Raises:
        LayoutError: if the layout uses only some of the axes of a group, or in another order.
    """
    group_of_first_axis = {axes[0]: group_index for group_index, axes in enumerate(joined)}

    def groups_of(axes: Axes) -> Axes:
        # The first axis represents its group; the comparison below detects incomplete groups.
        groups = tuple(group_of_first_axis[axis] for axis in axes if axis in group_of_first_axis)
        if tuple(axis for group in groups for axis in joined[group]) != axes:
            raise LayoutError(
                f"{layout} uses only some of the axes that are joined in {mesh.device_matrix}, or"
                " in another order\njoin only axes that all layouts use together, in one order"
            )
        return groups

    def groups_of_set(axes: frozenset[int]) -> frozenset[int]:
        # Partial and varying axes have no order of their own: take that of the groups.
        in_order = tuple(axis for group in joined for axis in group if axis in axes)
        return frozenset(groups_of(in_order))

    dims = tuple(map(groups_of, layout.axes))
    return TensorLayout(mesh, dims, groups_of_set(layout.partial), groups_of_set(layout.varying))
