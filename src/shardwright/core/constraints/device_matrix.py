"""The device matrix on which all requested strategies can be expressed."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from itertools import islice
from math import gcd, prod

from shardwright.core.layout.axes import Axes, axis_names, common_axes, prime_factors
from shardwright.core.layout.layout import DeviceMatrix, TensorLayout
from shardwright.errors import LayoutError, with_note


def common_device_matrix(
    devices: int, layouts: Iterable[tuple[str, TensorLayout]], group_sizes: Iterable[int] = ()
) -> DeviceMatrix:
    """Return a device matrix with axes of prime size on which all `layouts` can be expressed.

    Args:
        devices: number of devices of one pipeline stage.
        layouts: (operator or parameter name, layout) pairs; errors mention the name.
        group_sizes: devices per group at each level of the interconnect, ascending: `(8,)` for
            nodes of 8 devices. Where the layouts allow it, a group occupies the innermost axes, so
            that these do not cross nodes: 24 devices, 8 per node, give (3, 2, 2, 2).

    Raises:
        LayoutError: if a layout has a different number of devices, or no device matrix can express
            all layouts.
    """
    named = list(layouts)
    for where, layout in named:
        # `rank_list` may permute the ranks of the plan, but not contain others.
        if sorted(layout.layout.ranks) != list(range(devices)):
            matrix = layout.device_matrix
            raise LayoutError(
                f"{where}: the device matrix {matrix} of the layout {layout} has"
                f" {prod(matrix)} devices (ranks {min(layout.layout.ranks)} to"
                f" {max(layout.layout.ranks)}), but the plan is for {devices} (ranks 0 to"
                f" {devices - 1})\nuse a device matrix whose product is {devices}"
            )
    # Layouts with permuted ranks are not products of axes: `axes_on_mesh` below checks them.
    unpermuted = {
        layout.device_matrix: where for where, layout in named if not layout.layout.rank_list
    }
    # `(devices,)` makes `common_axes` split all axes into primes, also without layouts.
    matrices = [(devices,), *unpermuted]
    try:
        sizes = common_axes(*matrices)
    except LayoutError as error:
        users = ", ".join(f"{where} {matrix}" for matrix, where in unpermuted.items())
        raise LayoutError(with_note(error, f"; used by {users}")) from None
    for group_size in group_sizes:
        # A stage may have fewer devices than a node, or a number that a node does not divide.
        per_node = gcd(devices, group_size)
        # Layouts take precedence: ignore a level of the interconnect that conflicts with them.
        with suppress(LayoutError):
            sizes = common_axes(*matrices, (devices // per_node, per_node))
            # Levels further out must agree with this one.
            matrices.append((devices // per_node, per_node))
    mesh = _get_cached_device_matrix(sizes)
    for where, layout in named:
        axes_on_mesh(where, layout, mesh)
    return mesh


def axes_on_mesh(where: str, layout: TensorLayout, mesh: DeviceMatrix) -> tuple[Axes, ...]:
    """Return the axes of `mesh` that shard each dimension of `layout`; errors begin with `where`.

    Raises:
        LayoutError: if the axes of the layout are not products of axes of `mesh`.
    """
    try:
        return layout.on(mesh).axes
    except LayoutError as error:
        raise LayoutError(
            f"{where}: cannot use the layout {layout} on the device matrix {mesh.device_matrix}: "
            f"{error}"
        ) from None


def take_outer_axes(num_shards: int, free: list[int], mesh: DeviceMatrix) -> Axes | None:
    """Remove the outermost axes whose sizes multiply to `num_shards` from the unassigned axes
    `free`.

    Returns:
        The removed axes in ascending order; None if no axes in `free` have this product.
    """
    chosen = []
    if mesh.num_devices % num_shards:
        return None
    # All axes have prime sizes, so the first free axis of a size is the outermost.
    for prime in prime_factors(num_shards):
        axis = next((a for a in free if mesh.device_matrix[a] == prime), None)
        if axis is None:
            return None
        free.remove(axis)
        chosen.append(axis)
    # Ascending, so that the outermost axis is the most significant.
    return tuple(sorted(chosen))


@cache
def _get_cached_device_matrix(sizes: tuple[int, ...]) -> DeviceMatrix:
    """Return the device matrix with axes of the given sizes. Equal sizes give the same object, as
    cache lookups compare keys by `is` first."""
    return DeviceMatrix(sizes, tuple(islice(axis_names(), len(sizes))))
