"""Models with batch norms, and eager gradient accumulation, which plans are compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Loss = Callable[[Tensor, Tensor], Tensor]


class Normalized(nn.Module):
    """A batch norm between two linear layers.

    Args:
        norm: the batch norm, of 6 channels.
        ignores: whether the loss ignores targets of 0.
    """

    def __init__(self, norm: nn.Module | None = None, ignores: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 5)
        self.norm = nn.BatchNorm1d(6) if norm is None else norm
        self.ignores = ignores

    def features(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x)).tanh()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.last(self.features(x)), y)

    def loss(self, z: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(z, y, ignore_index=0 if self.ignores else -100)


class Shared(Normalized):
    """Calls its batch norm twice, as models of two views do."""

    def features(self, x: Tensor) -> Tensor:
        return super().features(x) * super().features(-x)


class First(Normalized):
    """Normalizes its inputs."""

    def features(self, x: Tensor) -> Tensor:
        return self.first(self.norm(x)).tanh()


class Image(Normalized):
    def __init__(self) -> None:
        super().__init__(nn.BatchNorm2d(6))
        self.convolution = nn.Conv2d(1, 6, 2)

    def features(self, x: Tensor) -> Tensor:
        return self.norm(self.convolution(x.view(-1, 1, 2, 3))).flatten(2).mean(2)


class Instances(Image):
    """Normalizes each image by itself, and averages the statistics of all."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm2d(6, affine=True, track_running_stats=True)


class Functional(Normalized):
    """Without running statistics, and called as a function."""

    def features(self, x: Tensor) -> Tensor:
        z = F.batch_norm(self.first(x), None, None, self.norm.weight, training=True)
        return F.batch_norm(input=z, running_mean=None, running_var=None, training=True)


BATCH_NORM_NETS: dict[str, Callable[[], Normalized]] = {
    "targets": Normalized,
    "ignored targets": lambda: Normalized(ignores=True),
    "an average of all batches": lambda: Normalized(nn.BatchNorm1d(6, momentum=None)),
    "no running statistics": lambda: Normalized(nn.BatchNorm1d(6, track_running_stats=False)),
    "no affine": lambda: First(nn.BatchNorm1d(6, affine=False)),
    "called twice": Shared,
    "inputs": First,
    "images": Image,
    "instances": Instances,
    "functions": Functional,
}


def batch() -> tuple[Tensor, Tensor]:
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(0))
    return x.double(), torch.arange(16) % 5


def accumulated(net: Normalized, call: Sequence[Tensor], count: int) -> Tensor:
    """The loss of a batch by eager gradient accumulation, with its gradients in `net`."""
    total = torch.zeros((), dtype=torch.float64)
    pieces = zip(*(each.chunk(count) for each in call), strict=True)
    targets = (call[1] != 0).sum() if net.ignores else call[1].numel()
    for x, y in pieces:
        own = (y != 0).sum() if net.ignores else y.numel()
        loss = net(x, y) * own / targets
        loss.backward()
        total = total + loss.detach()
    return total
