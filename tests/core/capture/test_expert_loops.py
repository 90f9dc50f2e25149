"""Loops over experts are captured as one operator, in any form."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright as sw
from shardwright.core.capture.capture import capture
from shardwright.core.graph import custom_ops
from shardwright.core.graph.interpreter import interpret

pytestmark = pytest.mark.usefixtures("untried_suggestions")

EXPERTS, TOP_K, HIDDEN, INNER = 4, 2, 8, 12


class Gated(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, INNER, bias=False)
        self.up = nn.Linear(HIDDEN, INNER, bias=False)
        self.down = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def perceptron(index: int) -> nn.Module:
    return nn.Sequential(nn.Linear(HIDDEN, INNER), nn.GELU(), nn.Linear(INNER, HIDDEN))


def unlike(index: int) -> nn.Module:
    return nn.Sequential(Gated(index), nn.ReLU() if index % 2 else nn.Tanh())


class Experts(nn.Module):
    """Experts of tokens; `mixture` gets this module, tokens, routing weights and expert ids."""

    def __init__(self, mixture: Mixture, make_expert: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.mixture = mixture
        self.experts = nn.ModuleList(map(make_expert, range(EXPERTS)))
        self.matrices = nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN) / 3)

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return self.mixture(self, x, weights, ids)


class Looping(nn.Module):
    def __init__(self, mixture: Mixture, make_expert: Callable[[int], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.layer = Experts(mixture, make_expert)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, ids = self.router(tokens).softmax(-1).topk(TOP_K)
        return F.mse_loss(self.layer(tokens, weights, ids).view_as(x), target)


Mixture = Callable[[Experts, Tensor, Tensor, Tensor], Tensor]


def one_hot(net: Experts, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    masks = F.one_hot(ids, num_classes=EXPERTS).permute(2, 1, 0)
    for index in range(EXPERTS):
        nth, rows = torch.where(masks[index])
        current = x[None, rows].reshape(-1, HIDDEN)
        out.index_add_(0, rows, net.experts[index](current) * weights[rows, nth, None])
    return out


def added_in_place(net: Experts, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for index, expert in enumerate(net.experts):
        rows, nth = torch.where(ids == index)
        out[rows] += weights[rows, nth, None] * expert(x[rows])
    return out


def written(net: Experts, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    rows, flat = x.repeat_interleave(TOP_K, dim=0), ids.view(-1)
    results = torch.empty_like(rows)
    for index, expert in enumerate(net.experts):
        results[flat == index] = expert(rows[flat == index])
    return (results.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(1)


def any_of_the_experts(net: Experts, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for index, expert in enumerate(net.experts):
        mask = (ids == index).any(-1)
        of_expert = (weights * (ids == index)).sum(-1)
        out[mask] += expert(x[mask]) * of_expert[mask].unsqueeze(-1)
    return out


def nonzero(net: Experts, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    out = x.clone()
    for index, expert in enumerate(net.experts):
        places = (ids == index).nonzero(as_tuple=True)
        out = out.index_add(0, places[0], expert(x[places[0]]) * weights[places].unsqueeze(-1))
    return out


def of_three_dimensions(net: Experts, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    x, weights, ids = (each.view(4, 6, -1) for each in (x, weights, ids))
    out = torch.zeros_like(x)
    for index, expert in enumerate(net.experts):
        batch, place, nth = torch.where(ids == index)
        out[batch, place] += expert(x[batch, place]) * weights[batch, place, nth].unsqueeze(-1)
    return out


def first_expert_only(net: Experts, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    out, first = torch.zeros_like(x), ids[:, 0]
    for index, expert in enumerate(net.experts):
        out[first == index] = expert(x[first == index])
    return out * weights[:, :1]


def fewer_experts(net: Experts, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """The last expert of the router keeps its tokens as they are."""
    out = torch.zeros_like(x)
    for index, expert in enumerate(net.experts[:-1]):
        rows, nth = torch.where(ids == index)
        out = out.index_add(0, rows, expert(x[rows]) * weights[rows, nth, None])
    return out + x * (weights * (ids == EXPERTS - 1)).sum(-1, keepdim=True)


def fewer_experts_written(net: Experts, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    rows, flat = x.repeat_interleave(TOP_K, dim=0), ids.view(-1)
    results = rows.clone()
    for index, expert in enumerate(net.experts[:-1]):
        results[flat == index] = expert(rows[flat == index])
    return (results.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(1)


def slices(net: Experts, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for index in range(EXPERTS):
        rows, nth = torch.where(ids == index)
        hidden = F.relu(x[rows] @ net.matrices[index])
        out.index_add_(0, rows, (hidden @ net.matrices[index].T) * weights[rows, nth, None])
    return out


def nonzero_table(net: Experts, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    out, first = torch.zeros_like(x), ids[:, 0]
    for index, expert in enumerate(net.experts):
        rows = (first == index).nonzero().squeeze(-1)
        out.index_add_(0, rows, expert(x[rows]))
    return out


POSITIVE: list[tuple[Mixture, Callable[[int], nn.Module]]] = [
    *((each, Gated) for each in (one_hot, added_in_place, written, any_of_the_experts, nonzero)),
    *((each, Gated) for each in (of_three_dimensions, first_expert_only, slices, nonzero_table)),
    *((each, Gated) for each in (fewer_experts, fewer_experts_written)),
    *((each, perceptron) for each in (one_hot, added_in_place, written)),
]


def batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, target = (torch.randn(4, 6, HIDDEN, generator=generator) for _ in range(2))
    return x, target


@pytest.mark.parametrize(
    ("mixture", "expert"), POSITIVE, ids=lambda each: getattr(each, "__name__", "")
)
def test_a_loop_over_experts_becomes_one_operator(
    mixture: Mixture, expert: Callable[[int], nn.Module]
) -> None:
    net = Looping(mixture, expert)
    graph = capture(net, batch())
    (experts,) = (op for op in graph.ops if op.target is custom_ops.experts)
    assert experts.inputs[3].shape[0] >= EXPERTS - 1
    for seed in range(2, 5):
        result, *_ = interpret(graph, dict(net.named_parameters()), {}, batch(seed))
        torch.testing.assert_close(result, net(*batch(seed)))
    plan = sw.plan(net, batch(), devices=4)
    assert sw.check(net, batch(), {}, plan).passes()


def all_of_each_other(net: Experts, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for index, expert in enumerate(net.experts):
        rows, nth = torch.where(ids == index)
        out = out.index_add(0, rows, expert(x[rows] - x[rows].mean(0)) * weights[rows, nth, None])
    return out


def overwritten(net: Experts, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for index, expert in enumerate(net.experts):
        mask = (ids == index).any(-1)
        out[mask] = expert(x[mask])
    return out


def written_twice(net: Experts, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Of two equal experts of a token one is lost, which an index chosen by `topk` never has."""
    out, ids = torch.zeros_like(x), ids // 2
    for index, expert in enumerate(net.experts[:2]):
        rows, nth = torch.where(ids == index)
        out[rows] += weights[rows, nth, None] * expert(x[rows])
    return out


