"""Losses of micro-batches add up to that of the batch, with its gradients, or are refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import shardwright as sw
from core.micro_batches.interpreted import (
    CLASSES,
    ONES,
    Loss,
    Model,
    batch,
    graph_of,
    in_micro_batches,
    of_micro_batch,
    rows,
    token,
    with_gradient,
)
from core.micro_batches.whole_batch_ranks import CHECKS
from shardwright.core.graph.graph import Graph, WholeBatch
from shardwright.core.graph.segment_matmul import segment_matmul
from shardwright.core.micro_batches.whole_batch import with_whole_batch
from shardwright.models import Dimensions, build
from torchrun import checks_on_ranks

pytestmark = pytest.mark.usefixtures("untried_suggestions")

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
    "a feature of each token": lambda parts, h, y: (
        (h[torch.arange(len(y)), :, y] * torch.arange(3)).exp().mean()
    ),
    "a token of all, repeated": lambda parts, h, y: (
        torch.cat([parts["linear"].weight[:1].repeat(len(h), 1, 1), h], 1).square().mean()
    ),
    "a contraction within samples": lambda parts, h, y: (h @ h.mT).square().mean(),
}
TERMS: dict[str, Loss] = {
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
    "means of classes": lambda parts, h, y: (
        (torch.zeros(6).to(h).scatter_add(0, y, rows(h).exp().mean(1)))
        / (y.bincount(minlength=6) + 1)
    ).sum(),
    "means of classes, counted by ones like the losses": lambda parts, h, y: (
        parts["linear"].weight[0].index_add(0, y, rows(h).mean(1), alpha=2)
        / torch.ones(6).to(h).index_add(0, y, torch.ones_like(h[:, 0, 0]))
    ).mean(),
    "sums of classes": lambda parts, h, y: (
        (CLASSES.to(h).scatter_reduce(0, y, rows(h).mean(1), "sum") * CLASSES).mean()
        + CLASSES.to(h).index_put((y,), rows(h).exp().mean(1), accumulate=True).mean()
    ),
    "scattered means": lambda parts, h, y: sum(
        (CLASSES.to(h).scatter_reduce(0, y, rows(h).mean(1), "mean", include_self=own)).sum()
        for own in (False, True)
    ),
    "tokens of classes": lambda parts, h, y: (
        torch.ones_like(h[0]).index_add(0, y.repeat_interleave(3) % 3, h.flatten(0, 1)).mean()
    ),
    "a mask like the losses": lambda parts, h, y: (
        (rows(h).mean(1) * torch.where(y > 0, torch.ones_like(rows(h)[:, 0]), 0.5)).sum()
        / torch.where(y > 0, torch.ones_like(rows(h)[:, 0]), 0.5).sum()
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
    "places in the batch": lambda parts, h, y: (rows(h) * torch.arange(h.shape[0])[:, None]).mean(),
    "a cross entropy that shares ignored targets": lambda parts, h, y: (
        F.cross_entropy(rows(h), y, ignore_index=0) + h.square().mean()
    ),
    "a mean times the batch size": lambda parts, h, y: h.square().mean() * len(h),
    "a mean by a root of the batch size": lambda parts, h, y: h.square().mean() / len(h) ** 0.5,
    "a mean plus the batch size": lambda parts, h, y: h.square().mean() + len(h),
    "a mean times ones": lambda parts, h, y: h.square().mean() * torch.ones(len(h)).sum(),
    "samples by the batch size": lambda parts, h, y: (h / len(h)).square().mean(),
    "a sum plus a penalty by the batch size": lambda parts, h, y: (
        (h.square().sum() + parts["linear"].weight.square().sum()) / len(h)
    ),
    "weights by their norm": lambda parts, h, y: (
        rows(h).square().mean(1) * (torch.ones(len(h)) / torch.ones(len(h)).norm())
    ).mean(),
    "ignored targets, class weights, a mean and a penalty": lambda parts, h, y: (
        F.cross_entropy(rows(h), y, ignore_index=0)
        + F.cross_entropy(h.mT, y[:, None].expand(-1, 3), CLASSES.to(h), ignore_index=1) / 2
        + h.square().mean() * 3
        + 0.1 * parts["linear"].weight.square().sum()
        + 2
    ),
    "a masked mean, a sum over a number and a sum": lambda parts, h, y: (
        (rows(h).mean(1) * (y > 1)).sum() / (y > 1).sum() - h.sin().sum() / 11 + h.exp().sum()
    ),
    "two masked means": lambda parts, h, y: sum(
        (rows(h).exp().mean(1) * (y == label)).sum() / (y == label).sum() for label in range(5)
    ),
    "a loss for each sample, over the number of all labels": lambda parts, h, y: (
        h.square().mean((1, 2)) * y / y.sum()
    ).sum(),
    "advantages normalized by the batch": lambda parts, h, y: (
        rows(h).mean(1) * (y - y.double().mean()) / (y.double().std() + 1e-3)
    ).mean(),
    "a weight by rank in the batch": lambda parts, h, y: (
        rows(h).mean(1) * y.argsort().argsort()
    ).mean(),
    "samples in another order": lambda parts, h, y: (
        rows(h).mean(1)
        * parts["linear"](torch.stack([y, y], 1).flip(0).sort(0).values[:, :1] + ONES).mean(1)
    ).mean(),
    "a distillation": lambda parts, h, y: (
        4 * F.kl_div((rows(h) / 2).log_softmax(1), (rows(h).detach().sin() / 2).softmax(1)).mean()
        + F.kl_div((rows(h) / 3).log_softmax(1), F.one_hot(y, 6).to(h), reduction="sum") / len(y)
    ),
    "a divisor of 1 in micro-batches of two": lambda parts, h, y: h.exp().sum() / (len(h) - 1),
    "a quotient unless there is nothing to divide by": lambda parts, h, y: (
        torch.where((y > 3).sum() > 0, h.square().sum() / (y > 3).sum(), torch.zeros_like(h.sum()))
        + h.exp().mean()
    ),
}
COUNTED = (
    "cross entropy",
    "a scaled cross entropy",
    "a sum over the batch size",
    "a sum times a share",
    "a batchmean",
)
"""Means over samples that micro-batches compute as sums."""
REFUSED_BY_SAMPLE: tuple[str, ...] = ()
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
    "neighbors": lambda parts, h, y: (h * h.roll(1, 0)).mean(),
    "a largest": lambda parts, h, y: h.amax(0).mean(),
    "a mask that depends on parameters": lambda parts, h, y: (h * (h > 0)).sum() / (h > 0).sum(),
    "one by a mean": lambda parts, h, y: 1 / h.square().mean(),
    "deviations": lambda parts, h, y: (h - h.mean(0)).square().mean(),
    "a shift by half of the batch": lambda parts, h, y: (h * h.roll(len(h) // 2, 0)).mean(),
    "a median": lambda parts, h, y: rows(h).median(0).values.mean(),
    "the hardest": lambda parts, h, y: rows(h).square().mean(1).topk(2).values.mean(),
    "a norm": lambda parts, h, y: rows(h).norm(),
    "a correlation of features": lambda parts, h, y: (rows(h).t() @ rows(h)).square().mean(),
    "other samples of the batch": lambda parts, h, y: (h * h[torch.arange(len(h)).flip(0)]).mean(),
    "positives of a bank": lambda parts, h, y: (
        (rows(h) @ torch.cat([parts["linear"].weight] * 2).t())
        .log_softmax(1)[torch.arange(len(h)), torch.arange(len(h))]
        .mean()
    ),
    "chunks of the batch": lambda parts, h, y: sum(
        F.cross_entropy(z, t, reduction="sum")
        for z, t in zip(rows(h).chunk(4), y.chunk(4), strict=True)
    ),
    "samples one by one": lambda parts, h, y: sum(z.exp().mean() for z in rows(h)),
    "the labelled half": lambda parts, h, y: h[torch.arange(len(h) // 2)].square().mean(),
    "a mean for each sample": lambda parts, h, y: h.square().mean().expand(len(h)).sum(),
    "a part of a mean": lambda parts, h, y: h.square().mean(0).flatten()[: len(h)].sum(),
    "a branch on the batch size": lambda parts, h, y: (
        h.square().mean() if len(h) < 8 else h.sin().mean()
    ),
    "rows of groups that end at given rows": lambda parts, h, y: segment_matmul(
        rows(h), h.new_ones(2, 6, 6), torch.tensor([3, 8], dtype=torch.int32), False
    ).mean(),
    "sums of a class": lambda parts, h, y: (F.one_hot(y, 6).to(h.dtype).t() @ rows(h)).exp().mean(),
}


def model_of(name: str) -> Model:
    torch.manual_seed(0)
    return Model({**MEANS, **TERMS, **OTHERS}[name]).double()


@cache
def captured(name: str, samples: int) -> Graph:
    """The graph of a call with so many samples: sizes of micro-batches share that of the batch."""
    return graph_of(model_of(name), samples)


def split(name: str, samples: int) -> Graph:
    """The graph of a micro-batch of so many of 8 samples."""
    return with_whole_batch(
        captured(name, samples), 8 // samples, lambda count: captured(name, count * samples)
    )


@pytest.mark.parametrize("samples", [4, pytest.param(2, marks=pytest.mark.slow), 1])
@pytest.mark.parametrize("name", [*MEANS, *TERMS])
def test_micro_batches_make_the_loss_of_the_batch(name: str, samples: int) -> None:
    model = model_of(name)
    x, y = batch()
    graph = split(name, samples)
    if samples == 1 and isinstance(graph.whole_batch, str):
        assert name in REFUSED_BY_SAMPLE, graph.whole_batch
        return
    assert isinstance(graph.whole_batch, WholeBatch), graph.whole_batch
    found = in_micro_batches(graph, model, [x.double(), y], 8 // samples)
    torch.testing.assert_close(found, with_gradient(model, x.double(), y))


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_over_samples_leaves_the_graph_as_it_is(name: str) -> None:
    graph = split(name, 4)
    assert graph.is_term_of_batch == (name in COUNTED)
    assert isinstance(graph.whole_batch, WholeBatch)
    assert graph.whole_batch.reduction == ("sum" if name in COUNTED else "mean")


@pytest.mark.parametrize("name", OTHERS)
def test_what_mixes_samples_is_refused(name: str) -> None:
    assert isinstance(split(name, 4).whole_batch, str)


def test_a_loop_over_samples_or_parts_of_the_batch_is_refused_with_what_to_do() -> None:
    for name in ("chunks of the batch", "samples one by one"):
        x, y = batch()
        with pytest.raises(sw.StrategyError, match=r"\n.*in one call instead of a loop"):
            sw.plan(model_of(name), (x.double(), y), devices=2, micro_batches=4)


def test_groups_of_samples_are_as_large_in_a_micro_batch() -> None:
    model = Model(lambda parts, h, y: F.group_norm(rows(h)[None], 4).exp().mean()).double()
    (x, y), graph = batch(), of_micro_batch(model, 4)
    found = in_micro_batches(graph, model, [x.double(), y], 2)
    torch.testing.assert_close(found, with_gradient(model, x.double(), y))


class Clipped(torch.autograd.Function):
    """Clips the gradient of a parameter."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-1e-3, 1e-3)


