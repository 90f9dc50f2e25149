"""How positions enter attention: rotated queries and keys, or a bias that grows with distance."""

from __future__ import annotations

from math import floor, log2

import torch
from torch import Tensor


def rotary(positions: int, size: int, base: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angles of each position, both positions × `size`."""
    places = torch.arange(positions, device=like.device, dtype=torch.float32)
    pairs = torch.arange(0, size, 2, device=like.device, dtype=torch.float32)
    angles = places.unsqueeze(-1) * base ** (-pairs / size)
    angles = torch.cat((angles, angles), -1)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Every pair of features, half the size apart, rotated by the angle of its position.

    `x` is batch × heads × positions × size.
    """
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def alibi_slopes(heads: int) -> list[float]:
    """The slope of each head: a geometric sequence that starts and ends at the same number for any
    power of two; between powers every other slope of the next one is added (Press et al., 2022)."""
    power = 2 ** floor(log2(heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    return slopes + [2 ** (-4 * (i + 1) / power) for i in range(0, 2 * (heads - power), 2)]


_BLOCK = 64
"""Positions are counted in blocks and within a block: both stay exact in half precision."""


def alibi_features(
    query: Tensor, key: Tensor, slopes: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Queries and keys with more features, so that their product holds the bias of ALiBi.

    A softmax does not see what is added to a whole row: `slope * (j - i)` acts as `slope * j`, and
    that is the product of `(64 * slope, slope)` with `(j // 64, j % 64)`. So no bias of heads ×
    positions × positions is ever made, and every device computes its own heads' only. The sizes are
    filled up to a multiple of 8, as fast kernels need.

    Args:
        query, key: batch × heads × positions × size.
        slopes: one for each head.
        scale: by which attention multiplies the scores.
    """
    batch, heads, positions, size = query.shape
    more = -(-(size + 2) // 8) * 8 - size
    steep = torch.stack((slopes * _BLOCK, slopes), -1) / scale
    place = torch.arange(positions, device=query.device)
    counted = torch.stack((place // _BLOCK, place % _BLOCK), -1)

    def joined(x: Tensor, features: Tensor) -> Tensor:
        filled = torch.nn.functional.pad(features.to(x.dtype), (0, more - 2))
        return torch.cat((x, filled.expand(batch, heads, positions, more)), -1)

    return joined(query, steep.unsqueeze(1)), joined(key, counted)