def limited(net: Experts, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Drops tokens of an expert behind its first eight."""
    out, first = torch.zeros_like(x), F.one_hot(ids[:, 0], EXPERTS)
    place = (first.cumsum(0) * first).sum(-1)
    for index, expert in enumerate(net.experts):
        mask = (ids[:, 0] == index) & (place <= 8)
        out[mask] = expert(x[mask])
    return out


@pytest.mark.parametrize(
    ("mixture", "expert", "reason"),
    [
        (one_hot, unlike, "runs different operators for different experts"),
        (all_of_each_other, Gated, "combines the rows of several tokens"),
        (overwritten, Gated, "overwrites the rows of a token by each of its experts"),
        (written_twice, Gated, "writes selected rows at positions other than the mask"),
        (limited, Gated, "selects rows by masks other than `ids == expert`"),
    ],
    ids=["unlike", "mean", "overwritten", "written_twice", "limited"],
)
def test_another_loop_is_refused_with_its_reason(
    mixture: Mixture, expert: Callable[[int], nn.Module], reason: str
) -> None:
    with pytest.raises(sw.CaptureError, match=f"(?s)test_expert_loops.py:.*{reason}"):
        capture(Looping(mixture, expert), batch())


class Marking(nn.Module):
    """Experts beside rows of two kinds of tokens, which are no experts."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Looping(one_hot, Gated)
        self.marks = nn.Parameter(torch.randn(2, HIDDEN))

    def forward(self, x: Tensor, target: Tensor, tokens: Tensor) -> Tensor:
        x = x.clone()
        for mark, token in zip(self.marks, (7, 9), strict=True):
            x[tokens == token] = x[tokens == token] * mark
        return self.inner(x, target)


def test_selections_that_are_no_experts_stay_beside_them() -> None:
    net, call = Marking(), (*batch(), torch.randint(6, 10, (4, 6)))
    graph = capture(net, call)
    assert [op.target for op in graph.ops].count(custom_ops.experts) == 1
    assert sw.check(net, call, {}, sw.plan(net, call, devices=2)).passes()


def given(net: Experts, x: Tensor, ids: Tensor) -> Tensor:
    out = x.clone()
    for index, expert in enumerate(net.experts):
        out[ids == index] = expert(x[ids == index])
    return out


def hashed(net: Experts, x: Tensor, ids: Tensor) -> Tensor:
    return given(net, x, ids % EXPERTS)


def of_two_kinds(net: Experts, x: Tensor, ids: Tensor) -> Tensor:
    out, is_image = torch.empty_like(x), ids > 2
    out[is_image] = net.experts[0](x[is_image])
    out[~is_image] = net.experts[1](x[~is_image])
    return out


class Choosing(nn.Module):
    """Experts that are no choice of a router."""

    def __init__(self, mixture: Callable[[Experts, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mixture, self.layer = mixture, Experts(one_hot, Gated)

    def forward(self, x: Tensor, target: Tensor, ids: Tensor) -> Tensor:
        return F.mse_loss(self.mixture(self.layer, x.flatten(0, 1), ids.flatten()), target)


@pytest.mark.parametrize("mixture", [given, hashed, of_two_kinds])
def test_numbers_that_are_no_experts_select_what_they_select_in_the_model(
    mixture: Callable[[Experts, Tensor, Tensor], Tensor],
) -> None:
    x, target = batch()
    ids = torch.randint(-3, 9, (4, 6), generator=torch.Generator().manual_seed(0))
    net, call = Choosing(mixture), (x, target.flatten(0, 1), ids)
    graph = capture(net, call)
    assert [op.target for op in graph.ops].count(custom_ops.experts) == 1
    assert sw.check(net, call, {}, sw.plan(net, call, devices=1)).passes()
