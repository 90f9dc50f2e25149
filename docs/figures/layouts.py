"""Layouts of a matrix, and what brings one to another."""

from __future__ import annotations

from svg import SOFT, Drawing, draw_tensor

from shardwright.core.layout.layout import Layout, TensorLayout
from shardwright.core.layout.redistribution import redistribution

MESH = Layout((2, 2, 2), ("dp", "sp", "mp"))
SIDE = 128


def words(layout: TensorLayout) -> str:
    """A layout without its mesh: `(dp, None; partial mp)`."""
    return repr(layout).partition(" on ")[0]


def layouts() -> Drawing:
    """One matrix on eight devices, in five layouts."""
    shown = [
        (MESH("None", "None"), "replicated"),
        (MESH("dp", "None"), "rows over one axis"),
        (MESH("dp", "mp"), "both dimensions"),
        (MESH("mp", ("sp", "dp")), "columns over two axes"),
        (TensorLayout(MESH, ((0,), ()), partial=frozenset({2})), "terms of a sum over mp"),
    ]
    step = SIDE + 26
    drawing = Drawing(step * len(shown) + 26, SIDE + 78)
    for number, (layout, meaning) in enumerate(shown):
        left = 26 + number * step
        drawing.text(left + SIDE / 2, 24, words(layout))
        draw_tensor(drawing, layout, left, 36, SIDE, SIDE)
        drawing.text(left + SIDE / 2, SIDE + 56, meaning, ink=SOFT)
    return drawing


def redistributions() -> Drawing:
    """Routes from one layout to another, each step with its collective and its bytes."""
    product = TensorLayout(MESH, ((0,), ()), partial=frozenset({2}))
    pairs = [
        (MESH("mp", "None"), MESH("None", "mp")),
        (product, MESH("dp", "mp")),
        (product, MESH("dp", "None")),
        (MESH(("dp", "mp"), "None"), MESH("dp", "sp")),
    ]
    routes = [redistribution(source, target, (64, 64), itemsize=2) for source, target in pairs]
    longest = max(len(route.steps) for route in routes)
    side, gap = 104, 210
    drawing = Drawing(26 + longest * (side + gap) + side + 26, 26 + len(routes) * (side + 48))
    for row, route in enumerate(routes):
        left, top = 26.0, 26.0 + row * (side + 48)
        drawing.text(left + side / 2, top, words(route.source))
        draw_tensor(drawing, route.source, left, top + 10, side, side)
        for step in route.steps:
            middle = top + 10 + side / 2
            sent = [step.forward_bytes((64, 64), 2), step.backward_bytes((64, 64), 2)]
            drawing.arrow(left + side + 8, left + side + gap - 8, middle)
            drawing.text(left + side + gap / 2, middle - 8, str(step))
            said = f"{sent[0]:,} B forward, {sent[1]:,} back"
            drawing.text(left + side + gap / 2, middle + 18, said, 11, ink=SOFT)
            left += side + gap
            drawing.text(left + side / 2, top, words(step.target))
            draw_tensor(drawing, step.target, left, top + 10, side, side)
    return drawing
