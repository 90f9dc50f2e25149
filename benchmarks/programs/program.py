"""What the training programs share.

A program is a generator: it yields numbers that it sees while it trains, and returns the model that
it trained. It gets a function that plans a model for the running processes and parallelizes it; on
one device that function returns the model itself.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Training = Generator[float, None, nn.Module]
Parallel = Callable[..., nn.Module]
Program = Callable[[Parallel], Training]

PROGRAMS: dict[str, Program] = {}
STEPS, BATCH, WIDTH = 3, 16, 8


def program(function: Program) -> Program:
    """Adds a program to the list, under its name."""
    PROGRAMS[function.__name__.replace("_", " ")] = function
    return function


def batch(step: int = 0, size: int = BATCH) -> tuple[Tensor, Tensor]:
    """Features, and classes below `WIDTH`."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(size, WIDTH, generator=generator)
    return x, torch.randint(WIDTH, (size,), generator=generator)


def number(tensor: Tensor) -> float:
    """The value of a loss, whole."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).item()


def trained(
    net: nn.Module,
    loss_of: Callable[..., Tensor],
    optimizer: torch.optim.Optimizer | None = None,
    steps: Iterable[int] = range(STEPS),
) -> Training:
    """A plain loop: `loss_of(net, x, y)` is trained, by SGD with momentum if nothing is said, on
    the batches of these steps."""
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in steps:
        loss = loss_of(net, *batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield number(loss)
    return net


def call(net: nn.Module, *args: Any) -> Tensor:
    return net(*args)


class Classifier(nn.Module):
    """Two layers and their loss; a base for models that do something unusual."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 2 * WIDTH)
        self.second = nn.Linear(2 * WIDTH, WIDTH)

    def hidden(self, x: Tensor) -> Tensor:
        return F.gelu(self.first(x))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return F.cross_entropy(self.second(self.hidden(x)), y)
