"""Random models: a chain of random operators over a growing set of values, each a named module."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright as sw

SHAPE = (4, 8, 12)


class Scale(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def merge(x: Tensor) -> Tensor:
    return x.flatten(0, 1)


def split(x: Tensor) -> Tensor:
    return x.unflatten(-1, (x.shape[-1] // 2, 2)) if x.shape[-1] % 2 == 0 else x * 2


def swap(x: Tensor) -> Tensor:
    return x.transpose(-1, -2)


def halve(x: Tensor) -> Tensor:
    return x[..., : x.shape[-1] // 2]


def average(x: Tensor) -> Tensor:
    return x.mean(-1, keepdim=True).expand(x.shape)


def join(a: Tensor, b: Tensor) -> Tensor:
    return torch.cat([a, b], dim=-1)


UNARY: tuple[Callable[[Tensor], Tensor], ...] = (torch.tanh, swap, average, halve, merge, split)


class RandomNet(nn.Module):
    """`steps` random operators; the loss is a sum over all values that no operator reads."""

    def __init__(self, seed: int, steps: int = 6) -> None:
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        self.layers = nn.ModuleList()
        self.reads: list[tuple[int, ...]] = []
        values = [torch.zeros(SHAPE)]
        while len(self.layers) < steps:
            reads = self._inputs(draw, values)
            layer = self._layer(draw, [values[i] for i in reads])
            made = layer(*(values[i] for i in reads)).detach()
            if 1 < made.ndim < 5 and made.shape[-1] > 1 and made.numel() <= 10_000:
                self.layers.append(layer)
                self.reads.append(reads)
                values.append(made)

    def _inputs(self, draw: random.Random, values: list[Tensor]) -> tuple[int, ...]:
        last = draw.randrange(max(0, len(values) - 2), len(values))
        same = [i for i, v in enumerate(values) if v.shape == values[last].shape]
        return (last, draw.choice(same)) if draw.random() < 0.35 else (last,)

    def _layer(self, draw: random.Random, inputs: list[Tensor]) -> nn.Module:
        width = inputs[0].shape[-1]
        if len(inputs) == 2:
            products: list[Any] = [torch.add, torch.mul, join]
            return sw.Op(draw.choice(products))
        kind = draw.choice(("linear", "norm", "softmax", "scale", "unary", "unary", "gram"))
        if kind == "linear":
            return nn.Linear(width, draw.choice((4, 8, 12)), bias=draw.random() < 0.5)
        if kind == "norm":
            return nn.LayerNorm(width)
        if kind == "softmax":
            return nn.Softmax(dim=-1)
        if kind == "scale":
            return Scale(width)
        if kind == "gram":
            return sw.Op(gram)
        return sw.Op(draw.choice(UNARY))

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for layer, reads in zip(self.layers, self.reads, strict=True):
            values.append(layer(*(values[i] for i in reads)))
        read = {i for reads in self.reads for i in reads}
        ends = [v for i, v in enumerate(values) if i not in read]
        return torch.stack([F.mse_loss(v, torch.ones_like(v)) for v in ends]).sum()


def gram(x: Tensor) -> Tensor:
    return torch.matmul(x, x.transpose(-1, -2)) / x.shape[-1]


def random_net(seed: int) -> tuple[nn.Module, tuple[Any, ...]]:
    net = RandomNet(seed)
    return net, (torch.randn(SHAPE),)
