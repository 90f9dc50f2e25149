"""Layouts as the placements of a DTensor, and back.

A DTensor is cut mesh axis by mesh axis, from the left. Where an axis further right cuts the same
dimension more coarsely, the axis is a `_StridedShard`: its `split_factor` is the number of parts
that the axes to its right have already made of each of its parts. So every order of axes within
a dimension has its placements.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardwright.errors import LayoutError
from shardwright.layout import Axes, Layout, TensorLayout


def placements(tensor_layout: TensorLayout) -> tuple[Placement, ...]:
    """One placement for each axis of a `DeviceMesh` with the layout's axes.

    Varying axes are replicated: a DTensor does not know the difference.
    """
    layout = tensor_layout.layout
    found: list[Placement] = [Replicate()] * len(layout.device_matrix)
    for axis in tensor_layout.partial:
        found[axis] = Partial("sum")
    for dim, axes in enumerate(tensor_layout.axes):
        for place, axis in enumerate(axes):
            coarser = layout.size(other for other in axes[:place] if other > axis)
            strided = coarser > 1
            found[axis] = _StridedShard(dim, split_factor=coarser) if strided else Shard(dim)
    return tuple(found)


def from_placements(placements: Sequence[Placement], layout: Layout, ndim: int) -> TensorLayout:
    """The layout of a DTensor with `ndim` dimensions on a mesh with the axes of `layout`.

    Raises:
        LayoutError: if there is not one placement for each axis, a sum is none, a dimension does
            not exist, or a `split_factor` fits no order of the axes.
    """
    if len(placements) != len(layout.device_matrix):
        raise LayoutError(
            f"{len(placements)} placements {tuple(placements)} on a device matrix of"
            f" {len(layout.device_matrix)} axes {layout.device_matrix}; give one for each axis"
        )
    dims: list[Axes] = [()] * ndim
    partial = set()
    # From the right, as then each axis finds those that may stand before it.
    for axis, placement in reversed(list(enumerate(placements))):
        if isinstance(placement, Shard | _StridedShard):
            dim = _dimension(placement, ndim)
            dims[dim] = _inserted(dims[dim], axis, placement, layout)
        elif isinstance(placement, Partial) and placement.reduce_op == "sum":
            partial.add(axis)
        elif not isinstance(placement, Replicate):
            raise LayoutError(
                f"placement {placement} on axis {layout.alias_names[axis]!r}: a layout can say"
                " Shard, _StridedShard, Replicate and Partial('sum')"
            )
    return TensorLayout(layout, tuple(dims), frozenset(partial))


def _dimension(placement: Shard | _StridedShard, ndim: int) -> int:
    dim = placement.dim
    if not -ndim <= dim < ndim:
        raise LayoutError(f"placement {placement} cuts a dimension that {ndim} dimensions lack")
    return dim % ndim


def _inserted(axes: Axes, axis: int, placement: Placement, layout: Layout) -> Axes:
    """`axes`, all to the right of `axis`, with it where as many parts as it says come before."""
    coarser = placement.split_factor if isinstance(placement, _StridedShard) else 1
    for place in range(len(axes) + 1):
        if layout.size(axes[:place]) == coarser:
            return (*axes[:place], axis, *axes[place:])
    raise LayoutError(
        f"placement {placement} on axis {layout.alias_names[axis]!r}: no axes to its right that"
        f" cut the same dimension have {coarser} devices together"
    )
