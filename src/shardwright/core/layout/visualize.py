"""Pictures in text of which device holds which block of a tensor."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

from shardwright.core.layout.axes import Shape


class Drawing(str):
    """Grids in text, which a notebook shows as tables with a color for each block."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        hues: dict[str, float] = {}
        return "".join(_table(grid, hues) for grid in self.split("\n\n"))


def draw_devices(counts: Shape, sizes: Shape | None, holders: Callable[[Shape], Shape]) -> Drawing:
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
    return Drawing("\n\n".join(pictures))


def _grid(table: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    head, *body = (
        " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in table
    )
    rule = "-+-".join("-" * width for width in widths) + "-+"
    return "\n".join([head, rule, *body])


def _table(grid: str, hues: dict[str, float]) -> str:
    """HTML of one grid; blocks that the same devices hold have one color."""
    title, bracket, rest = grid.rpartition("]\n")
    head, _, *body = ([each.strip() for each in line.split("|")[:-1]] for line in rest.split("\n"))
    rows = "".join(f"<th>{name}</th>" for name in head)
    for label, *cells in body:
        rows += f"</tr><tr><th>{label}</th>"
        for cell in cells:
            # Neighbors differ most by the golden angle.
            hue = hues.setdefault(cell, len(hues) * 137.5 % 360)
            rows += f'<td style="background: hsl({hue:g} 60% 80%); color: #000">{cell}</td>'
    return f"<table><caption>{title}{bracket.strip()}</caption><tr>{rows}</tr></table>"
