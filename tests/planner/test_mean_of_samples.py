"""Losses that are means over samples, and those that are not, held against what pieces give."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwright as sw
from shardwright.models import Dimensions, build
from shardwright.planner.mean_of_samples import is_mean_of_samples

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
}
OTHERS: dict[str, Loss] = {
    "a sum": lambda parts, h, y: h.square().sum(),
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
}


def of_whole_and_pieces(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        pieces = [model(*piece) for piece in zip(x.chunk(2), y.chunk(2), strict=True)]
        return model(x, y), torch.stack(pieces).mean()


@pytest.mark.parametrize("name", [*MEANS, *OTHERS])
def test_a_mean_is_what_the_mean_of_pieces_equals(name: str) -> None:
    torch.manual_seed(0)
    model = Model({**MEANS, **OTHERS}[name])
    x, y = torch.randn(8, 3, 6), torch.tensor([0, 1, 2, 3, 4, 5, 0, 0])
    whole, pieces = of_whole_and_pieces(model, x, y)
    assert torch.allclose(whole, pieces, atol=1e-5) == (name in MEANS)
    assert is_mean_of_samples(sw.capture(model, (x, y))) == (name in MEANS)


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
    ids = torch.empty(4, 8, dtype=torch.long, device="meta")
    with torch.device("meta"):
        assert is_mean_of_samples(sw.capture(build(sizes), (ids, ids)))
