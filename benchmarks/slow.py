"""A model whose parts take so long as they are told: they sleep, so that processes that share a
core do not hold each other up."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.core.cost.pipeline_timeline import ChunkSeconds

slept: list[float] = []
"""Seconds of each sleep of this process since the list was cleared."""


def _sleep(seconds: float) -> None:
    started = time.perf_counter()
    time.sleep(seconds)
    slept.append(time.perf_counter() - started)


@torch.library.custom_op("benchmarks::slow", mutates_args=())
def slow(x: Tensor, forward: float, backward: float) -> Tensor:
    """A copy that takes `forward` seconds, and its gradient `backward` seconds."""
    _sleep(forward)
    return x.clone()


@slow.register_fake
def _(x: Tensor, forward: float, backward: float) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.seconds = inputs[2]


def _gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return slow(gradient, ctx.seconds, 0.0), None, None


slow.register_autograd(_gradient, setup_context=_keep)


class Block(nn.Module):
    """Reads activations and a parameter; the gradient of each takes a time of its own."""

    def __init__(self, seconds: ChunkSeconds, width: int) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        of_weight = self.seconds.seconds_of("W")
        weight = slow(self.weight, 0.0, of_weight)
        return slow(x, self.seconds.forward, self.seconds.backward - of_weight) + weight


class Chain(nn.Module):
    """Blocks one after the other, and a loss."""

    def __init__(self, parts: list[ChunkSeconds], width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(seconds, width) for seconds in parts)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.bias
        for block in self.blocks:
            x = block(x)
        return x.mean()
