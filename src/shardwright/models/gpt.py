"""GPT-2 (Radford et al., 2019) and PanguAlpha (Zeng et al., 2021).

Both have learned positions, LayerNorm and tied embeddings. PanguAlpha ends with a query layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.errors import ConfigError
from shardwright.models.attention import Attention, causal_attention
from shardwright.models.loss import draw_weights, next_token_loss
from shardwright.models.sizes import Dimensions

Activation = Callable[[Tensor], Tensor]


def fast_gelu(x: Tensor) -> Tensor:
    """Apply the sigmoid approximation of GELU (Hendrycks and Gimpel, 2016)."""
    # With 1.702, the logistic function approximates the distribution function of the normal.
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "fast_gelu": fast_gelu,
}


class GPTAttention(nn.Module):
    """Multi-head attention whose queries come from `x`, or from `queries` if given."""

    def __init__(self, sizes: Dimensions, attention: Attention) -> None:
        super().__init__()
        self.heads, self.scale, self.attention = sizes.num_heads, sizes.head_size**-0.5, attention
        self.dropout = sizes.dropout
        width = sizes.hidden_size
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.o_proj = nn.Linear(width, width)

    def forward(self, x: Tensor, queries: Tensor | None = None) -> Tensor:
        """Compute attention over the positions of `x`.

        Args:
            x: `[batch, positions, width]`, input of the key and value projections.
            queries: input of the query projection, by default `x`; `[positions, width]` if all
                samples share it.

        Returns:
            `[batch, positions, width]`.
        """
        query = self.q_proj(x if queries is None else queries)
        query, key, value = (
            projected.unflatten(-1, (self.heads, -1)).transpose(-2, -3)
            for projected in (query, self.k_proj(x), self.v_proj(x))
        )
        # The function takes a probability and does not know the mode of the module.
        dropout = self.dropout if self.training else 0.0
        # The queries of PanguAlpha's query layer have no batch dimension.
        query = query.expand(key.shape)
        attended = causal_attention(self.attention, query, key, value, self.scale, dropout)
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class GPTFeedForward(nn.Module):
    """Two linear layers with an activation in between."""

    def __init__(self, sizes: Dimensions, activation: Activation) -> None:
        super().__init__()
        self.activation = activation
        self.up_proj = nn.Linear(sizes.hidden_size, sizes.intermediate_size)
        self.down_proj = nn.Linear(sizes.intermediate_size, sizes.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.up_proj(x)))


class GPTBlock(nn.Module):
    """A pre-norm transformer block; PanguAlpha's query layer if called with `queries`."""

    def __init__(self, sizes: Dimensions, attention: Attention, activation: Activation) -> None:
        super().__init__()
        self.self_attn = GPTAttention(sizes, attention)
        self.mlp = GPTFeedForward(sizes, activation)
        self.input_layernorm = nn.LayerNorm(sizes.hidden_size, sizes.norm_eps)
        self.post_attention_layernorm = nn.LayerNorm(sizes.hidden_size, sizes.norm_eps)
        self.dropout = nn.Dropout(sizes.dropout)

    def forward(self, x: Tensor, queries: Tensor | None = None) -> Tensor:
        x = x + self.dropout(self.self_attn(self.input_layernorm(x), queries))
        return x + self.dropout(self.mlp(self.post_attention_layernorm(x)))


class GPTBackbone(nn.Module):
    """Backbone from token ids `[batch, positions]` to hidden states `[batch, positions, width]`."""

    def __init__(
        self, sizes: Dimensions, attention: Attention, num_blocks: int, activation: Activation
    ) -> None:
        super().__init__()
        width = sizes.hidden_size
        self.embed_tokens = nn.Embedding(sizes.vocab_size, width)
        self.embed_positions = nn.Embedding(sizes.seq_length, width)
        self.dropout = nn.Dropout(sizes.dropout)
        self.layers = nn.ModuleList(
            GPTBlock(sizes, attention, activation) for _ in range(num_blocks)
        )
        self.norm = nn.LayerNorm(width, sizes.norm_eps)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Compute hidden states `[batch, positions, width]` of tokens `[batch, positions]`.

        Raises:
            ConfigError: if the sequence is longer than the model's `seq_length`.
        """
        positions, limit = input_ids.shape[1], self.embed_positions.num_embeddings
        if positions > limit:
            raise ConfigError(
                f"the sequence has {positions} positions, but the model only has {limit}\nshorten"
                " the sequence, or build the model with a larger `seq_length`"
            )
        # A slice instead of a look-up, because positions are equal in all samples.
        x = self.embed_tokens(input_ids) + self.embed_positions.weight[:positions]
        x = self.dropout(x)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class PanguBackbone(GPTBackbone):
    """Backbone of PanguAlpha, whose last block is the query layer."""

    def __init__(self, sizes: Dimensions, attention: Attention) -> None:
        # The query layer is one of the `num_layers`.
        super().__init__(sizes, attention, sizes.num_layers - 1, fast_gelu)
        self.embed_queries = nn.Embedding(sizes.seq_length, sizes.hidden_size)
        self.query_layer = GPTBlock(sizes, attention, fast_gelu)

    def forward(self, input_ids: Tensor) -> Tensor:
        # The query layer reads the normalized output of the other blocks.
        hidden = super().forward(input_ids)
        return self.query_layer(hidden, self.embed_queries.weight[: input_ids.shape[1]])


class GPT(nn.Module):
    """GPT-2 with a `forward` that returns the loss."""

    def __init__(self, sizes: Dimensions, attention: Attention) -> None:
        super().__init__()
        self.model = self.backbone(sizes, attention)
        draw_weights(self)

    @staticmethod
    def backbone(sizes: Dimensions, attention: Attention) -> GPTBackbone:
        return GPTBackbone(sizes, attention, sizes.num_layers, ACTIVATIONS[sizes.activation])

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Compute the mean next-token loss; both arguments are `[batch, positions]`."""
        hidden = self.model(input_ids)
        # Tied: the table of token embeddings is the head.
        return next_token_loss(F.linear(hidden, self.model.embed_tokens.weight), labels)


class PanguAlpha(GPT):
    """PanguAlpha with a `forward` that returns the loss."""

    backbone = staticmethod(PanguBackbone)
