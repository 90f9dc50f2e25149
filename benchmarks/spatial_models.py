"""Networks of images, volumes and graphs, whose size is not in their batch."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional


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


class ConvNext(nn.Module):
    """ConvNeXt of `transformers` (Liu et al., "A ConvNet for the 2020s", 2022).

    Args:
        sizes: fields of its configuration; by default those of ConvNeXt-T.
    """

    def __init__(self, **sizes: list[int]) -> None:
        super().__init__()
        config = transformers.ConvNextConfig(num_labels=10, **sizes)
        self.net = transformers.ConvNextForImageClassification(config)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x).logits
        return logits.square().mean()


class FourierMixer(nn.Module):
    """Products of the frequencies of a field with complex block-diagonal matrices (Guibas et al.,
    "Adaptive Fourier Neural Operators", 2022).

    Args:
        width: number of channels.
        blocks: number of blocks of the matrices.
    """

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        size = width // blocks
        self.blocks, self.size = blocks, size
        self.first = nn.Parameter(0.02 * torch.randn(2, blocks, size, size))
        self.second = nn.Parameter(0.02 * torch.randn(2, blocks, size, size))

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = x.shape[1:3]
        frequencies = torch.fft.rfft2(x, dim=(1, 2), norm="ortho")
        parts = frequencies.unflatten(-1, (self.blocks, self.size))
        hidden = self._multiply(parts.real, parts.imag, self.first)
        real, imaginary = self._multiply(*map(functional.relu, hidden), self.second)
        shrunk = (functional.softshrink(part.flatten(-2), 0.01) for part in (real, imaginary))
        return torch.fft.irfft2(torch.complex(*shrunk), s=(rows, columns), dim=(1, 2), norm="ortho")

    def _multiply(self, real: Tensor, imaginary: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        product = partial(torch.einsum, "bhwni,nij->bhwnj")
        return (
            product(real, weight[0]) - product(imaginary, weight[1]),
            product(imaginary, weight[0]) + product(real, weight[1]),
        )


class ForecastBlock(nn.Module):
    """A Fourier mixer of positions, and two linear layers of channels."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.mixer = FourierMixer(width, blocks)
        self.linear = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norms[0](x))
        return x + self.linear(self.norms[1](x))


class Forecast(nn.Module):
    """A FourCastNet (Pathak et al., 2022): patches of a field, Fourier mixers, the next field.

    Args:
        variables: number of variables at each point of the field.
        width: number of channels.
        depth: number of blocks.
        patch: side of a patch.
        blocks: number of blocks of the complex matrices.
    """

    def __init__(
        self,
        variables: int = 20,
        width: int = 768,
        depth: int = 12,
        patch: int = 8,
        blocks: int = 8,
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(variables, width, patch, patch)
        self.layers = nn.Sequential(*(ForecastBlock(width, blocks) for _ in range(depth)))
        self.fields = nn.ConvTranspose2d(width, variables, patch, patch, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.layers(self.patches(x).permute(0, 2, 3, 1))
        return functional.mse_loss(self.fields(tokens.permute(0, 3, 1, 2)), x)


class GraphLayer(nn.Module):
    """The sum of a node's neighbors, weighted by the roots of degrees (Kipf and Welling, 2017)."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, out, bias=False)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges[0], edges[1]
        ones = torch.ones_like(target, dtype=x.dtype)
        degrees = x.new_zeros(len(x)).scatter_add(0, target, ones) + 1
        scale, h = degrees.rsqrt(), self.linear(x)
        messages = h[source] * (scale[source] * scale[target])[:, None]
        return torch.zeros_like(h).index_add(0, target, messages) + h * (scale * scale)[:, None]


class GraphNetwork(nn.Module):
    """Two layers, the maximum of each node's neighbors, and the class of each node."""

    def __init__(self, width: int = 64, classes: int = 16) -> None:
        super().__init__()
        self.first, self.second = GraphLayer(width, width), GraphLayer(width, width)
        self.classes = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        h = functional.relu(self.first(x, edges))
        h = functional.relu(self.second(h, edges))
        index = edges[1][:, None].expand(-1, h.shape[1])
        largest = torch.zeros_like(h).scatter_reduce(0, index, h[edges[0]], "amax")
        return functional.cross_entropy(self.classes(torch.cat([h, largest], 1)), labels)


def graph(nodes: int, edges: int, width: int = 64, classes: int = 16) -> tuple[Tensor, ...]:
    """Features, edges between random nodes, and labels."""
    pairs = torch.randint(nodes, (2, edges))
    return torch.randn(nodes, width), pairs, torch.randint(classes, (nodes,))
