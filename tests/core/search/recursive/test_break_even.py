"""From which `mem_coeff` on an operator is cut."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.core.layout.layout import Layout
from shardwright.core.search.recursive.break_even import break_even_mem_coeffs, main_operators

MESH = Layout((2,), ("a",))


class Small(nn.Module):
    """The product of the documents: 4096 columns of weights, 8192 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(4096, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(x.flip(0, 1))


def test_the_break_even_is_the_published_figure_and_the_search_turns_there() -> None:
    with torch.device("meta"):
        graph = sw.capture(Small(), (torch.empty(8192, 4096),))
    found = break_even_mem_coeffs(graph, MESH)
    assert {name: round(value, 6) for name, value in found.items()} == {"dense": 0.012207}
    below, above = (
        sw.plan(graph, devices=2, mem_coeff=found["dense"] * factor).cuts.get("dense", {})
        for factor in (0.99, 1.01)
    )
    assert (below, above) == ({}, {"b": (0,)})


def test_what_has_no_weight_or_no_batch_to_cut_has_none() -> None:
    def product(x: Tensor, y: Tensor) -> Tensor:
        return x @ y

    class Product(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return product(x, x.mT)

    with torch.device("meta"):
        graph = sw.capture(Product(), (torch.empty(4, 8, 8),))
        odd = sw.capture(nn.Linear(8, 8), (torch.empty(7, 8),))
    assert len(main_operators(graph)) == 1 and break_even_mem_coeffs(graph, MESH) == {}
    assert len(main_operators(odd)) == 1 and break_even_mem_coeffs(odd, MESH) == {}
    assert break_even_mem_coeffs(odd, Layout((1,), ("a",))) == {}
