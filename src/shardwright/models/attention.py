"""Causal attention, for our own models and those of `transformers`; rotary and ALiBi positions.

No mask has batch or head dimensions: every device would have to create it whole, and it would
prevent cutting the heads.
"""

from __future__ import annotations

from functools import partial
from math import floor, log2
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.errors import ConfigError
from shardwright.models.prefix import add_prefix

Attention = Literal["fused", "explicit"]
"""`fused` is one operator with a built-in causal mask; `explicit` computes products and softmax
separately, and saves all scores."""


def causal_attention(
    kind: Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """Attention in which a position attends to itself, earlier ones, and all of a prefix.

    Args:
        query: `[batch, heads, positions, size]`.
        key, value: of the same shape, or with fewer heads, each shared by a group of adjacent query
            heads; more positions than those of the queries are a prefix before them.
        scale: multiplies the scores.
        dropout: dropout probability of the attention weights.

    Returns:
        `[batch, heads, positions, size]`, with the size of the values.
    """
    grouped, prefix = query.shape[1] != key.shape[1], key.shape[2] - query.shape[2]
    if kind == "fused" and not prefix:
        return F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True, scale=scale, enable_gqa=grouped
        )
    batch, heads, positions, size = query.shape
    place = torch.arange(key.shape[2], device=query.device) - prefix
    later = place > place[prefix:].unsqueeze(-1)
    if kind == "fused":
        return F.scaled_dot_product_attention(
            query, key, value, ~later, dropout_p=dropout, scale=scale, enable_gqa=grouped
        )
    queries = query.reshape(batch, key.shape[1], -1, positions, size)
    scores = torch.matmul(queries, key.unsqueeze(2).transpose(-1, -2)) * scale
    scores = scores.masked_fill(later, float("-inf"))
    weights = F.dropout(scores.softmax(-1, dtype=torch.float32).to(query.dtype), dropout)
    return torch.matmul(weights, value.unsqueeze(2)).reshape(batch, heads, positions, -1)


def register_with_transformers(kind: Attention) -> str:
    """Registers this attention with `transformers`; returns the `attn_implementation` to use."""
    from transformers import AttentionInterface, AttentionMaskInterface

    name = f"shardwright_{kind}"
    AttentionInterface.register(name, partial(_forward, kind))
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
    """Attention with the signature of `transformers`, whose own one handles all that is not causal
    or has a bias. `prefixes` are further keys and values of all layers."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    causal = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    biased, prefixes = options.get("position_bias") is not None, options.get("prefixes")
    if attention_mask is not None or biased or not causal:
        if prefixes is not None:
            raise ConfigError("prefixes need attention to all earlier positions, without a mask")
        attended, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **options
        )
        return attended, None
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer = getattr(module, "layer_idx", None)
    key, value = add_prefix(layer, prefixes, key, value)
    attended = causal_attention(kind, query, key, value, scale, dropout)
    return attended.transpose(1, 2), None


def _mask(**options: Any) -> Tensor | None:
    """None for the plain causal mask; `transformers` builds masks for sliding windows, padding and
    the special cases of models."""
    from transformers.masking_utils import sdpa_mask

    window = options.get("local_size")
    windowed = window is not None and window < options["kv_length"]
    special = windowed or options.get("use_vmap") or "allow_is_bidirectional_skip" in options
    if options.get("attention_mask") is None and not special:
        return None
    mask: Tensor | None = sdpa_mask(**options)
    return mask


def rotary(positions: int, size: int, base: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the angles of each position, both `[positions, size]`."""
    places = torch.arange(positions, device=like.device, dtype=torch.float32)
    pairs = torch.arange(0, size, 2, device=like.device, dtype=torch.float32)
    angles = places.unsqueeze(-1) * base ** (-pairs / size)
    angles = torch.cat((angles, angles), -1)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates every pair of features, which are half the size apart, by the angle of its position.

    Args:
        x: `[batch, heads, positions, size]`.
        cos, sin: `[positions, size]`, see `rotary`.
    """
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def alibi_slopes(heads: int) -> list[float]:
    """The ALiBi slope of each head (Press et al., 2022).

    For a power of two a geometric sequence; other numbers of heads add every other slope of the
    next power of two.
    """
    power = 2 ** floor(log2(heads))
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    return slopes + [2 ** (-4 * (i + 1) / power) for i in range(0, 2 * (heads - power), 2)]


_BLOCK = 64
"""Positions are split into a block and an offset, both of which are exact in half precision."""


def alibi_features(
    query: Tensor, key: Tensor, slopes: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Queries and keys with additional features whose product is the ALiBi bias.

    Softmax is invariant to adding a constant to a row, so the bias `slope * (j - i)` is equivalent
    to `slope * j`, which is the product of `(64 * slope, slope)` and `(j // 64, j % 64)`. So no
    bias tensor `[heads, positions, positions]` is created, and every device only computes that of
    its own heads. Sizes are padded to a multiple of 8, as fast kernels require.

    Args:
        query, key: `[batch, heads, positions, size]`.
        slopes: `[heads]`.
        scale: multiplies the scores in attention.
    """
    batch, heads, positions, size = query.shape
    extra = -(-(size + 2) // 8) * 8 - size
    steep = torch.stack((slopes * _BLOCK, slopes), -1) / scale
    place = torch.arange(positions, device=query.device)
    counted = torch.stack((place // _BLOCK, place % _BLOCK), -1)

    def concatenate(x: Tensor, features: Tensor) -> Tensor:
        filled = torch.nn.functional.pad(features.to(x.dtype), (0, extra - 2))
        return torch.cat((x, filled.expand(batch, heads, positions, extra)), -1)

    return concatenate(query, steep.unsqueeze(1)), concatenate(key, counted)
