"""Operators that divide axes between two factors do so in one place, as far as that divides."""

from __future__ import annotations

import torch
from torch import nn

import shardwright as sw
from shardwright.core.layout.prime_mesh import prime_mesh
from shardwright.core.search.align_axis_splits import align_axis_splits

CUTS = {"0": {"j": (0,), "k": (1, 2)}, "1": {"k": (0, 1), "j": (2,)}, "2": {"b": (0, 1, 2)}}


def test_each_break_is_tried_for_all_operators_that_divide_the_axes() -> None:
    first, second = _tried(width=64)
    assert first == {**CUTS, "1": {"k": (0,), "j": (1, 2)}}
    assert second == {**CUTS, "0": {"j": (0, 1), "k": (2,)}}


def test_pinned_operators_and_sizes_that_do_not_divide_stay() -> None:
    first, second = _tried(width=64, pinned="1")
    assert first == CUTS
    assert second["1"] == CUTS["1"]
    first, second = _tried(width=6)
    assert first == second == CUTS


def _tried(width: int, pinned: str = "") -> list[dict[str, dict[str, tuple[int, ...]]]]:
    """The first layer has `width` rows, the second as many."""
    sizes = (64, width, 64) if width == 64 else (64, width, 6)
    layers = (nn.Linear(a, b, bias=False) for a, b in ((64, sizes[1]), (sizes[1], sizes[2])))
    net = nn.Sequential(*layers, nn.ReLU())
    graph = sw.capture(net, (torch.randn(64, 64),))
    return [
        {name: {f: tuple(a) for f, a in each.items()} for name, each in cuts.items()}
        for cuts in align_axis_splits(graph, prime_mesh(8), CUTS, {pinned}, (0, 1, 2))
    ]
