"""Losses that are means over samples, and those that are not, compared with what pieces give."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import shardwright as sw
from core.planner.mean_of_samples_ranks import CHECKS
from shardwright.core.graph.graph import Graph
from shardwright.core.graph.loss_weighting import LossWeighting
from shardwright.core.parallel.loss_weights import LossWeights
from shardwright.core.planner.mean_of_samples import (
    check_mean_of_samples,
    loss_weighting,
    with_loss_weighting,
)
from shardwright.core.runtime.devices import Devices
from shardwright.models import Dimensions, build
from torchrun import checks_on_ranks

Loss = Callable[[nn.ModuleDict, Tensor, Tensor], Tensor]


class Model(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(
            {
                "linear": nn.Linear(6, 6),
                "norm": nn.LayerNorm(6),
                "batch_norm": nn.BatchNorm1d(6, track_running_stats=False),
                "attention": nn.MultiheadAttention(6, 2, batch_first=True),
            }
        )
        self.token = nn.Parameter(torch.randn(1, 1, 6))
        self.loss = loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.parts, self.parts["linear"](x), y)


def rows(h: Tensor) -> Tensor:
    return h.mean(1)


def token(h: Tensor, token: Tensor) -> Tensor:
    return torch.cat([token.expand(h.shape[0], 1, 6), h], 1)


MEANS: dict[str, Loss] = {
    "a mean": lambda parts, h, y: h.square().mean(),
    "a mean of means": lambda parts, h, y: h.square().mean(2).mean(0).mean(),
    "mse": lambda parts, h, y: F.mse_loss(rows(h), rows(h).tanh() + 1),
    "bce": lambda parts, h, y: F.binary_cross_entropy_with_logits(
        rows(h), torch.ones_like(rows(h))
    ),
    "cross entropy": lambda parts, h, y: F.cross_entropy(rows(h), y),
    "an attention": lambda parts, h, y: parts["attention"](h, h, h)[0].square().mean(),
    "a regularized mean": lambda parts, h, y: (
        2 * parts["norm"](h).exp().mean() + 0.1 * parts["linear"].weight.square().sum()
    ),
    "two means": lambda parts, h, y: h.square().mean() - h.sin().mean() / 3,
    "a sum within samples": lambda parts, h, y: h.square().sum((1, 2)).mean(),
    "a flat batch": lambda parts, h, y: h.reshape(-1, 6).square().mean(),
    "a token of all": lambda parts, h, y: token(h, torch.ones(1, 1, 6)).square().mean(),
    "a sum over the batch size": lambda parts, h, y: h.square().sum() / len(h),
    "a sum times a share": lambda parts, h, y: h.square().sum() * (1 / h.shape[0]),
    "a batchmean": lambda parts, h, y: F.kl_div(
        rows(h).log_softmax(-1), rows(h).detach().softmax(-1), reduction="batchmean"
    ),
    "a scaled cross entropy": lambda parts, h, y: F.cross_entropy(rows(h), y) / 3,
    "an own log probability": lambda parts, h, y: (
        -rows(h).log_softmax(-1)[torch.arange(len(y)), y].mean()
    ),
    "constants of all samples": lambda parts, h, y: (h + torch.zeros(len(h), 3, 6)).square().mean(),
    "stacked means": lambda parts, h, y: torch.stack([h.square().mean(), h.exp().mean()]).sum(),
    "added means": lambda parts, h, y: sum([h[:, 0].square().mean(), h[:, 1].mean()]),
    "probabilities as targets": lambda parts, h, y: F.cross_entropy(
        rows(h), F.one_hot(y, 6).to(h.dtype)
    ),
    "a token of all, repeated": lambda parts, h, y: (
        torch.cat([parts["linear"].weight[:1].repeat(len(h), 1, 1), h], 1).square().mean()
    ),
    "a contraction within samples": lambda parts, h, y: (h @ h.mT).square().mean(),
}
WEIGHTED: dict[str, Loss] = {
    "a sum": lambda parts, h, y: h.square().sum(),
    "class weights": lambda parts, h, y: F.cross_entropy(
        rows(h), y, torch.tensor([1.0, 2, 3, 4, 5, 6], dtype=h.dtype)
    ),
    "a weighted mean": lambda parts, h, y: (rows(h).mean(1) * y).sum() / y.sum(),
    "a sum over a count": lambda parts, h, y: h.square().sum() / (y > 0).sum(),
    "a sum by samples, at most 4": lambda parts, h, y: h.square().sum() / min(len(h), 4),
    "a masked mean": lambda parts, h, y: (rows(h).mean(1) * (y > 0)).sum() / (y > 0).sum(),
    "where": lambda parts, h, y: (
        torch.where(y > 0, rows(h).square().mean(1), 0).sum() / (y > 0).sum().clamp(min=1)
    ),
    "a mean over a share": lambda parts, h, y: (
        (rows(h).mean(1) * (y > 0)).mean() / (y > 0).float().mean()
    ),
    "a root of a count": lambda parts, h, y: h.square().sum() / (y > 1).sum().sqrt(),
    "a count and a penalty": lambda parts, h, y: (
        (rows(h).mean(1) * y).sum() / y.sum() + parts["linear"].weight.square().sum()
    ),
    "two terms with one count": lambda parts, h, y: sum(
        (term * (y > 0)).sum() / (y > 0).sum() for term in (rows(h).exp().mean(1),)
    ),
    "ignored targets and a penalty": lambda parts, h, y: (
        F.cross_entropy(rows(h), y, ignore_index=0) / 2 + parts["linear"].weight.square().sum()
    ),
    "class weights, smoothed, of targets that are not ignored": lambda parts, h, y: F.cross_entropy(
        rows(h), y, torch.arange(1.0, 7, dtype=h.dtype), ignore_index=1, label_smoothing=0.1
    ),
    "a negative log likelihood": lambda parts, h, y: F.nll_loss(
        rows(h).log_softmax(1), y, torch.arange(1.0, 7, dtype=h.dtype)
    ),
    "two losses of the same targets": lambda parts, h, y: (
        F.cross_entropy(rows(h), y, ignore_index=0)
        + 0.5 * F.cross_entropy(rows(h).tanh(), y, ignore_index=0)
    ),
    "a sum over a given number": lambda parts, h, y: (
        F.cross_entropy(rows(h), y, reduction="sum") / 7
    ),
}
OTHERS: dict[str, Loss] = {
    "a root of a mean": lambda parts, h, y: h.square().mean().sqrt(),
    "a product of means": lambda parts, h, y: h.square().mean() * h.exp().mean(),
    "a spread": lambda parts, h, y: rows(h).std(0).mean(),
    "pairs": lambda parts, h, y: (rows(h) @ rows(h).t()).square().mean(),
    "contrasts": lambda parts, h, y: F.cross_entropy(
        rows(h) @ rows(h).t(), torch.arange(h.shape[0])
    ),
    "a batch norm": lambda parts, h, y: parts["batch_norm"](rows(h)).exp().mean(),
    "a softmax over samples": lambda parts, h, y: (h.softmax(0) * h).mean(),
    "sums before samples": lambda parts, h, y: h.cumsum(0).square().mean(),
    "places in the batch": lambda parts, h, y: (rows(h) * torch.arange(h.shape[0])[:, None]).mean(),
    "a part of the batch": lambda parts, h, y: h[:2].square().mean(),
    "neighbors": lambda parts, h, y: (h * h.roll(1, 0)).mean(),
    "a largest": lambda parts, h, y: h.amax(0).mean(),
    "a masked mean": lambda parts, h, y: (h * (h > 0)).sum() / (h > 0).sum(),
    "one by a mean": lambda parts, h, y: 1 / h.square().mean(),
    "deviations": lambda parts, h, y: (h - h.mean(0)).square().mean(),
    "a cross entropy that shares ignored targets": lambda parts, h, y: (
        F.cross_entropy(rows(h), y, ignore_index=0) + h.square().mean()
    ),
    "a mean times the batch size": lambda parts, h, y: h.square().mean() * len(h),
    "a mean by a root of the batch size": lambda parts, h, y: h.square().mean() / len(h) ** 0.5,
    "a mean plus the batch size": lambda parts, h, y: h.square().mean() + len(h),
    "a mean times ones": lambda parts, h, y: h.square().mean() * torch.ones(len(h)).sum(),
    "samples by the batch size": lambda parts, h, y: (h / len(h)).square().mean(),
    "a shift by half of the batch": lambda parts, h, y: (h * h.roll(len(h) // 2, 0)).mean(),
    "a mean of those that are numbers": lambda parts, h, y: rows(h).log().nanmean(),
    "a median": lambda parts, h, y: rows(h).median(0).values.mean(),
    "the hardest": lambda parts, h, y: rows(h).square().mean(1).topk(2).values.mean(),
    "a norm": lambda parts, h, y: rows(h).norm(),
    "a correlation of features": lambda parts, h, y: (rows(h).t() @ rows(h)).square().mean(),
    "a sum plus a penalty by the batch size": lambda parts, h, y: (
        (h.square().sum() + parts["linear"].weight.square().sum()) / len(h)
    ),
    "other samples of the batch": lambda parts, h, y: (h * h[torch.arange(len(h)).flip(0)]).mean(),
    "positives of a bank": lambda parts, h, y: (
        (rows(h) @ torch.cat([parts["linear"].weight] * 2).t())
        .log_softmax(1)[torch.arange(len(h)), torch.arange(len(h))]
        .mean()
    ),
    "the labelled half": lambda parts, h, y: h[torch.arange(len(h) // 2)].square().mean(),
    "a mean for each sample": lambda parts, h, y: h.square().mean().expand(len(h)).sum(),
    "a part of a mean": lambda parts, h, y: h.square().mean(0).flatten()[: len(h)].sum(),
    "weights by their norm": lambda parts, h, y: (
        rows(h).square().mean(1) * (torch.ones(len(h)) / torch.ones(len(h)).norm())
    ).mean(),
    "a branch on the batch size": lambda parts, h, y: (
        h.square().mean() if len(h) < 8 else h.sin().mean()
    ),
    "sums of a class": lambda parts, h, y: (F.one_hot(y, 6).to(h.dtype).t() @ rows(h)).exp().mean(),
}


def with_gradient(model: Model, x: Tensor, y: Tensor) -> Tensor:
    """The loss of a batch and the gradient of a parameter."""
    loss = model(x, y)
    (gradient,) = torch.autograd.grad(loss, model.parts["linear"].weight)
    return torch.cat([loss.detach().reshape(1), gradient.flatten()])


def of_whole_and_pieces(model: Model, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and gradient of the whole batch, and the mean of those of its halves."""
    halves = zip(x.chunk(2), y.chunk(2), strict=True)
    pieces = torch.stack([with_gradient(model, *half) for half in halves])
    return with_gradient(model, x, y), pieces.mean(0)


