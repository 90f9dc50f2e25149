"""Draw the devices that have each shard of a tensor, as text and HTML."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

from shardwright.core.layout.axes import Shape


class Drawing(str):
    """Grids of shards as text; notebooks display tables with one color per set of devices."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        hues: dict[str, float] = {}
        return "".join(_format_html_table(grid, hues) for grid in self.split("\n\n"))


def draw_devices(counts: Shape, sizes: Shape | None, ranks_of: Callable[[Shape], Shape]) -> Drawing:
    """Draw the shards of a tensor as one grid per index of the leading dimensions.

    Args:
        counts: number of shards of each dimension.
        sizes: shape of a shard, to label the edges with element ranges; None for shard indices.
        ranks_of: function from the index of a shard to the ranks that have it.
    """

    def edge_label(dim: int, index: int) -> str:
        return f"{index}" if sizes is None else f"{index * sizes[dim]}:{(index + 1) * sizes[dim]}"

    ndim = len(counts)
    # Scalars and vectors are drawn with one row.
    *leading_counts, rows, columns = (1, 1, *counts)[-max(ndim, 2) :]
    pictures = []
    for leading in product(*map(range, leading_counts)):
        header = [edge_label(ndim - 1, column) for column in range(columns)] if ndim else [""]
        table = [["", *header]]
        for row in range(rows):
            # `ndim` may be 0, and a slice from -0 would be the full tuple.
            blocks = ((*leading, row, column)[-ndim:] if ndim else () for column in range(columns))
            label = edge_label(ndim - 2, row) if ndim > 1 else ""
            table.append([label, *(" ".join(map(str, ranks_of(block))) for block in blocks)])
        title = ", ".join([*(edge_label(dim, index) for dim, index in enumerate(leading)), ":, :"])
        pictures.append((f"[{title}]\n" if leading else "") + _format_grid(table))
    return Drawing("\n\n".join(pictures))


def _format_grid(table: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    head, *body = (
        " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in table
    )
    rule = "-+-".join("-" * width for width in widths) + "-+"
    return "\n".join([head, rule, *body])


def _format_html_table(grid: str, hues: dict[str, float]) -> str:
    """Return the HTML table of one grid; shards on the same devices have the same color.

    Args:
        grid: text of the grid, with its title.
        hues: hue of each set of devices, in degrees; new sets are added.
    """
    # Only grids with leading dimensions have a title, which ends with a bracket.
    title, bracket, table = grid.rpartition("]\n")
    head, _, *body = ([each.strip() for each in line.split("|")[:-1]] for line in table.split("\n"))
    rows = "".join(f"<th>{name}</th>" for name in head)
    for label, *cells in body:
        rows += f"</tr><tr><th>{label}</th>"
        for cell in cells:
            # Multiples of the golden angle give any number of hues that are far apart.
            hue = hues.setdefault(cell, len(hues) * 137.5 % 360)
            rows += f'<td style="background: hsl({hue:g} 60% 80%); color: #000">{cell}</td>'
    return f"<table><caption>{title}{bracket.strip()}</caption><tr>{rows}</tr></table>"