class Largest(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        largest = x.topk(2).indices
        ctx.save_for_backward(largest, x)
        return x.gather(-1, largest)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        largest, x = ctx.saved_tensors
        return 1.5 * torch.zeros_like(x).scatter(-1, largest, gradient)


def test_a_backward_of_its_own_on_parameters_is_refused() -> None:
    def loss(parts: nn.ModuleDict, h: Tensor, y: Tensor) -> Tensor:
        return (h @ Clipped.apply(parts["linear"].weight)).exp().mean()

    why = of_micro_batch(Model(loss).double(), 4).whole_batch
    assert isinstance(why, str) and why.endswith(
        "the operator's custom backward may not be linear in gradients"
    )


def test_an_autograd_function_that_may_mix_samples_is_refused_with_what_to_do() -> None:
    def model(largest: Callable[[Tensor], Tensor]) -> nn.Module:
        return Model(lambda parts, h, y: largest(h).exp().mean()).double()

    why = of_micro_batch(model(Largest.apply), 4).whole_batch
    assert isinstance(why, str) and "may mix samples" in why and why.startswith("local_map(")
    exact = of_micro_batch(model(sw.local_map(Largest.apply, "b _ _ -> b _ _")), 4).whole_batch
    assert not isinstance(exact, str)


def test_check_casts_what_is_computed_of_the_batch() -> None:
    model = Model(
        lambda parts, h, y: F.cross_entropy(rows(h), y, (y.bincount(minlength=6) + 1.0).to(h.dtype))
    ).double()
    call = batch()[0].double(), batch()[1]
    assert sw.check(model, call, None, sw.plan(model, call, devices=2, micro_batches=4)).passes()


def test_what_mixes_samples_is_named_with_its_line() -> None:
    why = split("a spread", 4).whole_batch
    assert isinstance(why, str)
    assert re.fullmatch(
        r"aten.std.dim in 'std' \(test_whole_batch.py:\d+\): the operator mixes samples", why
    )


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

    for samples in (1, 2):
        split = with_whole_batch(graph(samples), 2, lambda n, b=samples: graph(n * b))
        assert isinstance(split.whole_batch, WholeBatch)


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

    assert isinstance(with_whole_batch(graph(1), 4, graph).whole_batch, WholeBatch)


test_on_two_ranks = checks_on_ranks(CHECKS, 2)
