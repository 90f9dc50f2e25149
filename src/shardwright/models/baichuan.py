"""Baichuan: LLaMA blocks with rotary (7B) or ALiBi (13B) positions.

Baichuan 2 also normalizes the rows of the language model head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.models.attention import (
    Attention,
    alibi_features,
    alibi_slopes,
    apply_rotary,
    causal_attention,
    rotary,
)
from shardwright.models.loss import draw_weights, next_token_loss
from shardwright.models.sizes import Dimensions

Angles = tuple[Tensor, Tensor]
"""Cosine and sine of the rotary angles, both `[positions, head size]`."""


class BaichuanAttention(nn.Module):
    """Multi-head attention with rotary positions, or ALiBi if no angles are given."""

    def __init__(self, sizes: Dimensions, attention: Attention) -> None:
        super().__init__()
        self.heads, self.head_size, self.attention = sizes.num_heads, sizes.head_size, attention
        width = sizes.hidden_size
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, angles: Angles | None) -> Tensor:
        query, key, value = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        # The scale of the heads themselves: features of ALiBi make queries and keys wider.
        scale = self.head_size**-0.5
        if angles is not None:
            query, key = apply_rotary(query, *angles), apply_rotary(key, *angles)
        else:
            slopes = torch.tensor(alibi_slopes(self.heads), device=x.device)
            query, key = alibi_features(query, key, slopes, scale)
        attended = causal_attention(self.attention, query, key, value, scale)
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class BaichuanFeedForward(nn.Module):
    """SwiGLU feed-forward layer (Shazeer, 2020)."""

    def __init__(self, sizes: Dimensions) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden_size, sizes.intermediate_size, bias=False)
        self.up_proj = nn.Linear(sizes.hidden_size, sizes.intermediate_size, bias=False)
        self.down_proj = nn.Linear(sizes.intermediate_size, sizes.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class BaichuanBlock(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, sizes: Dimensions, attention: Attention) -> None:
        super().__init__()
        self.self_attn = BaichuanAttention(sizes, attention)
        self.mlp = BaichuanFeedForward(sizes)
        self.input_layernorm = nn.RMSNorm(sizes.hidden_size, sizes.norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(sizes.hidden_size, sizes.norm_eps)

    def forward(self, x: Tensor, angles: Angles | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), angles)
        return x + self.mlp(self.post_attention_layernorm(x))


class BaichuanBackbone(nn.Module):
    """Backbone from token ids `[batch, positions]` to hidden states `[batch, positions, width]`."""

    def __init__(self, sizes: Dimensions, attention: Attention) -> None:
        super().__init__()
        self.sizes = sizes
        self.embed_tokens = nn.Embedding(sizes.vocab_size, sizes.hidden_size)
        self.layers = nn.ModuleList(
            BaichuanBlock(sizes, attention) for _ in range(sizes.num_layers)
        )
        self.norm = nn.RMSNorm(sizes.hidden_size, sizes.norm_eps)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        # ALiBi has no angles.
        angles = None
        # Computed once for all layers.
        if self.sizes.positions == "rotary":
            positions = input_ids.shape[1]
            angles = rotary(positions, self.sizes.head_size, self.sizes.rope_base, like=x)
        for layer in self.layers:
            x = layer(x, angles)
        return self.norm(x)


class NormHead(nn.Linear):
    """Language model head whose weight rows are L2-normalized."""

    def __init__(self, sizes: Dimensions) -> None:
        super().__init__(sizes.hidden_size, sizes.vocab_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # Normalized in each forward pass, so that gradients pass through the normalization.
        return F.linear(x, F.normalize(self.weight, dim=-1))


class Baichuan(nn.Module):
    """Baichuan 1 or 2 with a `forward` that returns the loss."""

    def __init__(self, sizes: Dimensions, attention: Attention) -> None:
        super().__init__()
        self.model = BaichuanBackbone(sizes, attention)
        # The family of Baichuan 1 is `baichuan1`.
        is_second = sizes.family == "baichuan"
        width, vocabulary = sizes.hidden_size, sizes.vocab_size
        self.lm_head = NormHead(sizes) if is_second else nn.Linear(width, vocabulary, bias=False)
        draw_weights(self)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Compute the mean next-token loss; both arguments are `[batch, positions]`."""
        return next_token_loss(self.lm_head(self.model(input_ids)), labels)
