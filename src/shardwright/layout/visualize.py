"""Pictures in text of which device holds which block of a tensor."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

from shardwright.layout.axes import Shape


def draw_devices(counts: Shape, sizes: Shape | None, holders: Callable[[Shape], Shape]) -> str:
    """A grid of the blocks of a tensor; one for each index of the blocks of leading dimensions.

    Args:
        counts: in how many blocks each dimension is cut.
        sizes: of a block, to show which elements it has; None to show its index.
        holders: the ranks that hold the block with an index.
    """

    def edge(dim: int, index: int) -> str:
        return f"{index}" if sizes is None else f"{index * sizes[dim]}:{(index + 1) * sizes[dim]}"

    ndim = len(counts)
    *leading_counts, rows, columns = (1, 1, *counts)[-max(ndim, 2) :]
    pictures = []
    for leading in product(*map(range, leading_counts)):
        header = [edge(ndim - 1, column) for column in range(columns)] if ndim else [""]
        table = [["", *header]]
        for row in range(rows):
            blocks = ((*leading, row, column)[-ndim:] if ndim else () for column in range(columns))
            label = edge(ndim - 2, row) if ndim > 1 else ""
            table.append([label, *(" ".join(map(str, holders(block))) for block in blocks)])
        title = ", ".join([*(edge(dim, index) for dim, index in enumerate(leading)), ":, :"])
        pictures.append((f"[{title}]\n" if leading else "") + _grid(table))
    return "\n\n".join(pictures)


def _grid(table: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    head, *body = (
        " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in table
    )
    rule = "-+-".join("-" * width for width in widths) + "-+"
    return "\n".join([head, rule, *body])
