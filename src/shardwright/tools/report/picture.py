"""Small pictures of how tensors are split: the last two dimensions as a grid, the others as sheets.

Lengths are fractions of the whole tensor, so tensors of one layout share a picture.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from shardwright.core.layout.axes import Axes
from shardwright.core.layout.layout import DeviceMatrix, TensorLayout

MOST_BLOCKS = 16
"""Blocks along one side that are drawn apart."""

MOST_SHEETS = 4

Border = tuple[float, int]
"""Where a border between two blocks is, and the number of the axis that makes it."""


@dataclass(frozen=True)
class Picture:
    """A split tensor.

    Args:
        columns, rows: the borders along the last dimension and the last but one.
        block: width and height of what one device holds.
        sheets: the numbers of the axes that cut other dimensions, one for each sheet behind.
        summed: whether each device holds one term of a sum.
        lines: the same in words, one dimension after the other.
    """

    columns: tuple[Border, ...]
    rows: tuple[Border, ...]
    block: tuple[float, float]
    sheets: tuple[int, ...]
    summed: bool
    lines: tuple[str, ...]


def picture(layout: TensorLayout) -> Picture:
    """The picture of a layout."""
    mesh = layout.layout
    padded: tuple[Axes, ...] = ((), (), *layout.axes)
    behind = [axis for axes in padded[:-2] for axis in axes]
    most = MOST_SHEETS + 1
    sheets = [axis for axis in behind for _ in range(min(mesh.device_matrix[axis], most) - 1)]
    rows, columns = padded[-2:]
    return Picture(
        columns=tuple(_borders(mesh, columns)),
        rows=tuple(_borders(mesh, rows)),
        block=(1 / min(mesh.size(columns), 64), 1 / min(mesh.size(rows), 64)),
        sheets=tuple(sheets[:MOST_SHEETS]),
        summed=bool(layout.partial),
        lines=tuple(_lines(layout)),
    )


def _borders(mesh: DeviceMatrix, axes: Axes) -> Iterator[Border]:
    """The borders of the outer axes, as far as they can be told apart."""
    blocks = 1
    for axis in axes:
        outer, blocks = blocks, blocks * mesh.device_matrix[axis]
        if blocks > MOST_BLOCKS:
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
