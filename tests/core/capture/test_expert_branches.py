"""Loops over experts that skip experts without tokens are captured as one operator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import shardwright as sw
from core.capture.test_expert_loops import EXPERTS, HIDDEN, Experts, Gated, Looping, Mixture, batch
from shardwright.core.capture.capture import capture
from shardwright.core.graph import custom_ops
from shardwright.core.graph.interpreter import interpret

pytestmark = pytest.mark.usefixtures("untried_suggestions")


def add_rows(
    net: Experts, x: Tensor, weights: Tensor, ids: Tensor, index: int, out: Tensor
) -> None:
    rows, nth = torch.where(ids == index)
    out[rows] += weights[rows, nth, None] * net.experts[index](x[rows])


def any_token(net: Experts, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for index, expert in enumerate(net.experts):
        mask = ids == index
        if not mask.any():
            continue
        rows, nth = torch.where(mask)
        out.index_add_(0, rows, expert(x[rows]) * weights[rows, nth, None])
    return out


def length(net: Experts, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for index, expert in enumerate(net.experts):
        rows, nth = torch.where(ids == index)
        if len(rows) == 0:
            continue
        out[rows] += weights[rows, nth, None] * expert(x[rows])
    return out


def shape(net: Experts, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for index, expert in enumerate(net.experts):
        rows, nth = torch.where(ids == index)
        if rows.shape[0] > 0:
            out = out.index_add(0, rows, expert(x[rows]) * weights[rows, nth, None])
    return out


def chosen_experts(net: Experts, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    masks = F.one_hot(ids, num_classes=EXPERTS).permute(2, 1, 0)
    for index in torch.greater(masks.sum(dim=(-1, -2)), 0).nonzero():
        nth, rows = torch.where(masks[index].squeeze(0))
        current = x[None, rows].reshape(-1, HIDDEN)
        out.index_add_(0, rows, net.experts[index](current) * weights[rows, nth, None])
    return out


def unique(net: Experts, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for index in ids.unique():
        rows, nth = torch.where(ids == index)
        out.index_add_(0, rows, net.experts[index](x[rows]) * weights[rows, nth, None])
    return out


def counts(net: Experts, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for index, count in enumerate(torch.bincount(ids.flatten(), minlength=EXPERTS).tolist()):
        if count > 0:
            add_rows(net, x, weights, ids, index, out)
    return out


def number(net: Experts, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for index, expert in enumerate(net.experts):
        if (ids == index).sum().item() == 0:
            continue
        mask, of_expert = (ids == index).any(-1), (weights * (ids == index)).sum(-1)
        out[mask] += expert(x[mask]) * of_expert[mask].unsqueeze(-1)
    return out


@pytest.mark.parametrize(
    "mixture",
    [any_token, length, shape, chosen_experts, unique, counts, number],
    ids=lambda each: each.__name__,
)
def test_a_loop_that_skips_experts_without_tokens_becomes_one_operator(mixture: Mixture) -> None:
    net = Looping(mixture, Gated)
    graph = capture(net, batch())
    assert [op.target for op in graph.ops].count(custom_ops.experts) == 1
    # With this bias all tokens choose two of the four experts.
    for bias in (0.0, 100.0):
        with torch.no_grad():
            net.router.bias[:2] += bias
        result, *_ = interpret(graph, dict(net.named_parameters()), {}, batch(2))
        torch.testing.assert_close(result, net(*batch(2)))


def test_a_plan_of_a_loop_that_skips_changes_no_result() -> None:
    net = Looping(chosen_experts, Gated)
    plan = sw.plan(net, batch(), devices=4)
    assert sw.check(net, batch(), {}, plan).passes()


def limited(net: Experts, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for index, expert in enumerate(net.experts):
        rows, nth = torch.where(ids == index)
        rows, nth = (rows[:20], nth[:20]) if rows.shape[0] > 20 else (rows, nth)
        if rows.shape[0] > 0:
            out[rows] += weights[rows, nth, None] * expert(x[rows])
    return out


def counted(net: Experts, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    out, number = torch.zeros_like(x), 0
    for index in range(EXPERTS):
        if (ids == index).any():
            add_rows(net, x, weights, ids, index, out)
            number += 1
    return out / number


def otherwise(net: Experts, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for index in range(EXPERTS):
        if (ids == index).any():
            add_rows(net, x, weights, ids, index, out)
        else:
            out += 1
    return out


def of_another(net: Experts, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for index in range(EXPERTS):
        if (ids == (index + 1) % EXPERTS).any():
            add_rows(net, x, weights, ids, index, out)
    return out


def doubling_if(condition: Callable[[Tensor, Tensor], bool]) -> Mixture:
    """A loop that doubles all tokens if an expert has some number of tokens, here never."""

    def mixture(net: Experts, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for index in range(EXPERTS):
            mask = ids == index
            rows, nth = torch.where(mask)
            if condition(rows, mask):
                x = x * 2
            if rows.shape[0] > 0:
                out[rows] += weights[rows, nth, None] * net.experts[index](x[rows])
        return out

    return mixture


def one_expert(net: Experts, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    return counts(net, x * 2 if (ids[:, 0] == 2).all() else x, weights, ids)


def weighted(net: Experts, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    return counts(net, x * 2 if weights.max() > 0.9 else x, weights, ids)


MORE = "changes more than the rows of these tokens"
OTHERWISE = "depends on (more than|the number of an expert.s tokens, not only on) whether"
UNKNOWN = "whose uses capture cannot record"


@pytest.mark.parametrize(
    ("mixture", "reason"),
    [
        (limited, OTHERWISE),
        (counted, MORE),
        (otherwise, MORE),
        (of_another, "skips these rows of an expert that may have tokens"),
        (one_expert, OTHERWISE),
        (weighted, "this depends on the value of a tensor"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_another_branch_is_refused_with_its_reason(mixture: Mixture, reason: str) -> None:
    with pytest.raises(sw.CaptureError, match=f"(?s)test_expert_.*{reason}.*`sw.mixture_of_exp"):
        capture(Looping(mixture, Gated), batch())


@pytest.mark.parametrize(
    ("condition", "reason"),
    [
        (lambda rows, mask: rows.shape[0] == 7, OTHERWISE),
        (lambda rows, mask: rows.numel() / 2 == 3.5, "this depends on the value of a tensor"),
        (lambda rows, mask: mask.sum().item() == 7, OTHERWISE),
        (lambda rows, mask: mask.sum().item() - 7 == 0, OTHERWISE),
        (lambda rows, mask: len(rows) == 7, UNKNOWN),
        (lambda rows, mask: int(mask.sum()) == 7, UNKNOWN),
        (lambda rows, mask: mask.sum().float().item() == 7, UNKNOWN),
    ],
    ids=["shape", "ratio", "item", "arithmetic", "len", "int", "float"],
)
def test_a_branch_on_a_number_of_tokens_is_refused_however_it_is_read(
    condition: Callable[[Tensor, Tensor], bool], reason: str
) -> None:
    with pytest.raises(sw.CaptureError, match=f"(?s)test_expert_.*{reason}"):
        capture(Looping(doubling_if(condition), Gated), batch())


def test_a_batch_with_fewer_choices_than_experts_is_refused() -> None:
    x, target = batch()
    with pytest.raises(sw.CaptureError, match="depends on the value of a tensor"):
        capture(Looping(any_token, Gated), (x[:1, :1], target[:1, :1]))
