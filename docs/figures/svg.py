"""What the figures are drawn with: shapes and words of one SVG, and tensors as grids of blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from xml.sax.saxutils import escape

from shardwright.core.layout.layout import TensorLayout

INK, SOFT, LINE = "#1f2328", "#59636e", "#8c959f"
COLORS = (
    "#9ecae9", "#f6b26b", "#a8d08d", "#e6a6c9", "#ffe08a", "#b9b0e6", "#8fd3c8", "#d9b48f",
)  # fmt: skip
"""Of devices, or of chunks: light enough for dark words."""


@dataclass
class Drawing:
    """One picture; lengths in pixels, from the upper left corner."""

    width: float
    height: float
    parts: list[str] = field(default_factory=list)

    def rect(
        self, x: float, y: float, width: float, height: float, fill: str, stroke: str = LINE
    ) -> None:
        size = f'width="{width:.1f}" height="{height:.1f}"'
        self.parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" {size} fill="{fill}" stroke="{stroke}"/>')

    def circle(self, x: float, y: float, radius: float, fill: str, stroke: str = LINE) -> None:
        self.parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" fill="{fill}" stroke="{stroke}"/>'
        )

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: float = 12,
        anchor: str = "middle",
        ink: str = INK,
    ) -> None:
        """Words on a line whose foot is at `y`."""
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" text-anchor="{anchor}"'
            f' fill="{ink}">{escape(words)}</text>'
        )

    def line(
        self, x: float, y: float, x2: float, y2: float, stroke: str = LINE, dashes: bool = False
    ) -> None:
        more = ' stroke-dasharray="4 3"' if dashes else ""
        ends = f'x1="{x:.1f}" y1="{y:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
        self.parts.append(f'<line {ends} stroke="{stroke}"{more}/>')

    def arc(self, x: float, y: float, x2: float, y2: float, height: float, dashes: bool) -> None:
        """A line that bends upwards by `height`, downwards if that is negative."""
        more = ' stroke-dasharray="4 3"' if dashes else ""
        top = (y + y2) / 2 - height / 0.75
        path = f"M{x:.1f} {y:.1f} C{x:.1f} {top:.1f} {x2:.1f} {top:.1f} {x2:.1f} {y2:.1f}"
        self.parts.append(f'<path d="{path}" fill="none" stroke="{INK}"{more}/>')

    def arrow(self, x: float, x2: float, y: float) -> None:
        """From left to right."""
        self.line(x, y, x2 - 6, y, SOFT)
        self.parts.append(f'<path d="M{x2 - 7:.1f} {y - 4:.1f} l7 4 l-7 4 z" fill="{SOFT}"/>')

    def __str__(self) -> str:
        frame = f'viewBox="0 0 {self.width:g} {self.height:g}"'
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" {frame} width="{self.width:g}"'
                f' height="{self.height:g}" font-family="sans-serif">',
                '<rect width="100%" height="100%" rx="6" fill="white"/>',
                *self.parts,
                "</svg>",
                "",
            ]
        )


def holders(layout: TensorLayout, block: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The ranks that hold a block: replicas in one tuple, terms of a sum in several."""
    mesh, counts = layout.layout, layout.shard_counts
    terms: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.num_devices):
        slices = layout.slices(rank, counts)
        if tuple(part.start for part in slices) == block:
            place = mesh.coordinates(rank)
            terms.setdefault(tuple(place[axis] for axis in sorted(layout.partial)), []).append(rank)
    return tuple(map(tuple, terms.values()))


def draw_tensor(
    drawing: Drawing, layout: TensorLayout, x: float, y: float, width: float, height: float
) -> None:
    """A tensor of one or two dimensions: each block in the color of the first that holds it."""
    rows, columns = (1, *layout.shard_counts)[-2:]
    wide, high = width / columns, height / rows
    for row, column in product(range(rows), range(columns)):
        terms = holders(layout, (row, column)[-len(layout.shard_counts) :])
        left, top = x + column * wide, y + row * high
        share = wide / len(terms)
        for number, ranks in enumerate(terms):
            color = COLORS[ranks[0] % len(COLORS)]
            drawing.rect(left + number * share, top, share, high, color)
            words = " ".join(map(str, ranks))
            size = max(6.0, min(12.0, 1.5 * share / max(len(words), 2)))
            drawing.text(left + (number + 0.5) * share, top + high / 2 + 4, words, size)
            if number:
                drawing.text(left + number * share, top + high / 2 + 4, "+", min(14, 0.6 * share))
    drawing.rect(x, y, width, height, "none", INK)
