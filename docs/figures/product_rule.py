"""What it means to cut a factor of a matrix product."""

from __future__ import annotations

import torch
from svg import SOFT, Drawing, draw_tensor
from torch import nn

from shardwright.core.capture.capture import capture
from shardwright.core.graph.graph import Op
from shardwright.core.layout.layout import Layout, TensorLayout
from shardwright.core.rules import rule_of

SIZES = {"b": 84, "k": 60, "j": 108}
"""Pixels."""


def linear() -> Op:
    """A linear layer without a bias, as it is captured."""
    with torch.device("meta"):
        net, batch = nn.Linear(64, 128, bias=False), torch.empty(32, 64)
    [op] = capture(net, (batch,)).ops
    return op


def rules() -> Drawing:
    """The linear layer `x W^T`, cut along each of its factors over two devices."""
    rule = rule_of(linear())
    assert rule is not None
    mesh = Layout((2,), ("tp",))
    meanings = {
        "b": "the batch: data parallel",
        "j": "columns of the result: column-parallel",
        "k": "the sum: row-parallel",
    }
    drawing = Drawing(770, 40 + 166 * len(meanings))
    drawing.text(20, 26, f"{rule}, over two devices", 13, "start")
    for number, (factor, meaning) in enumerate(meanings.items()):
        top = 48.0 + number * 166
        inputs, outputs = rule.layouts(mesh, {factor: (0,)})
        drawing.text(20, top + 18, f"cut {factor}", 13, "start")
        drawing.text(20, top + 36, meaning, 11, "start", SOFT)
        left = 280.0
        for name, dims, layout in zip(
            ("input", "weight", "result"),
            (*rule.inputs, *rule.outputs),
            (*inputs, *outputs),
            strict=True,
        ):
            high, wide = (SIZES[str(dim)] for dim in dims)
            label = f"{name}  {' '.join(map(str, dims))}"
            drawing.text(left + wide / 2, top + 14, label)
            draw_tensor(drawing, layout, left, top + 22, wide, high)
            drawing.text(left + wide / 2, top + high + 38, _state(layout), 11, ink=SOFT)
            left += 170
    return drawing


def _state(layout: TensorLayout) -> str:
    if layout.partial:
        return "terms of a sum"
    if layout.varying:
        return "whole; gradient: terms"
    return "split" if any(layout.axes) else "whole"
