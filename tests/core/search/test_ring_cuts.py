from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.core.capture.capture import capture
from shardwright.core.graph.graph import Graph
from shardwright.core.layout.layout import Layout
from shardwright.core.search.ring_cuts import ring_cuts

MESH = Layout((2, 3), ("a", "b"))


SMALL = 256 * 2 * (2 * 6 * 4 * 4)
"""Bytes of which a head's keys and values of both samples are just enough."""


class Twice(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        return F.scaled_dot_product_attention(y, y, y, mask).square().mean()


def graph(positions: int) -> Graph:
    x, mask = torch.zeros(2, 2, positions, 4), torch.ones(positions, positions, dtype=torch.bool)
    return capture(Twice(), (x, mask))


ATTENTION = ("scaled_dot_product_attention", "scaled_dot_product_attention_1")


def test_attention_along_the_sequence_goes_round_a_ring_where_it_may() -> None:
    cuts = {name: {"h": (0,), "s": (1,)} for name in ATTENTION}
    changed = ring_cuts(graph(6), MESH, cuts, (), SMALL)
    assert changed == {ATTENTION[0]: {"h": (0,), "ring": (1,)}, ATTENTION[1]: cuts[ATTENTION[1]]}


@pytest.mark.parametrize("pinned", [(), ATTENTION])
def test_nothing_changes_where_nothing_is_cut_along_the_sequence_or_all_is_pinned(pinned) -> None:
    factor = "s" if pinned else "h"
    cuts = {name: {factor: (0,)} for name in ATTENTION}
    assert ring_cuts(graph(6), MESH, cuts, pinned, SMALL) is None


def test_keys_and_values_that_take_little_are_gathered() -> None:
    cuts = {name: {"h": (0,), "s": (1,)} for name in ATTENTION}
    assert ring_cuts(graph(6), MESH, cuts, (), SMALL + 256) is None
