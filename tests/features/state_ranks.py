"""What `test_forward_state.py` runs on every rank: models whose `forward` changes state."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardwright as sw
from torchrun import run_checks

STEPS = 3


class Layer(nn.Module):
    """A linear layer, and then a function of the module and its output."""

    calls = 0

    def __init__(self, then: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.then = nn.Linear(8, 8), then
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("before", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        result = self.then(self, y)
        return result if isinstance(result, Tensor) else y


def model(then: Callable[[Any, Tensor], Any]) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(Layer(then), nn.ReLU(), nn.Sequential(Layer(then)))
    return sw.WithLoss(layers, nn.MSELoss())


def average(layer: Layer, y: Tensor) -> Tensor:
    layer.before = layer.mean
    layer.mean = 0.9 * layer.mean + 0.1 * y.detach().mean(0)
    return y - layer.mean + 0.5 * layer.before


def train(net: Any, optimizer: torch.optim.Optimizer) -> list[float]:
    torch.manual_seed(1)
    losses = []
    for _ in range(STEPS):
        loss = net(torch.randn(8, 8), torch.randn(8, 8))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def check_assigned_buffers() -> None:
    eager = model(average)
    wanted = train(eager, torch.optim.SGD(eager.parameters(), 0.1))
    options: tuple[dict[str, Any], ...] = (
        {"mode": "data_parallel"},
        {"mem_coeff": 1000.0},
        {"mode": "data_parallel", "hsdp": {"level": "level3", "threshold": 0}},
    )
    for chosen in options:
        net = model(average)
        plan = sw.plan(net, (torch.ones(8, 8), torch.ones(8, 8)), devices=2, **chosen)
        planned: Any = sw.parallelize(net, plan, "cpu", copy=True)
        losses = train(planned, torch.optim.SGD(planned.parameters(), 0.1))
        torch.testing.assert_close(losses, wanted, rtol=1e-5, atol=1e-6)
        buffers = dict(eager.named_buffers())
        assert len(buffers) == 4
        torch.testing.assert_close(dict(planned.named_buffers()), buffers)


def check_refusals() -> None:
    """Each rank is told, though rank 0 alone captures."""
    positions, means = itertools.count(), [torch.zeros(())]

    def move(layer: Layer, y: Tensor) -> None:
        next(positions)

    def add(layer: Layer, y: Tensor) -> None:
        means[0].add_(y.detach().mean())

    def replace(layer: Layer, y: Tensor) -> None:
        layer.linear.bias = nn.Parameter(layer.linear.bias * 0.9)

    for then, what in (
        (move, "variable 'positions'"),
        (add, "variable 'means[0]'"),
        (replace, "parameter 'net.0.linear.bias'"),
    ):
        try:
            sw.plan(model(then), (torch.ones(8, 8), torch.ones(8, 8)), devices=2)
        except sw.CaptureError as error:
            assert what in str(error), error
        else:
            raise AssertionError(f"{what}: planned")


class Outside(nn.Module):
    """A model that calls its layers through a lambda, as minGPT does, and through a registry."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleDict({"up": nn.Linear(8, 16), "down": nn.Linear(16, 8)})
        layers = self.layers
        self.called = lambda x: layers.down(layers.up(x).relu())
        SCALES[layers["down"]] = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return (self.called(x) * SCALES.get(self.layers["down"], 1.0)).square().mean()


SCALES: dict[nn.Module, float] = {}


def check_references_from_outside() -> None:
    """A second batch size is captured while the parameters are sharded."""
    for options in ({"mode": "data_parallel"}, {"mem_coeff": 1000.0}):
        eager, net = Outside(), Outside()
        plan = sw.plan(net, (torch.ones(8, 8),), devices=2, **options)
        planned: Any = sw.parallelize(net, plan, "cpu")
        for size in (8, 4):
            x = torch.randn(size, 8, generator=torch.Generator().manual_seed(size))
            losses = planned(x), eager(x)
            torch.testing.assert_close(*losses)
            for loss in losses:
                loss.backward()
        for own, other in zip(planned.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(own.grad.full_tensor(), other.grad)


CHECKS = (check_assigned_buffers, check_refusals, check_references_from_outside)


if __name__ == "__main__":
    run_checks(CHECKS)
