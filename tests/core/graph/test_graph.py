"""What a notebook shows of a graph."""

import torch
from torch import nn

import shardwright as sw


def test_a_notebook_shows_a_row_for_each_operator_as_text() -> None:
    net = nn.Sequential()
    net.add_module("<b>", nn.Linear(4, 3))
    html = sw.capture(net, (torch.zeros(2, 4),))._repr_html_()
    assert html.count("<tr>") == 1 + 2
    assert "<td>&lt;b&gt;</td><td>aten.linear.default</td>" in html
    assert "<b>" not in html
