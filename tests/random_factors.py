"""Random chains of operators that reduce, index, slide along, repeat or divide a dimension."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SHAPE, MOST_ELEMENTS = (2, 4, 8, 12), 8_000

Operator = Callable[[Tensor], Tensor]
PADDING = ("reflect", "replicate", "circular", "constant")
REDUCE = ("sum", "mean", "amax", "amin", "prod")


def reduced(draw: random.Random, shape: tuple[int, ...]) -> Operator:
    """An operator that combines all elements of a dimension."""
    dim, flag = draw.randrange(4), draw.random() < 0.5
    operators: list[Operator] = [
        lambda x: x.softmax(dim),
        lambda x: x.log_softmax(dim),
        lambda x: x.cumsum(dim) / x.shape[dim],
        lambda x: (x / 2).tanh().cumprod(dim),
        lambda x: x.logcumsumexp(dim),
        lambda x: x.cummax(dim).values,
        lambda x: x - x.amax(dim, keepdim=True),
        lambda x: x - x.min(dim, keepdim=True).values,
        lambda x: x / (1 + x.norm(dim=dim, keepdim=True)),
        lambda x: x + x.var(dim, keepdim=True, unbiased=flag),
        lambda x: x * x.std((dim, (dim + 1) % 4), keepdim=True),
        lambda x: x - x.logsumexp(dim, keepdim=True),
        lambda x: x + x.tanh().prod(dim, keepdim=True),
        lambda x: x.masked_fill(x == x.argmax(dim, keepdim=True), 0),
        lambda x: x.where((x > 1).any(dim, keepdim=True), x.sin()),
        lambda x: F.layer_norm(x, x.shape[-1:]),
        lambda x: F.rms_norm(x, x.shape[-2:]),
        lambda x: F.group_norm(x, 2),
        lambda x: x + F.cosine_similarity(x, x.sin(), dim=dim).unsqueeze(dim),
        # Without a gradient, which equal elements may get differently.
        lambda x: x - x.detach().topk(1 + flag, dim).values.sum(dim, keepdim=True),
        lambda x: x - x.detach().kthvalue(1 + flag, dim, keepdim=True).values,
        lambda x: x - torch.aminmax(x, dim=dim, keepdim=True).max,
        lambda x: x + torch.dist(x, x.cos()) / x.numel(),
    ]
    return draw.choice(operators)


def indexed(draw: random.Random, shape: tuple[int, ...]) -> Operator:
    """An operator that reads or writes at indices."""
    dim, size = draw.randrange(4), shape[draw.randrange(4)]
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    index = torch.randint(shape[dim], (size,), generator=generator)
    rows = tuple(size if i == dim else n for i, n in enumerate(shape))
    places = torch.randint(shape[dim], rows, generator=generator)
    reduce, own, row = draw.choice(REDUCE), draw.random() < 0.5, draw.randrange(shape[dim])
    sizes = [2 if i == dim else 1 for i in range(4)]
    operators: list[Operator] = [
        lambda x: x.index_select(dim, index),
        lambda x: x.gather(dim, places),
        lambda x: torch.take_along_dim(x, places, dim),
        lambda x: x.index_add(dim, index, x.index_select(dim, index)),
        lambda x: x.scatter_add(dim, places, x.gather(dim, places).sin()),
        lambda x: x.scatter(dim, places % 1, 0.5),
        lambda x: x.scatter_reduce(
            dim, places, x.gather(dim, places).cos(), reduce, include_self=own
        ),
        lambda x: x.index_reduce(
            dim,
            index,
            x.index_select(dim, index).cos(),
            reduce.replace("sum", "amax"),
            include_self=own,
        ),
        lambda x: x.index_put((index % x.shape[0],), x.new_ones(()), accumulate=True),
        lambda x: x.movedim(dim, 0)[index].movedim(0, dim),
        lambda x: x + x.select(dim, row).unsqueeze(dim),
        lambda x: x.repeat(sizes),
        lambda x: x.repeat_interleave(2, dim),
        lambda x: x.mean(dim, keepdim=True).expand(shape) + x,
        lambda x: x * F.one_hot(x.argmax(dim) % 4, 4).sum(-1).unsqueeze(dim),
    ]
    return draw.choice(operators)


class Padded(nn.Module):
    """A depthwise convolution of an image that `pad` pads in the given mode."""

    def __init__(self, channels: int, pad: list[int], mode: str) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(channels, channels, 3, groups=channels)
        self.pad, self.mode = pad, mode

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.convolution(F.pad(x, self.pad, self.mode))
        return result


def windowed(draw: random.Random, shape: tuple[int, ...]) -> Operator:
    """An operator whose windows slide along rows and columns, or that moves these."""
    channels, mode, dim = shape[1], draw.choice(PADDING), draw.randrange(4)
    stride, width = draw.choice((1, 2)), draw.choice((2, 3))
    pad = [draw.randrange(2) for _ in range(4)]
    of_layer = "zeros" if mode == "constant" else mode
    convolution = nn.Conv2d(channels, 4, width, stride, 1, padding_mode=of_layer)
    grouped = nn.Conv2d(channels, channels, 3, 1, "same", groups=channels)
    transposed = nn.ConvTranspose2d(channels, 4, width, stride)
    operators: list[Operator] = [
        convolution,
        grouped,
        transposed,
        Padded(channels, pad, mode),
        lambda x: F.max_pool2d(x, width, stride, 1),
        lambda x: F.avg_pool2d(x, 3, stride, 1, count_include_pad=width == 2),
        lambda x: F.adaptive_avg_pool2d(x, (x.shape[2] // 2, 1)),
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
        lambda x: F.interpolate(x, scale_factor=stride * 0.5, mode="nearest"),
        lambda x: F.pad(x, pad, mode),
        lambda x: F.pad(x, [1, 1, 1, 1], mode),
        lambda x: x.roll(width, dim),
        lambda x: x.flip(dim),
        lambda x: x.unfold(-1, 2, stride).mean(-1),
        lambda x: F.fold(F.unfold(x, 3, padding=1), x.shape[2:], 3, padding=1),
        torch.tril,
    ]
    return draw.choice(operators)


def moved(draw: random.Random, shape: tuple[int, ...]) -> Operator:
    """An operator that joins, splits or slices a dimension."""
    dim = draw.randrange(4)
    half = shape[dim] // 2

    def swapped(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim)
        return torch.cat([second, -first], dim)

    operators: list[Operator] = [
        swapped,
        lambda x: F.glu(x, dim),
        lambda x: torch.cat([x, x.sin()], dim),
        lambda x: torch.cat([x.narrow(dim, half, half), x], dim),
        lambda x: x.narrow(dim, 0, half) * x.narrow(dim, shape[dim] - half, half),
    ]
    return draw.choice(operators) if half and shape[dim] % 2 == 0 else torch.sin


class RandomFactors(nn.Module):
    """`steps` random operators of a product with a parameter."""

    def __init__(self, seed: int, steps: int = 6) -> None:
        super().__init__()
        draw = random.Random(seed)
        torch.manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(SHAPE[1:]))
        self.operators: list[Operator] = []
        x = torch.randn(SHAPE)
        while len(self.operators) < steps:
            operator = draw.choice((reduced, indexed, windowed, moved))(draw, tuple(x.shape))
            made = operator(x).detach()
            fits = made.numel() <= MOST_ELEMENTS and min(made.shape[2:]) > 1
            if fits and made.isfinite().all():
                self.operators.append(operator)
                x = made
        layers = (each for each in self.operators if isinstance(each, nn.Module))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.weight
        for operator in self.operators:
            x = operator(x)
        labels = x.detach().argmax(1)
        return x.sin().mean() + F.nll_loss(x.log_softmax(1), labels) / 9


def random_factors(seed: int) -> tuple[nn.Module, tuple[Any, ...]]:
    """A model in double precision and its batch."""
    torch.manual_seed(seed)
    return RandomFactors(seed).double(), (torch.randn(SHAPE).double(),)