def batch(samples: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, 3, 6), torch.tensor([0, 1, 2, 3, 4, 5, 0, 0])[:samples]


def weighting(model: nn.Module, samples: int) -> LossWeighting | str | None:
    """How the losses of micro-batches of a number of samples are weighted, or why not."""
    graph = sw.capture(model, batch(samples))
    captured = with_loss_weighting(graph, 8 // samples, lambda n: sw.capture(model, batch(n)))
    return captured.loss_weighting


@pytest.mark.parametrize("name", [*MEANS, *OTHERS])
def test_a_mean_is_what_the_mean_of_pieces_equals(name: str) -> None:
    torch.manual_seed(0)
    model = Model({**MEANS, **OTHERS}[name])
    whole, pieces = of_whole_and_pieces(model, *batch())
    assert torch.allclose(whole, pieces, atol=1e-5, equal_nan=True) == (name in MEANS)
    assert isinstance(weighting(model, 4), LossWeighting) == (name in MEANS)


@pytest.mark.parametrize("name", WEIGHTED)
def test_weights_make_the_loss_of_the_batch_of_those_of_micro_batches(name: str) -> None:
    torch.manual_seed(0)
    model = Model(WEIGHTED[name]).double()
    x, y = batch()
    x = x.double()
    graph = sw.capture(model, (x[:4], y[:4]))
    graph = with_loss_weighting(graph, 2, lambda n: sw.capture(model, (x[:n], y[:n])))
    assert isinstance(graph.loss_weighting, LossWeighting)
    halves = list(zip(x.chunk(2), y.chunk(2), strict=True))
    weights = LossWeights(graph, Devices.of_rank(sw.Layout((1,), ("d",)), 0))(halves, {})
    whole, *pieces = (with_gradient(model, *each) for each in [(x, y), *halves])
    total = sum(weight * piece for weight, piece in zip(weights, pieces, strict=True))
    torch.testing.assert_close(total, whole)
    assert not torch.allclose(sum(pieces) / 2, whole), "equal weights would do"


@pytest.mark.parametrize("name", ["a mean", "an own log probability", "a token of all"])
def test_micro_batches_of_one_sample_are_followed_in_larger_ones(name: str) -> None:
    assert isinstance(weighting(Model(MEANS[name]), 1), LossWeighting)


def test_what_mixes_samples_is_named_with_its_line() -> None:
    why = weighting(Model(OTHERS["a spread"]), 4)
    assert isinstance(why, str)
    assert re.fullmatch(r"aten.std.dim in 'std' \(test_mean_of_samples.py:\d+\) mixes samples", why)


def test_a_graph_alone_is_judged_by_its_operators() -> None:
    good, bad = (sw.capture(Model(loss), batch()) for loss in (MEANS["mse"], OTHERS["pairs"]))
    check_mean_of_samples(good, 2)
    with pytest.raises(sw.StrategyError, match=r"micro_batches=2: .*aten.matmul.default.* mixes"):
        check_mean_of_samples(bad, 2)


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_language_models_have_means(family: str) -> None:
    sizes = Dimensions(
        family=family,
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        num_kv_heads=2,
        intermediate_size=64,
        vocab_size=64,
        seq_length=8,
        norm_eps=1e-5,
    )

    def graph(samples: int) -> Graph:
        ids = torch.empty(samples, 8, dtype=torch.long, device="meta")
        with torch.device("meta"):
            return sw.capture(build(sizes), (ids, ids))

    assert isinstance(loss_weighting(graph(2), graph(4)), LossWeighting)
    assert isinstance(with_loss_weighting(graph(1), 2, graph).loss_weighting, LossWeighting)


@pytest.mark.parametrize("family", ["bert", "t5", "llama"])
def test_models_of_transformers_with_masks_have_means(family: str) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "vocab_size": 32}
    model: nn.Module
    if family == "bert":
        config = transformers.BertConfig(**sizes, **heads)
        model = transformers.BertForSequenceClassification(config)
    elif family == "t5":
        small = {"d_model": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2, "d_kv": 8}
        t5 = transformers.T5Config(**small, vocab_size=32, decoder_start_token_id=0)
        model = transformers.T5ForConditionalGeneration(t5)
    else:
        llama = transformers.LlamaConfig(**sizes, **heads, num_key_value_heads=2)
        model = transformers.LlamaForCausalLM(llama)

    def graph(samples: int) -> Graph:
        ids = torch.zeros(samples, 8, dtype=torch.long)
        labels = ids[:, 0] if family == "bert" else ids
        call = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
        return sw.capture(model, (), call)

    assert isinstance(with_loss_weighting(graph(1), 4, graph).loss_weighting, LossWeighting)


test_on_two_ranks = checks_on_ranks(CHECKS, 2)
