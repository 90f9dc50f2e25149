"""Operators on selected rows compute each row by itself, or are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import shardwright as sw
from core.capture.selected_rows_ranks import CHECKS, masked_language_model
from core.capture.selections import Program, Selecting, assert_equal_to_eager, batch
from random_plans import random_plan
from shardwright.core.capture.capture import capture
from shardwright.errors import CaptureError
from torchrun import checks_on_ranks

pytestmark = pytest.mark.usefixtures("untried_suggestions")


def missing_targets(net: Selecting, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    targets = torch.where(mask, x[..., 0], float("nan"))
    valid = ~torch.isnan(targets)
    return F.mse_loss(net.hidden(x).sum(-1)[valid], targets[valid])


def large_elsewhere(net: Selecting, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return net.hidden(torch.where(mask.unsqueeze(-1), x, 1e4 * x))[mask].exp().mean()


def invalid_labels(net: Selecting, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    valid = mask & (labels > 0)
    return (net.table(labels[valid] - 1) * net.hidden(x)[valid]).sum(-1).mean()


def reinforcement(net: Selecting, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    scores = net.head(net.hidden(x)).log_softmax(-1)
    chosen = scores.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    ratio, gain = (chosen - chosen.detach()).exp(), x[..., 0]
    bounded = ratio.clamp(0.8, 1.2)[mask] * gain[mask]
    return -torch.min(ratio[mask] * gain[mask], bounded).mean()


def attention_within_rows(net: Selecting, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    present, chosen = mask | (labels > 4), mask.any(-1)
    rows = net.hidden(x)[chosen]
    scores = rows @ net.norm(rows).transpose(1, 2)
    weights = scores.masked_fill(~present[chosen][:, None], -torch.inf).softmax(-1)
    return (weights @ net.hidden(rows)).square().mean()


EQUAL: dict[str, Program] = {
    "attention within rows, to their present elements": attention_within_rows,
    "targets that are NaN": missing_targets,
    "infinite values elsewhere": large_elsewhere,
    "invalid labels elsewhere": invalid_labels,
    "policy gradients": reinforcement,
    "log of positive numbers": lambda net, x, labels, mask: (
        net.hidden(x)[net.hidden(x) > 0].log().mean()
    ),
    "norms of rows": lambda net, x, labels, mask: (
        F.normalize(net.hidden(x[mask]), dim=-1).sum() + net.hidden(x[mask]).norm(dim=-1).mean()
    ),
    "statistics of rows": lambda net, x, labels, mask: (
        (net.hidden(x)[mask] / net.hidden(x)[mask].std(-1, keepdim=True)).pow(3).mean()
    ),
    "a mask of parameters": lambda net, x, labels, mask: (
        net.hidden(x)[net.head(x).argmax(-1) > 4].square().mean()
    ),
    "features side by side": lambda net, x, labels, mask: (
        torch.cat([net.hidden(x)[mask], x[mask]], -1).chunk(2, -1)[0].amax(-1).mean()
    ),
    "a write into rows": lambda net, x, labels, mask: (
        net.norm(net.hidden(x)[mask]).index_fill(1, torch.tensor([0]), 0.0).square().mean()
    ),
    "attention of rows to a sequence": lambda net, x, labels, mask: F.scaled_dot_product_attention(
        net.hidden(x)[mask][None], x[:1], x[:1]
    ).mean(),
}


@pytest.mark.parametrize("program", EQUAL)
def test_rows_equal_the_model(program: str) -> None:
    assert_equal_to_eager(EQUAL[program])


def rows(net: Selecting, x: Tensor, mask: Tensor) -> Tensor:
    return net.hidden(x)[mask]


def written_elsewhere(net: Selecting, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    out[~mask] = rows(net, x, mask)
    return out.sum()


REFUSED: dict[str, tuple[Program, str]] = {
    "returned": (lambda net, x, labels, mask: rows(net, x, mask), "the shape of the result"),
    "products": (
        lambda net, x, labels, mask: (rows(net, x, mask) @ rows(net, x, mask).T).mean(),
        "`matmul` combines rows",
    ),
    "differences": (
        lambda net, x, labels, mask: (rows(net, x, mask)[:, None] - rows(net, x, mask)).mean(),
        "`sub` combines rows",
    ),
    "other masks": (
        lambda net, x, labels, mask: (rows(net, x, mask) * x[~mask]).mean(),
        "different masks select",
    ),
    "a write to other rows": (written_elsewhere, "different masks select"),
    "the first row": (
        lambda net, x, labels, mask: rows(net, x, mask)[0].sum(),
        "`select` combines",
    ),
    "sorted": (lambda net, x, labels, mask: rows(net, x, mask).sort(0)[0][0].sum(), "`sort` comb"),
    "cumulative": (
        lambda net, x, labels, mask: rows(net, x, mask).cumsum(0).mean(),
        "`cumsum` com",
    ),
    "joined with others": (
        lambda net, x, labels, mask: torch.cat([rows(net, x, mask), x[0]]).square().mean(),
        "`cat` combines rows",
    ),
    "factorized": (
        lambda net, x, labels, mask: torch.linalg.cholesky(
            (x.transpose(1, 2) @ x + torch.eye(x.shape[-1]))[mask.any(-1)]
        ).sum(),
        "select the rows of its result instead",
    ),
    "attention among rows": (
        lambda net, x, labels, mask: F.scaled_dot_product_attention(
            *(rows(net, x, mask)[None] for _ in range(3))
        ).mean(),
        "`scaled_dot_product_attention` combines rows",
    ),
}


@pytest.mark.parametrize("program", REFUSED)
def test_rows_are_refused(program: str) -> None:
    function, text = REFUSED[program]
    with pytest.raises(CaptureError, match=text):
        capture(Selecting(function), batch(0.5))


@pytest.mark.parametrize("program", [masked_language_model, reinforcement, missing_targets])
def test_random_plans_train_selected_rows_exactly(program: Program) -> None:
    net, call = Selecting(program), batch(0.5)
    graph = capture(net, call)
    for seed in range(2):
        plan = random_plan(graph, 4, seed)
        assert sw.check(net, call, None, replace(plan, graph=graph)).passes(1e-9)


def scores_of_labels(net: Selecting, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    scores, rows = net.head(x).flatten(0, 1), mask.flatten().nonzero().squeeze(1)
    return -scores.log_softmax(-1)[rows, labels.flatten()[rows]].mean()


@pytest.mark.parametrize("program", [masked_language_model, invalid_labels, scores_of_labels])
def test_micro_batches_divide_by_the_rows_of_the_batch(program: Program) -> None:
    net, call = Selecting(program), batch(0.3)
    plan = sw.plan(net, call, devices=2, micro_batches=2)
    assert sw.check(net, call, None, plan).passes(1e-9)


test_selected_rows_on_real_ranks = checks_on_ranks(CHECKS, 2)
