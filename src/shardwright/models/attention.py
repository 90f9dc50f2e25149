"""Causal attention, also for the models of `transformers`.

A mask of batch × heads × positions × positions would be made on every device and keep operators
from being cut along heads: where there is one, batch and heads share it.
"""

from __future__ import annotations

from collections.abc import Callable
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
        key, value: the same, or with fewer heads, each shared by as many neighbouring queries.
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
