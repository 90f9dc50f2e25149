"""Views in the graphs of a batch and of a micro-batch that read the same elements."""

import torch

from core.rules.oracle import op_of
from shardwright.core.micro_batches.paired_views import Viewed, read_equal_elements

aten = torch.ops.aten


def test_views_without_elements_are_equal() -> None:
    op = op_of(aten.view.default, torch.empty(1, 0, 2), [1, 0])
    view = Viewed(op.output, op.inputs[0], (op,))
    assert read_equal_elements(view, view, lambda value: value.shape)
