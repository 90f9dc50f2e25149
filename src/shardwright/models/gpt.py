"""GPT-2's architecture (Radford et al., 2019): learned positions, LayerNorm, GELU, a tied head."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from torch import Tensor, nn
from torch.nn import functional as F

from shardwright.models.attention import Attention
from shardwright.models.loss import draw_weights, next_token_loss
from shardwright.models.pangualpha import Activation, PanguBlock, fast_gelu, first_positions
from shardwright.models.sizes import Dimensions

ACTIVATIONS: Mapping[str, Activation] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "fast_gelu": fast_gelu,
}


class GPTBackbone(nn.Module):
    """From token ids to hidden states."""

    def __init__(self, sizes: Dimensions, kind: Attention) -> None:
        super().__init__()
        width = sizes.hidden_size
        self.embed_tokens = nn.Embedding(sizes.vocab_size, width)
        self.embed_positions = nn.Embedding(sizes.seq_length, width)
        self.dropout = nn.Dropout(sizes.dropout)
        self.layers = nn.ModuleList(
            PanguBlock(sizes, kind, ACTIVATIONS[sizes.activation]) for _ in range(sizes.num_layers)
        )
        self.norm = nn.LayerNorm(width, sizes.norm_eps)

    def forward(self, input_ids: Tensor) -> Tensor:
        positions = first_positions(self.embed_positions, input_ids.shape[1])
        x = self.dropout(self.embed_tokens(input_ids) + positions)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class GPT(nn.Module):
    """GPT with its loss."""

    def __init__(self, sizes: Dimensions, kind: Attention) -> None:
        super().__init__()
        self.model = GPTBackbone(sizes, kind)
        draw_weights(self)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """The mean next-token loss; both arguments are `[batch, positions]`."""
        hidden = self.model(input_ids)
        return next_token_loss(F.linear(hidden, self.model.embed_tokens.weight), labels)
