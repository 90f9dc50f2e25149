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

    def values(self, x: Tensor) -> list[Tensor]:
        values = [x]
        for layer, reads in zip(self.layers, self.reads, strict=True):
            values.append(layer(*(values[i] for i in reads)))
        return values

    def forward(self, x: Tensor) -> Any:
        read = {i for reads in self.reads for i in reads}
        ends = [v for i, v in enumerate(self.values(x)) if i not in read]
        return torch.stack([F.mse_loss(v, torch.ones_like(v)) for v in ends]).sum()


class RandomOutputs(RandomNet):
    """Returns any of its values, numbers made of them, parameters and what has no gradient, some of
    them twice; in half of all cases with a loss."""

    def __init__(self, seed: int, steps: int = 6) -> None:
        super().__init__(seed, steps)
        self.seed = seed

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        draw = random.Random(self.seed)
        values = self.values(x)
        outputs: dict[str, Tensor] = {}
        for number in range(draw.randrange(2, 6)):
            value = draw.choice(values)
            kind = draw.choice(("value", "value", "number", "parameter", "rank", "detached"))
            if kind == "number":
                value = value.cos().mean()
            elif kind == "parameter":
                value = draw.choice([*self.parameters(), value])
            elif kind == "rank":
                value = value.argmax(-1)
            elif kind == "detached":
                value = value.detach()
            outputs[f"{kind} {number}"] = value
        outputs["again"] = draw.choice(list(outputs.values()))
        if draw.random() < 0.5:
            outputs["loss"] = super().forward(x)
        names = list(outputs)
        draw.shuffle(names)
        return {name: outputs[name] for name in names}


def gram(x: Tensor) -> Tensor:
    return torch.matmul(x, x.transpose(-1, -2)) / x.shape[-1]


def random_outputs_net(seed: int) -> tuple[nn.Module, tuple[Any, ...]]:
    """In double precision, with parameters and something to train."""
    for number in range(1000):
        net, x = RandomOutputs(1000 * seed + number).double(), torch.randn(SHAPE).double()
        if any(value.requires_grad for value in net(x).values()):
            return net, (x,)
    raise AssertionError("no such model")


def random_net(seed: int) -> tuple[nn.Module, tuple[Any, ...]]:
    net = RandomNet(seed)
    return net, (torch.randn(SHAPE),)
