"""Pictures of sharded tensors: the last two dimensions as a grid, the others as sheets.

Lengths are fractions of the whole tensor, so tensors of one layout share a picture.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from shardwright.core.layout.axes import Axes
from shardwright.core.layout.layout import DeviceMatrix, TensorLayout

MAX_BLOCKS = 16
"""Blocks along one side of the grid; more could not be distinguished."""

MAX_SHEETS = 4

Border = tuple[float, int]
"""Position of a border between two blocks, and the index of its axis."""


@dataclass(frozen=True)
class Picture:
    """The picture of a sharded tensor.

    Args:
        columns, rows: borders along the last and the second to last dimension.
        block: width and height of the shard of one device.
        sheets: for each sheet behind the first, the index of the axis that shards its dimension.
        summed: whether each device holds a partial sum.
        lines: a line of text for each dimension.
    """

    columns: tuple[Border, ...]
    rows: tuple[Border, ...]
    block: tuple[float, float]
    sheets: tuple[int, ...]
    summed: bool
    lines: tuple[str, ...]


def picture(layout: TensorLayout) -> Picture:
    """Returns the picture of a layout."""
    mesh = layout.layout
    padded: tuple[Axes, ...] = ((), (), *layout.axes)
    behind = [axis for axes in padded[:-2] for axis in axes]
    most = MAX_SHEETS + 1
    sheets = [axis for axis in behind for _ in range(min(mesh.device_matrix[axis], most) - 1)]
    rows, columns = padded[-2:]
    return Picture(
        columns=tuple(_borders(mesh, columns)),
        rows=tuple(_borders(mesh, rows)),
        block=(1 / min(mesh.size(columns), 64), 1 / min(mesh.size(rows), 64)),
        sheets=tuple(sheets[:MAX_SHEETS]),
        summed=bool(layout.partial),
        lines=tuple(_lines(layout)),
    )


def _borders(mesh: DeviceMatrix, axes: Axes) -> Iterator[Border]:
    """Borders of the outer axes, up to `MAX_BLOCKS` blocks."""
    blocks = 1
    for axis in axes:
        outer, blocks = blocks, blocks * mesh.device_matrix[axis]
        if blocks > MAX_BLOCKS:
            return
        step = blocks // outer
        yield from ((place / blocks, axis) for place in range(1, blocks) if place % step)


def _lines(layout: TensorLayout) -> Iterator[str]:
    mesh = layout.layout
    for dim, axes in enumerate(layout.axes):
        shards = prod(mesh.device_matrix[axis] for axis in axes)
        yield f"dim {dim}: {shards} shards over {mesh.named(axes)}" if axes else f"dim {dim}: whole"
    if layout.partial:
        yield f"one term of a sum over {mesh.named(sorted(layout.partial))}"
    if layout.varying:
        yield f"its gradient is a term of a sum over {mesh.named(sorted(layout.varying))}"
