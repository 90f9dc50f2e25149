"""Pictures of sharded tensors: the last two dimensions as a grid, the others as sheets.

Lengths are fractions of the full tensor, so tensors of one layout share a picture.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from shardwright.core.layout.axes import Axes
from shardwright.core.layout.layout import DeviceMatrix, TensorLayout

MAX_BLOCKS = 16
"""Maximum number of blocks along a side of a tensor's picture; more would be indistinguishable."""

MAX_SHEETS = 4
"""Maximum number of sheets behind the first one in the picture of a tensor."""

Border = tuple[float, int]
"""Position of a border between blocks, 0 to 1, and index of the mesh axis that shards there."""


@dataclass(frozen=True)
class Picture:
    """The picture of a sharded tensor.

    Args:
        columns, rows: borders along the last and the second to last dimension.
        block: width and height of one device's shard.
        sheets: for each sheet behind the first one, the index of the mesh axis that shards the
            dimension shown by sheets.
        summed: whether the shards are partial sums.
        lines: description of each dimension, and of partial sums.
    """

    columns: tuple[Border, ...]
    rows: tuple[Border, ...]
    block: tuple[float, float]
    sheets: tuple[int, ...]
    summed: bool
    lines: tuple[str, ...]


def picture(layout: TensorLayout) -> Picture:
    """Return the picture of a tensor with `layout`."""
    mesh = layout.layout
    # A vector is drawn as one row, a scalar as one block.
    padded: tuple[Axes, ...] = ((), (), *layout.axes)
    sheet_axes = [axis for axes in padded[:-2] for axis in axes]
    max_sheet_count = MAX_SHEETS + 1
    sheets = [
        axis
        for axis in sheet_axes
        # The first sheet is the grid itself.
        for _ in range(min(mesh.device_matrix[axis], max_sheet_count) - 1)
    ]
    # The last two dimensions are the grid; all others are sheets.
    rows, columns = padded[-2:]
    return Picture(
        columns=tuple(_iterate_axis_borders(mesh, columns)),
        rows=tuple(_iterate_axis_borders(mesh, rows)),
        # At least 1/64 of the side, to stay visible.
        block=(1 / min(mesh.size(columns), 64), 1 / min(mesh.size(rows), 64)),
        sheets=tuple(sheets[:MAX_SHEETS]),
        summed=bool(layout.partial),
        lines=tuple(_describe_dimensions(layout)),
    )


def _iterate_axis_borders(mesh: DeviceMatrix, axes: Axes) -> Iterator[Border]:
    """Yield the borders between the shards of one dimension, axis by axis from the outermost.

    Stops before the axis that would make more than `MAX_BLOCKS` blocks.
    """
    blocks = 1
    for axis in axes:
        outer, blocks = blocks, blocks * mesh.device_matrix[axis]
        if blocks > MAX_BLOCKS:
            return
        step = blocks // outer
        # Multiples of `step` are borders of the axes before.
        yield from ((index / blocks, axis) for index in range(1, blocks) if index % step)


def _describe_dimensions(layout: TensorLayout) -> Iterator[str]:
    mesh = layout.layout
    for dim, axes in enumerate(layout.axes):
        shards = prod(mesh.device_matrix[axis] for axis in axes)
        sharding = f"{shards} shards over {mesh.named(axes)}" if axes else "not sharded"
        yield f"dim {dim}: {sharding}"
    if layout.partial:
        yield f"one term of a sum over {mesh.named(sorted(layout.partial))}"
    if layout.varying:
        yield f"its gradient is a term of a sum over {mesh.named(sorted(layout.varying))}"
