"""The double recursion on the example of docs/search.md."""

from __future__ import annotations

import torch
from svg import SOFT, Drawing, draw_tensor
from torch import nn

from shardwright.core.capture.capture import capture
from shardwright.core.layout.layout import Layout
from shardwright.core.rules import rule_of
from shardwright.core.search.indexed_graph import index_graph
from shardwright.core.search.recursive.search import Recursion, record_axis
from shardwright.core.search.request import CutsOfGraph

LAYERS = ("layer1", "layer2", "layer3")
SIDES = {784: 80, 512: 66, 32: 44, 1: 32}
"""Pixels of a size."""


class Network(nn.Module):
    """Three matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Linear(28 * 28, 512)
        self.layer2 = nn.Linear(512, 512)
        self.layer3 = nn.Linear(512, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = torch.flatten(images, 1)
        x = torch.relu(self.layer1(x))
        x = torch.relu(self.layer2(x))
        return self.layer3(x)  # type: ignore[no-any-return]


def recursion() -> Drawing:
    """Axis after axis, what each matrix product cuts, and what its tensors are split into."""
    with torch.device("meta"):
        graph = capture(Network(), (torch.empty(32, 1, 28, 28),))
    indexed = index_graph(graph)
    search = Recursion(indexed, mem_coeff=0.1, order="topology", log=None)
    ops = {op.name: op for op in graph.ops}
    cuts: CutsOfGraph = {}
    drawing = Drawing(936, 46 + 3 * 152)
    for column, name in enumerate(LAYERS):
        drawing.text(190 + column * 282, 24, name, 13)
    for axis in range(3):
        choices = search.decide_axis(axis, 2, {})
        record_axis(indexed, choices, axis, cuts)
        mesh = Layout((2,) * (axis + 1), tuple("abc"[: axis + 1]))
        top = 46.0 + axis * 152
        drawing.text(16, top + 50, f"axis {axis}", 13, "start")
        drawing.text(16, top + 68, f"{2 ** (axis + 1)} devices", 11, "start", SOFT)
        for column, name in enumerate(LAYERS):
            op, left = ops[name], 96.0 + column * 282
            rule = rule_of(op)
            assert rule is not None
            factor = next(factor for factor, axes in cuts[name].items() if axis in axes)
            inputs, outputs = rule.layouts(mesh, cuts[name])
            tensors = [
                (op.inputs[0].shape, inputs[0], "input"),
                (op.inputs[1].shape, inputs[1], "weight"),
                (op.outputs[0].shape, outputs[0], "result"),
            ]
            drawing.text(left + 94, top + 6, f"cuts {factor}")
            for number, (shape, layout, word) in enumerate(tensors):
                high, wide = SIDES[shape[0]], SIDES[shape[1]]
                x = left + number * 91
                draw_tensor(drawing, layout, x, top + 18, wide, high)
                drawing.text(x + wide / 2, top + high + 32, word, 10, ink=SOFT)
    return drawing
