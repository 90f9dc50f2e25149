"""Programs whose models change something in `forward`, or are more than plain layers."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.programs.program import (
    PROGRAMS,
    WIDTH,
    Classifier,
    Parallel,
    Training,
    batch,
    call,
    program,
    trained,
)


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


class Teacher(Classifier):
    """An exponential moving average of the first layer, which it is drawn to."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(WIDTH, 2 * WIDTH).requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        with torch.no_grad():
            for mean, one in zip(self.teacher.parameters(), self.first.parameters(), strict=True):
                mean.mul_(0.9).add_(one, alpha=0.1)
        drawn = F.mse_loss(self.first(x), self.teacher(x))
        return super().forward(x, y) + drawn


class Clamped(Classifier):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        with torch.no_grad():
            self.first.weight.clamp_(-0.1, 0.1)
        return super().forward(x, y)


class ClampedData(Classifier):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        self.first.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x, y)


class ShortWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WIDTH, 16, max_norm=1.0)
        self.head = nn.Linear(16, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return F.cross_entropy(self.head(self.words(y)) + x, y)


class WarmUp(Classifier):
    """Counts its calls in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor, y: Tensor) -> Any:
        self.calls += 1
        return super().forward(x, y) * min(1.0, self.calls / 3)


class PlainMean(Classifier):
    """Keeps a running mean in a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
        return super().forward(x - self.mean, y)


class BufferMean(Classifier):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0).detach()
        return super().forward(x - self.mean, y)


class Spectral(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.second = nn.utils.parametrizations.spectral_norm(self.second)


class WeightNorm(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.second = nn.utils.parametrizations.weight_norm(self.second)


class Recomputed(Classifier):
    reentrant = False

    def forward(self, x: Tensor, y: Tensor) -> Any:
        hidden = checkpoint(torch.tanh, self.first(x), use_reentrant=self.reentrant)
        return F.cross_entropy(self.second(hidden), y)


class ReentrantInput(Classifier):
    """Eager PyTorch gives the first layer no gradient, with a warning: its input needs none."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        hidden = checkpoint(self.hidden, x, use_reentrant=True)
        return F.cross_entropy(self.second(hidden), y)


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(WIDTH, 16)
        self.head = nn.Linear(16, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        state = None
        for _ in range(3):
            state = self.cell(x, state)
        return F.cross_entropy(self.head(state[0]), y)


def _plain(name: str, model: type[nn.Module]) -> None:
    PROGRAMS[name] = lambda parallel: trained(parallel(model(), *batch()), call)


for _name, _model in {
    "a teacher that follows in forward": Teacher,
    "weights clamped in forward": Clamped,
    "weights clamped in forward by .data": ClampedData,
    "an embedding with max_norm": ShortWords,
    "calls counted in an attribute": WarmUp,
    "a running mean in a plain tensor": PlainMean,
    "a running mean in a buffer": BufferMean,
    "spectral norm": Spectral,
    "weight norm": WeightNorm,
    "activation checkpointing": Recomputed,
    "reentrant checkpointing": type("Reentrant", (Recomputed,), {"reentrant": True}),
    "reentrant checkpointing of the first layer": ReentrantInput,
    "a loop of LSTM cells": Cells,
}.items():
    _plain(_name, _model)


class Chance(Classifier):
    def forward(self, x: Tensor, y: Tensor) -> Any:
        return super().forward(x, y) * (2 if random.random() < 0.5 else 1)


class Chosen(nn.Module):
    """The first of many layers, as many as an attribute says."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 3 for _ in range(3))
        self.depth = 2

    def forward(self, x: Tensor, y: Tensor) -> Any:
        for weight in self.weights[: self.depth]:
            x = torch.tanh(x @ weight)
        return F.cross_entropy(x, y)


_plain("a number of Python's random", Chance)


@program
def more_layers_on_the_way(parallel: Parallel) -> Training:
    net = parallel(Chosen(), *batch())
    yield from trained(net, call)
    net.depth = 3
    return (yield from trained(net, call))


@program
def a_compiled_layer(parallel: Parallel) -> Training:
    net = Classifier()
    net.first = torch.compile(net.first, backend="aot_eager")
    return trained(parallel(net, *batch()), call)


@program
def a_batch_that_is_a_named_tuple(parallel: Parallel) -> Training:
    class OfPair(Classifier):
        def forward(self, pair: Pair) -> Any:
            return super().forward(pair.x, pair.y)

    return trained(parallel(OfPair(), Pair(*batch())), lambda net, *pair: net(Pair(*pair)))


@program
def an_attribute_changes_between_steps(parallel: Parallel) -> Training:
    class Scaled(Classifier):
        scale = 1.0

        def forward(self, x: Tensor, y: Tensor) -> Any:
            return super().forward(x, y) * self.scale

    def loss_of(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        net.scale = net.scale * 0.5
        return net(x, y)

    return trained(parallel(Scaled(), *batch()), loss_of)
