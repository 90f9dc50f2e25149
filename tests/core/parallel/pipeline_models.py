"""Models that are hard to divide: what crosses, is shared, is frozen or updated."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor]


class Tied(nn.Module):
    """A tied table, a skip over the whole model, frozen weights, ignored targets, two outputs, and
    perhaps a batch norm, which updates buffers."""

    def __init__(self, batch_norm: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.norm = nn.BatchNorm1d(6) if batch_norm else nn.LayerNorm(8)
        self.hidden = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.places = nn.Parameter(torch.randn(6, 8))
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        start = x = self.frozen(self.table(ids)) + self.places
        x = self.norm(x)
        for layer in self.hidden:
            x = torch.tanh(layer(x)) + x
        logits = self.head(x + start)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


class Orphans(nn.Module):
    """Parameters in the middle that nothing before them leads to: their results only join later."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Embedding(16, 8)
        self.two = nn.Embedding(16, 8)
        self.mid = nn.Linear(8, 8)
        self.three = nn.Linear(8, 8)
        self.last = nn.Linear(8, 16)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        first = self.one(ids)
        other = self.mid(self.two(ids))
        x = self.three(first) * other
        return F.cross_entropy(self.last(x).flatten(0, 1), labels.flatten())


class Alternating(nn.Module):
    """A model that skips another of three layers in each step, and alternates between two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(8, 16) for _ in range(2))
        self.step = 0

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        self.step = (self.step + 1) % 3
        x = self.one(ids)
        for number, layer in enumerate(self.layers):
            if number != self.step:
                x = x + layer(x).relu()
        head = self.heads[self.step % 2]
        return F.cross_entropy(head(x).flatten(0, 1), labels.flatten())


class FrozenStart(nn.Module):
    """A model whose first half has no gradient, as when only adapters are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.one = nn.Linear(8, 8)
        self.table.requires_grad_(False)
        self.one.requires_grad_(False)
        self.two = nn.Linear(8, 8)
        self.three = nn.Linear(8, 8)
        self.last = nn.Linear(8, 16)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = torch.tanh(self.two(torch.tanh(self.one(self.table(ids)))))
        return F.cross_entropy(self.last(self.three(x)).flatten(0, 1), labels.flatten())


class Twice(nn.Module):
    """A layer that is called twice within a chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Embedding(16, 8)
        self.two = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.three = nn.Linear(8, 8)
        self.last = nn.Linear(8, 16)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.two(self.norm(torch.tanh(self.two(self.one(ids)))))
        return F.cross_entropy(self.last(self.three(x)).flatten(0, 1), labels.flatten())


class EarlyLoss(nn.Module):
    """Returns an output that is computed after the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Embedding(16, 8)
        self.two = nn.Linear(8, 16)
        self.three = nn.Linear(16, 4)

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.two(self.one(ids))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return loss, self.three(logits)


class MixedCrossing(nn.Module):
    """Integers and a tensor without gradient cross stages beside one with a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Embedding(16, 8)
        self.frozen.requires_grad_(False)
        self.one = nn.Embedding(16, 8)
        self.two = nn.Embedding(16, 8)
        self.three = nn.Embedding(16, 8)
        self.last = nn.Linear(8, 16)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        frozen, x = self.frozen(ids), self.one(ids)
        largest = x.argmax(-1)
        x = torch.tanh(self.two(largest)) * frozen + x
        x = torch.tanh(self.three(largest)) * frozen + x
        return F.cross_entropy(self.last(x).flatten(0, 1), labels.flatten())


class Dropping(nn.Module):
    """Applies one dropout module twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 8)
        self.two = nn.Linear(8, 8)
        self.three = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.one(x), 0.5)
        x = F.dropout(self.two(x), 0.5)
        return self.three(x).square().mean()


def batch(rows: int = 8) -> Batch:
    """Tokens and labels; some micro-batches have few valid labels, or none."""
    ids = torch.randint(0, 16, (rows, 6), generator=torch.Generator().manual_seed(3))
    labels = ids.flip(1).clone()
    labels[: rows // 3, 1:] = -100
    labels[rows // 2] = -100
    return ids, labels
