"""PanguAlpha: learned positions, LayerNorm, a final query layer, a head tied to the embedding."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.errors import ConfigError
from shardwright.models.attention import Attention, causal_attention
from shardwright.models.loss import draw_weights, next_token_loss
from shardwright.models.sizes import Dimensions

Activation = Callable[[Tensor], Tensor]


def fast_gelu(x: Tensor) -> Tensor:
    """The sigmoid approximation of GELU (Hendrycks and Gimpel, 2016)."""
    return x * torch.sigmoid(1.702 * x)


class PanguAttention(nn.Module):
    """Multi-head attention whose queries come from `x`, or from `queries` if given."""

    def __init__(self, sizes: Dimensions, kind: Attention) -> None:
        super().__init__()
        self.heads, self.scale, self.kind = sizes.num_heads, sizes.head_size**-0.5, kind
        self.dropout = sizes.dropout
        width = sizes.hidden_size
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.o_proj = nn.Linear(width, width)

    def forward(self, x: Tensor, queries: Tensor | None = None) -> Tensor:
        """`x` is `[batch, positions, width]`; `queries` has the same shape or, if shared by the
        batch, `[positions, width]`."""
        query = self.q_proj(x if queries is None else queries)
        query, key, value = (
            projected.unflatten(-1, (self.heads, -1)).transpose(-2, -3)
            for projected in (query, self.k_proj(x), self.v_proj(x))
        )
        dropout = self.dropout if self.training else 0.0
        query = query.expand(key.shape)
        attended = causal_attention(self.kind, query, key, value, self.scale, dropout)
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class PanguFeedForward(nn.Module):
    def __init__(self, sizes: Dimensions, activation: Activation) -> None:
        super().__init__()
        self.activation = activation
        self.up_proj = nn.Linear(sizes.hidden_size, sizes.intermediate_size)
        self.down_proj = nn.Linear(sizes.intermediate_size, sizes.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.up_proj(x)))


class PanguBlock(nn.Module):
    """A pre-norm transformer block; with `queries` it is the query layer."""

    def __init__(
        self, sizes: Dimensions, kind: Attention, activation: Activation = fast_gelu
    ) -> None:
        super().__init__()
        self.self_attn = PanguAttention(sizes, kind)
        self.mlp = PanguFeedForward(sizes, activation)
        self.input_layernorm = nn.LayerNorm(sizes.hidden_size, sizes.norm_eps)
        self.post_attention_layernorm = nn.LayerNorm(sizes.hidden_size, sizes.norm_eps)
        self.dropout = nn.Dropout(sizes.dropout)

    def forward(self, x: Tensor, queries: Tensor | None = None) -> Tensor:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), queries))
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))


def first_positions(embedding: nn.Embedding, positions: int) -> Tensor:
    """`[positions, width]`. Raises: ConfigError: the model has not so many."""
    limit = embedding.num_embeddings
    if positions > limit:
        raise ConfigError(
            f"the sequence has {positions} positions, but the model only has {limit}: shorten"
            " the sequence, or build the model with a larger seq_length"
        )
    return embedding.weight[:positions]


class PanguBackbone(nn.Module):
    """From token ids to the hidden states of the query layer."""

    def __init__(self, sizes: Dimensions, kind: Attention) -> None:
        super().__init__()
        width = sizes.hidden_size
        self.embed_tokens = nn.Embedding(sizes.vocab_size, width)
        self.embed_positions = nn.Embedding(sizes.seq_length, width)
        self.dropout = nn.Dropout(sizes.dropout)
        self.layers = nn.ModuleList(PanguBlock(sizes, kind) for _ in range(sizes.num_layers - 1))
        self.norm = nn.LayerNorm(width, sizes.norm_eps)
        self.embed_queries = nn.Embedding(sizes.seq_length, width)
        self.query_layer = PanguBlock(sizes, kind)

    def forward(self, input_ids: Tensor) -> Tensor:
        positions = input_ids.shape[1]
        x = self.embed_tokens(input_ids) + first_positions(self.embed_positions, positions)
        x = self.dropout(x)
        for layer in self.layers:
            x = layer(x)
        return self.query_layer(self.norm(x), self.embed_queries.weight[:positions])


class PanguAlpha(nn.Module):
    """PanguAlpha with its loss."""

    def __init__(self, sizes: Dimensions, kind: Attention) -> None:
        super().__init__()
        self.model = PanguBackbone(sizes, kind)
        draw_weights(self)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """The mean next-token loss; both arguments are `[batch, positions]`."""
        hidden = self.model(input_ids)
        return next_token_loss(F.linear(hidden, self.model.embed_tokens.weight), labels)
