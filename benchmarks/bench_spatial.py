"""Large images and volumes on 8 to 64 devices

One image of 2,048 × 2,048 pixels and one volume of 256³ voxels, too few samples for data parallel.
A residual network, a U-Net and a U-Net of volumes with group norms are planned on H100, in float32:
with rows and columns of convolutions and pools sharded, which exchange halos with the neighboring
shards, and with batch and channels alone. Seconds of a training step are predicted, bytes are those
that one device sends in it. Goal: never slower with them, and twice as fast for one network.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional

import shardwright as sw
from benchmarks.size import Size
from benchmarks.table import Table
from benchmarks.timing import in_fork
from shardwright.core.cost.memory import bytes_text
from shardwright.core.rules.windowed import Window

DEVICES = (8, 64)


class Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, channels: int, out_channels: int, stride: int = 1) -> None:
        super().__init__()
        conv = partial(nn.Conv2d, bias=False)
        self.inner = nn.Sequential(
            conv(channels, out_channels, 3, stride, 1),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(),
            conv(out_channels, out_channels, 3, 1, 1),
            nn.BatchNorm2d(out_channels),
        )
        self.shortcut = conv(channels, out_channels, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.inner(x) + self.shortcut(x))


class Classifier(nn.Module):
    """The stem and four blocks of a ResNet."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        widths = (width, width, 2 * width, 4 * width, 8 * width)
        blocks = (Residual(a, b, 1 if a == b else 2) for a, b in pairwise(widths))
        self.net = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
            *blocks,
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8 * width, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).square().mean()


class UNet(nn.Module):
    """Two levels down and up again, with skip connections.

    Args:
        num_dims: 2 for images, 3 for volumes.
    """

    def __init__(self, num_dims: int, width: int = 32) -> None:
        super().__init__()
        conv, up = (
            (nn.Conv2d, nn.ConvTranspose2d) if num_dims == 2 else (nn.Conv3d, nn.ConvTranspose3d)
        )

        def double(channels: int, out_channels: int, stride: int = 1) -> nn.Sequential:
            return nn.Sequential(
                conv(channels, out_channels, 3, stride, 1, bias=False),
                nn.GroupNorm(8, out_channels),
                nn.ReLU(),
                conv(out_channels, out_channels, 3, 1, 1, bias=False),
                nn.GroupNorm(8, out_channels),
                nn.ReLU(),
            )

        self.down = nn.ModuleList(
            [double(3, width), double(width, 2 * width, 2), double(2 * width, 4 * width, 2)]
        )
        self.up = nn.ModuleList([up(4 * width, 2 * width, 2, 2), up(2 * width, width, 2, 2)])
        self.merge = nn.ModuleList([double(4 * width, 2 * width), double(2 * width, width)])
        self.out = conv(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
        for up, merge, skip in zip(self.up, self.merge, skips[-2::-1], strict=True):
            x = merge(torch.cat([up(x), skip], 1))
        return self.out(x).square().mean()


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "residual network, 2,048²": (Classifier, (1, 3, 2048, 2048)),
    "U-Net, 2,048²": (partial(UNet, 2), (1, 3, 2048, 2048)),
    "U-Net, 256³": (partial(UNet, 3, 16), (1, 3, 256, 256, 256)),
}


def run(size: Size = Size.DEFAULT) -> list[Table]:
    columns = ("model", "devices", "step, ms", "sent", "without, ms", "sent without", "ratio")
    table, gains = Table("Predicted steps", columns), []
    for name in MODELS:
        for devices in DEVICES[: size.of(1, full=2)]:
            seconds, sent = in_fork(partial(_step, name, devices, True))
            before, sent_before = in_fork(partial(_step, name, devices, False))
            gains.append(before / seconds)
            times = (
                f"{1e3 * seconds:.2f}",
                bytes_text(sent),
                f"{1e3 * before:.2f}",
                bytes_text(sent_before),
            )
            table.add(name, devices, *times, f"{gains[-1]:.2f}")
    if min(gains) < 1:
        table.missed.append("a plan is slower with sharded rows and columns")
    if max(gains) < 2:
        table.missed.append("no plan is twice as fast")
    return [table]


def _step(name: str, devices: int, shards_space: bool) -> tuple[float, int]:
    """Predicted seconds of a training step, and bytes that one device sends in it."""
    make, shape = MODELS[name]
    if not shards_space:
        patch.object(Window, "capacity", 1).start()
    with torch.device("meta"):
        net, x = make(), torch.empty(shape)
    plan = sw.plan(net, (x,), devices=devices, cluster="h100", memory_limit="none")
    assert plan.step_time is not None
    return plan.step_time, plan.forward_bytes + plan.backward_bytes
