"""The device matrix that all pinned layouts have in common, and its axes."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from math import prod

from shardwright.axes import axis_names, common_axes, prime_factors
from shardwright.errors import LayoutError
from shardwright.layout import Axes, Layout, TensorLayout


def mesh_of(devices: int, layouts: Iterable[tuple[str, TensorLayout]]) -> Layout:
    """The device matrix of prime axes in which all `layouts` can be expressed.

    Args:
        layouts: each with the name of what it is said of.

    Raises:
        LayoutError: if one is of another number of devices, or they have no axes in common.
    """
    said = list(layouts)
    for where, layout in said:
        if sorted(layout.layout.ranks) != list(range(devices)):
            matrix = layout.device_matrix
            raise LayoutError(
                f"{where}: the device matrix {matrix} of the layout {layout} is of"
                f" {prod(matrix)} devices (ranks {min(layout.layout.ranks)} to"
                f" {max(layout.layout.ranks)}), the plan is for {devices} (ranks 0 to"
                f" {devices - 1}); valid is a device matrix whose product is {devices}"
            )
    plain = {layout.device_matrix: where for where, layout in said if not layout.layout.rank_list}
    try:
        sizes = common_axes((devices,), *plain)
    except LayoutError as error:
        users = ", ".join(f"{where} {matrix}" for matrix, where in plain.items())
        raise LayoutError(f"{error}; they are pinned at {users}") from None
    mesh = Layout(sizes, tuple(islice(axis_names(), len(sizes))))
    for where, layout in said:
        placed(where, layout, mesh)
    return mesh


def placed(where: str, layout: TensorLayout, mesh: Layout) -> tuple[Axes, ...]:
    """The axes of `mesh` that cut each dimension.

    Raises:
        LayoutError: if `mesh` has no axes that make up those of the layout.
    """
    try:
        return layout.on(mesh).axes
    except LayoutError as error:
        raise LayoutError(f"{where}: the layout {layout} cannot be used: {error}") from None


def first_axes(parts: int, free: list[int], mesh: Layout) -> Axes | None:
    """Takes the outermost `free` axes whose sizes make up `parts`; None if there are none."""
    taken = []
    for prime in prime_factors(parts):
        axis = next((a for a in free if mesh.device_matrix[a] == prime), None)
        if axis is None:
            return None
        free.remove(axis)
        taken.append(axis)
    return tuple(sorted(taken))
