"""A LLaMA of PyTorch's own modules: what is measured needs no other library."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class LlamaSizes:
    """
    Args:
        width: of the residual stream.
        inner: width of the feed-forward layers.
    """

    width: int
    inner: int
    heads: int
    layers: int = 1
    vocabulary: int = 1

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    def block_flops(self, batch: int, sequence: int) -> int:
        """Of a layer's forward and backward: of its products, and of the half of attention that
        the mask leaves."""
        parameters = 4 * self.width**2 + 3 * self.width * self.inner
        return 6 * batch * sequence * (parameters + sequence * self.width)


def rotated(x: Tensor) -> Tensor:
    """Rotary positions of `[batch, heads, positions, width]`."""
    half = x.shape[-1] // 2
    exponents = torch.arange(half, device=x.device, dtype=torch.float32) / half
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * 10000.0**-exponents
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    left, right = x[..., :half], x[..., half:]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


class Block(nn.Module):
    """A layer: attention and a gated feed-forward network."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        width, inner = sizes.width, sizes.inner
        self.heads = sizes.heads
        self.attention_norm, self.feed_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.attention_norm(x)
        q, k, v = (
            layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.feed_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class BlockLoss(nn.Module):
    """A layer with a number to train on."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.block = Block(sizes)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x).float().square().mean()


class Llama(nn.Module):
    """The language model with its loss."""

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())
