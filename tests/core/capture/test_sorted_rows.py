"""Mixtures of experts that sort tokens by expert are captured as one operator, in any form."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright as sw
from shardwright.core.capture.capture import capture
from shardwright.core.graph import custom_ops
from shardwright.core.graph.graph import Graph
from shardwright.core.graph.interpreter import interpret

EXPERTS, TOP_K, HIDDEN, INNER = 4, 2, 8, 12


class Experts(nn.Module):
    """Matrices of experts, for rows that are sorted by expert."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, 2 * INNER) / 4)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, HIDDEN) / 4)

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        gate, value = torch._grouped_mm(rows, self.up, offs=ends).chunk(2, -1)
        return torch._grouped_mm(F.silu(gate) * value, self.down, offs=ends)


class Sorting(nn.Module):
    """A layer of experts; `mixture` gets the layer, tokens, routing weights and expert ids."""

    def __init__(self, mixture: Mixture, top_k: int = TOP_K) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mixture, self.top_k = mixture, top_k
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.experts = Experts()

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, ids = self.router(tokens).softmax(-1).topk(self.top_k)
        return F.mse_loss(self.mixture(self, tokens, weights, ids).view_as(x), target)


Mixture = Callable[[Sorting, Tensor, Tensor, Tensor], Tensor]


def ends_of(ids: Tensor) -> Tensor:
    return torch.bincount(ids.flatten(), minlength=EXPERTS).cumsum(0).to(torch.int32)


def scatter_add(net: Sorting, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    order = ids.view(-1).argsort(stable=True)
    counts = torch.histc(ids.view(-1).float(), bins=EXPERTS, min=0, max=EXPERTS)
    tokens = order // TOP_K
    rows = net.experts(x[tokens], counts.cumsum(0).to(torch.int32))
    rows = rows * weights.view(-1)[order].unsqueeze(-1)
    return torch.zeros_like(x).scatter_add(0, tokens.view(-1, 1).expand(-1, HIDDEN), rows)


def inverse_order(net: Sorting, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    _, order = ids.flatten().sort()
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel())
    ends = F.one_hot(ids.flatten(), EXPERTS).sum(0).cumsum(0, dtype=torch.int32)
    rows = net.experts(x.index_select(0, order // TOP_K), ends).index_select(0, inverse)
    return (rows.view(-1, TOP_K, HIDDEN) * weights.unsqueeze(-1)).sum(1)


def product_with_weights(net: Sorting, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    order = ids.view(-1).argsort()
    rows = torch.gather(x, 0, (order // TOP_K).view(-1, 1).expand(-1, HIDDEN))
    counts = (ids.view(-1, 1) == torch.arange(EXPERTS)).sum(0)
    sorted_rows = net.experts(rows, counts.cumsum(0).int())
    rows = torch.zeros_like(sorted_rows)
    rows[order] = sorted_rows
    weights = weights.view(-1, 1, TOP_K)
    return torch.bmm(weights, rows.view(-1, TOP_K, HIDDEN)).squeeze(1)


def weights_before_experts(net: Sorting, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    order = ids.view(-1).argsort(stable=True)
    tokens = order.div(TOP_K, rounding_mode="floor")
    rows = x[tokens] * weights.view(-1)[order][:, None]
    return x.index_add(0, tokens, net.experts(rows, ends_of(ids)))


def one_expert(net: Sorting, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    order = ids[:, 0].argsort()
    rows = torch.empty_like(x)
    rows[order] = net.experts(x[order], ends_of(ids[:, 0]))
    return rows * weights[:, :1]


def other_ends(net: Sorting, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    order = ids.view(-1).argsort(stable=True)
    ends = (torch.arange(EXPERTS) + 1).int() * (len(order) // EXPERTS)
    return torch.zeros_like(x).index_add(0, order // TOP_K, net.experts(x[order // TOP_K], ends))


def order_read(net: Sorting, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    order = ids.view(-1).argsort(stable=True)
    rows = net.experts(x[order // TOP_K], ends_of(ids))
    rows = rows * torch.linspace(0, 1, len(rows))[:, None]
    return torch.zeros_like(x).index_add(0, order // TOP_K, rows)


def one_column(net: Sorting, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    order = ids.view(-1).argsort(stable=True)
    rows = torch.gather(x, 0, (order // TOP_K).unsqueeze(-1)) * torch.ones(HIDDEN)
    return x.index_add(0, order // TOP_K, net.experts(rows, ends_of(ids)))


def batch() -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(1)
    x, target = torch.randn(2, 4, 6, HIDDEN, generator=draws)
    return x, target


def assert_equal_to_eager(net: Sorting, graph: Graph) -> None:
    parameters = dict(net.named_parameters())
    results = []
    for loss in (net(*batch()), interpret(graph, parameters, {}, batch())[0]):
        net.zero_grad()
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in parameters.values())])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "mixture",
    [
        scatter_add,
        inverse_order,
        product_with_weights,
        weights_before_experts,
        one_expert,
        one_column,
    ],
)
def test_sorted_experts_are_one_operator_without_a_sort(mixture: Mixture) -> None:
    net = Sorting(mixture, 1 if mixture is one_expert else TOP_K)
    graph = capture(net, batch())
    names = [op.short_name for op in graph.ops]
    assert [op.target for op in graph.ops].count(custom_ops.experts) == 1
    assert not any("sort" in name or "segment" in name or "index" in name for name in names)
    assert_equal_to_eager(net, graph)


@pytest.mark.parametrize("mixture", [other_ends, order_read])
def test_what_depends_on_the_order_of_sorted_rows_stays_as_written(mixture: Mixture) -> None:
    net = Sorting(mixture)
    graph = capture(net, batch())
    assert custom_ops.experts not in [op.target for op in graph.ops]
    assert_equal_to_eager(net, graph)


def test_a_capacity_that_few_batches_exceed_stays_as_written() -> None:
    def limited(net: Sorting, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        order = ids.view(-1).argsort(stable=True)
        counts = torch.bincount(ids.flatten(), minlength=EXPERTS).clamp(max=len(x) - 1)
        rows = net.experts(x[order // TOP_K], counts.cumsum(0).to(torch.int32))
        return torch.zeros_like(x).index_add(0, order // TOP_K, rows)

    graph = capture(Sorting(limited), batch())
    assert custom_ops.experts not in [op.target for op in graph.ops]


def test_routing_weights_behind_the_experts_belong_to_the_operator() -> None:
    for mixture in (scatter_add, inverse_order, product_with_weights):
        graph = capture(Sorting(mixture), batch())
        (experts,) = (op for op in graph.ops if op.target is custom_ops.experts)
        assert prod(experts.inputs[0].shape) == 24 * HIDDEN, mixture
        assert experts.inputs[2].shape[-1] == TOP_K, mixture


def test_experts_that_sort_can_be_sharded_by_expert() -> None:
    net = Sorting(scatter_add)
    sw.shard(net.experts, (None, None, None, (4, 1, 1, 1), (4, 1, 1)))
    plan = sw.plan(net, batch(), devices=4)
    assert sw.check(net, batch(), {}, plan).passes()
    assert plan.strategies["experts"][3:] == ((4, 1, 1, 1), (4, 1, 1))
