"""Causal attention, also for the models of `transformers`.

A mask of batch × heads × positions × positions would be made on every device and keep operators
from being cut along heads: where there is one, batch and heads share it.
"""

from __future__ import annotations

from collections.abc import Callable
from math import floor, log2
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Attention = Literal["fused", "masked", "explicit"]
"""`fused` is one operator that knows the causal mask by itself; `masked` is one that reads it as a
tensor of positions × positions, so that queries may be cut along the sequence; `explicit` writes
out products and softmax, and keeps all scores."""


def causal_attention(
    kind: Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """Attention in which no position sees a later one.

    Args:
        query: batch × heads × positions × size.
        key, value: the same, or with fewer heads, each shared by as many neighboring queries.
        scale: of the scores.
        dropout: probability with which a weight is dropped.

    Returns:
        batch × heads × positions × size of the values.
    """
    grouped = query.shape[1] != key.shape[1]
    if kind == "fused":
        return F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True, scale=scale, enable_gqa=grouped
        )
    batch, heads, positions, size = query.shape
    place = torch.arange(positions, device=query.device)
    later = place > place.unsqueeze(-1)
    if kind == "masked":
        return F.scaled_dot_product_attention(
            query, key, value, ~later, dropout_p=dropout, scale=scale, enable_gqa=grouped
        )
    queries = query.reshape(batch, key.shape[1], -1, positions, size)
    scores = torch.matmul(queries, key.unsqueeze(2).transpose(-1, -2)) * scale
    scores = scores.masked_fill(later, float("-inf"))
    weights = F.dropout(scores.softmax(-1, dtype=torch.float32).to(query.dtype), dropout)
    return torch.matmul(weights, value.unsqueeze(2)).reshape(batch, heads, positions, -1)


def registered_with_transformers(kind: Attention) -> str:
    """Makes this attention known to `transformers`; gives its `attn_implementation`."""
    from transformers import AttentionInterface, AttentionMaskInterface

    name = f"shardwright_{kind}"
    AttentionInterface.register(name, _FORWARDS[kind])
    AttentionMaskInterface.register(name, _mask)
    return name


def _forward(
    kind: Attention,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention as `transformers` calls it; what is more than causal it computes itself."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    causal = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    biased = options.get("position_bias") is not None
    if attention_mask is not None or biased or not causal:
        attended, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **options
        )
        return attended, None
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    attended = causal_attention(kind, query, key, value, scale, dropout)
    return attended.transpose(1, 2), None


def _fused(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    return _forward("fused", *args, **kwargs)


def _masked(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    return _forward("masked", *args, **kwargs)


def _explicit(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    return _forward("explicit", *args, **kwargs)


_FORWARDS: dict[Attention, Callable[..., tuple[Tensor, None]]] = {
    "fused": _fused,
    "masked": _masked,
    "explicit": _explicit,
}


def _mask(**options: Any) -> Tensor | None:
    """None for the plain causal mask; a window smaller than the sequence, padding, and what a
    model adds itself are masks of `transformers`."""
    from transformers.masking_utils import sdpa_mask

    window = options.get("local_size")
    windowed = window is not None and window < options["kv_length"]
    special = windowed or options.get("use_vmap") or "allow_is_bidirectional_skip" in options
    if options.get("attention_mask") is None and not special:
        return None
    mask: Tensor | None = sdpa_mask(**options)
    return mask


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
