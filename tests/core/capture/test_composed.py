"""Operators that are composed of others are captured as those."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, randn
from torch.nn import functional as F

import shardwright as sw
from random_plans import random_plan
from shardwright.core.rules import rule_of


class Composed(nn.Module):
    """A function of parameters."""

    def __init__(self, function: Callable[..., Any], *tensors: Tensor) -> None:
        super().__init__()
        self.function = function
        self.tensors = nn.ParameterList(map(nn.Parameter, tensors))

    def forward(self, scale: Tensor) -> Any:
        return self.function(*(tensor * scale for tensor in self.tensors))


CELL = (randn(6, 3), randn(6, 4), randn(6, 4), randn(16, 3), randn(16, 4))
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "lstm cell": (lambda x, h, c, w, u: torch.lstm_cell(x, (h, c), w, u), *CELL),
    "pairwise distance": (F.pairwise_distance, randn(6, 4), randn(6, 4)),
    "triplet margin loss": (F.triplet_margin_loss, *(randn(6, 4) for _ in range(3))),
    "quantile": (lambda x: torch.quantile(x, 0.3, dim=1), randn(6, 4)),
    "split": (lambda x: torch.hsplit(x, 2), randn(6, 4)),
    "stack": (lambda x, y: torch.column_stack([x, y]), randn(6), randn(6, 4)),
    "grid": (lambda x, y: torch.meshgrid(x, y, indexing="xy")[1], randn(6), randn(4)),
    "gradient": (lambda x: torch.gradient(x, dim=1)[0], randn(6, 4)),
    "norm": (lambda x: torch.linalg.matrix_norm(x, 2), randn(6, 3, 2)),
    "changes a copy": (lambda x: torch.permute_copy(x, (1, 0)).mul_(2) + x.T, randn(6, 4)),
    "cosine": (F.cosine_similarity, randn(6, 4), randn(6, 4)),
    "extremes": (lambda x: torch.aminmax(x, dim=1), randn(6, 4)),
    "distance": (torch.dist, randn(6, 4), randn(6, 4)),
    "mean of numbers": (lambda x: x.log().nanmean(1), randn(6, 4)),
    "alias": (torch.special.xlogy, randn(6, 4), randn(6, 4).abs()),
    "inverse": (lambda x: torch.linalg.tensorinv(x, 1), randn(4, 2, 2)),
    "pairs": (lambda x, y: F.cosine_embedding_loss(x, y, torch.ones(6)), randn(6, 4), randn(6, 4)),
    "copies": (lambda x: torch.unbind_copy(x, 1), randn(6, 2)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_all_parts_have_rules_and_any_plan_equals_eager(name: str) -> None:
    net, scale = Composed(*FUNCTIONS[name]), torch.tensor(1.5)
    graph = sw.capture(net, (scale,))
    assert [op for op in graph.ops if rule_of(op) is None] == []
    result = sw.check(net, (scale,), {}, random_plan(graph, 6, seed=3))
    assert result.passes(1e-9), result


@pytest.mark.parametrize("reduce", ["mean", "prod", "amax", "amin"])
@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("in_place", [True, False])
def test_indexed_reductions_shard_their_rows(reduce: str, include_self: bool, in_place: bool):
    index = torch.tensor([0, 2, 2, 0, 1, 2])

    def function(x: Tensor, rows: Tensor) -> Tensor:
        if in_place:
            x = x.mul(1)
            x.scatter_reduce_(
                0, index[:, None].expand(-1, 4), rows, reduce, include_self=include_self
            )
            return x * 2
        return x.index_reduce(0, index, rows, reduce, include_self=include_self)

    net, scale = Composed(function, randn(4, 4), randn(6, 4)), torch.tensor(1.5)
    graph = sw.capture(net, (scale,))
    rules = {str(rule_of(op)) for op in graph.ops}
    assert "v s, e s, e s -> v s" in rules
    result = sw.check(net, (scale,), {}, random_plan(graph, 6, seed=3))
    assert result.passes(1e-9), result


class Histogram(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return torch.histogramdd(x, [3, 2])


def test_lists_among_the_results_are_lists_of_results() -> None:
    assert [v.shape for v in sw.capture(Histogram(), (randn(6, 2),)).output_values] == [
        *((3, 2), (4,), (3,))
    ]
