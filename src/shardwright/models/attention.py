"""Causal attention for this package and `transformers`; rotary and ALiBi positions.

Attention masks have no batch and head dimensions: otherwise every device would create the mask of
all heads, and the mask would prevent sharding the heads.
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
"""`fused`: flash attention with a built-in causal mask. `explicit`: unfused attention, which saves
its score matrix for the backward pass."""


def causal_attention(
    attention: Attention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """Compute causal attention, with an optional prefix to which all positions attend.

    Args:
        attention: fused or unfused attention.
        query: `[batch, heads, positions, size]`.
        key, value: `[batch, kv_heads, prefix + positions, size]`; with fewer heads than `query`
            (grouped-query attention), each is shared by a group of adjacent query heads.
        scale: factor of the scores, usually size^-0.5.
        dropout: dropout probability of the attention weights.

    Returns:
        `[batch, heads, positions, size of value]`.
    """
    # Keys that exceed the queries are those of the prefix.
    has_groups, prefix = query.shape[1] != key.shape[1], key.shape[2] - query.shape[2]
    # Without a mask tensor, so that the kernel skips the masked scores.
    if attention == "fused" and not prefix:
        return F.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True, scale=scale, enable_gqa=has_groups
        )
    batch, heads, positions, size = query.shape
    # A prefix needs an explicit mask, because `is_causal` aligns queries with the first keys.
    # Prefix tokens have negative positions, so that all queries attend to them.
    position = torch.arange(key.shape[2], device=query.device) - prefix
    is_future = position > position[prefix:].unsqueeze(-1)
    if attention == "fused":
        return F.scaled_dot_product_attention(
            query, key, value, ~is_future, dropout_p=dropout, scale=scale, enable_gqa=has_groups
        )
    # Query heads are split into (kv head, head of its group), so that keys are not repeated.
    queries = query.reshape(batch, key.shape[1], -1, positions, size)
    scores = torch.matmul(queries, key.unsqueeze(2).transpose(-1, -2)) * scale
    scores = scores.masked_fill(is_future, float("-inf"))
    # In float32, as in the eager attention of `transformers`. `F.dropout` always draws: its caller
    # passes 0 in evaluation.
    weights = F.dropout(scores.softmax(-1, dtype=torch.float32).to(query.dtype), dropout)
    return torch.matmul(weights, value.unsqueeze(2)).reshape(batch, heads, positions, -1)


def register_with_transformers(attention: Attention) -> str:
    """Register `causal_attention` with `transformers`; return its `attn_implementation`."""
    from transformers import AttentionInterface, AttentionMaskInterface

    name = f"shardwright_{attention}"
    AttentionInterface.register(name, partial(_compute_attention_for_transformers, attention))
    AttentionMaskInterface.register(name, _build_mask_for_transformers)
    return name


def _compute_attention_for_transformers(
    attention: Attention,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention with the signature of `transformers`.

    Falls back to the SDPA attention of `transformers` for a mask, a bias, or non-causal attention.

    Args:
        options: may contain `prefixes`, the keys and values of a prefix for each layer.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    is_causal = options.get("is_causal")
    # None leaves the choice to the module.
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    has_bias, prefixes = options.get("position_bias") is not None, options.get("prefixes")
    # These need scores or masks that `causal_attention` does not compute.
    if attention_mask is not None or has_bias or not is_causal:
        if prefixes is not None:
            raise ConfigError(
                "prefix tuning needs causal attention without a mask\nuse LoRA for this model"
            )
        attended, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **options
        )
        return attended, None
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer = getattr(module, "layer_idx", None)
    key, value = add_prefix(layer, prefixes, key, value)
    attended = causal_attention(attention, query, key, value, scale, dropout)
    # `transformers` expects `[batch, positions, heads, size]`.
    return attended.transpose(1, 2), None


def _build_mask_for_transformers(**options: Any) -> Tensor | None:
    """Build the attention mask of `transformers`; None if the model needs only a causal mask.

    Sliding windows, padding and some models need other masks.
    """
    from transformers.masking_utils import sdpa_mask

    window = options.get("local_size")
    # A window longer than the sequence masks nothing.
    has_window = window is not None and window < options["kv_length"]
    needs_mask = has_window or options.get("use_vmap") or "allow_is_bidirectional_skip" in options
    if options.get("attention_mask") is None and not needs_mask:
        return None
    mask: Tensor | None = sdpa_mask(**options)
    return mask


def rotary(positions: int, size: int, base: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Compute cosine and sine of the angles of each position (RoPE, Su et al., 2021).

    Args:
        size: head size.
        base: base of the rotary frequencies.
        like: tensor whose dtype and device the results have.

    Returns:
        Cosine and sine, both `[positions, size]`.
    """
    # In float32, because bfloat16 cannot represent positions above 256 exactly.
    position = torch.arange(positions, device=like.device, dtype=torch.float32)
    pairs = torch.arange(0, size, 2, device=like.device, dtype=torch.float32)
    angles = position.unsqueeze(-1) * base ** (-pairs / size)
    # Features i and i + size / 2 are a pair, with one angle.
    angles = torch.cat((angles, angles), -1)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair of features `(i, i + size / 2)` by the angles of its position.

    Args:
        x: `[batch, heads, positions, size]`.
        cos, sin: cosine and sine of the angles, `[positions, size]`.
    """
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def alibi_slopes(heads: int) -> list[float]:
    """Return the ALiBi slope of each head (Press et al., 2022).

    The slopes of 2^n heads are a geometric sequence. Other numbers of heads add every other slope
    of the next power of two.
    """
    power = 2 ** floor(log2(heads))
    # 2^(-8 i / n) for i = 1 … n heads (Press et al., 2022).
    slopes = [2 ** (-8 * (i + 1) / power) for i in range(power)]
    return slopes + [2 ** (-4 * (i + 1) / power) for i in range(0, 2 * (heads - power), 2)]


_ALIBI_BLOCK = 64
"""Positions per block in ALiBi: a position is split into the index of its block and the offset in
the block, which both are exact in bfloat16."""


def alibi_features(
    query: Tensor, key: Tensor, slopes: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Append features to queries and keys, such that their product is the ALiBi bias.

    Softmax is invariant to a constant added to a row. So the bias `slope * (j - i)` of query i and
    key j is equivalent to `slope * j`: the product of `(64 * slope, slope)` and
    `(j // 64, j % 64)`. This avoids a bias tensor `[heads, positions, positions]`; each device
    computes the features of its own heads. Sizes are padded to a multiple of 8, as fast kernels
    require.

    Args:
        query, key: `[batch, heads, positions, size]`.
        slopes: `[heads]`.
        scale: factor of the scores in attention.

    Returns:
        Queries and keys, `[batch, heads, positions, padded size]`.
    """
    batch, heads, positions, size = query.shape
    # Two features for the bias, and zeros up to a multiple of 8.
    num_features = -(-(size + 2) // 8) * 8 - size
    # Divided by `scale`, because attention multiplies the bias with it too.
    query_features = torch.stack((slopes * _ALIBI_BLOCK, slopes), -1) / scale
    position = torch.arange(positions, device=query.device)
    key_features = torch.stack((position // _ALIBI_BLOCK, position % _ALIBI_BLOCK), -1)

    def concatenate(x: Tensor, features: Tensor) -> Tensor:
        padded = torch.nn.functional.pad(features.to(x.dtype), (0, num_features - 2))
        return torch.cat((x, padded.expand(batch, heads, positions, num_features)), -1)

    return concatenate(query, query_features.unsqueeze(1)), concatenate(key, key_features)
