"""Prefix tuning (Li and Liang, 2021) and P-tuning v2 (Liu et al., 2022).

Both prepend trained keys and values in every layer of a frozen model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwright.errors import ConfigError


@dataclass(frozen=True)
class PrefixTuning:
    """A prefix tuning configuration.

    Args:
        tokens: length of the prefix in tokens.
        projection: hidden width of the MLP that computes keys and values from an embedding, as in
            prefix tuning; None to train keys and values directly, as in P-tuning v2.
        dropout: dropout probability of keys and values.

    Raises:
        ConfigError: if a number is not positive, or dropout is not in [0, 1).
    """

    tokens: int = 16
    projection: int | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("tokens", "projection"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"prefix tuning: {name}={value} is not positive\nuse at least 1")
        if not 0 <= self.dropout < 1:
            raise ConfigError(
                f"prefix tuning: dropout={self.dropout} is not in [0, 1)\nuse for example 0.1"
            )


class Prefixes(nn.Module):
    """Trained prefix keys and values of all layers; RoPE does not rotate them.

    Args:
        layers: number of layers.
        heads: number of key-value heads.
        head_size: size of a head.
    """

    def __init__(self, prefix: PrefixTuning, layers: int, heads: int, head_size: int) -> None:
        super().__init__()
        # A key and a value for each layer.
        self.shape = (2 * layers, heads, head_size)
        width = 2 * layers * heads * head_size
        self.embedding = nn.Parameter(torch.empty(prefix.tokens, width))
        nn.init.normal_(self.embedding, std=0.01)
        self.projection: nn.Module = nn.Identity()
        if prefix.projection is not None:
            first, last = (width, prefix.projection), (prefix.projection, width)
            # The MLP through which prefix tuning trains its keys and values (Li and Liang, 2021).
            self.projection = nn.Sequential(nn.Linear(*first), nn.Tanh(), nn.Linear(*last))
        self.dropout = nn.Dropout(prefix.dropout)

    def forward(self, batch: int) -> tuple[Tensor, ...]:
        """Compute the keys and values of all layers.

        Args:
            batch: number of samples.

        Returns:
            Key and value of the first layer, then of the next, each `[batch, heads, tokens, size]`.
        """
        prefixes = self.projection(self.embedding).unflatten(-1, self.shape)
        # Expanded before dropout, so that each sample draws its own mask.
        prefixes = self.dropout(prefixes.expand(batch, *prefixes.shape))
        # From `[batch, tokens, 2 · layers, heads, size]` to 2 · layers of `[batch, heads, tokens,
        # size]`.
        return prefixes.permute(2, 0, 3, 1, 4).unbind()


def add_prefix(
    layer: int | None, prefixes: tuple[Tensor, ...] | None, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    """Prepend the prefix of a layer to its keys and values; no change without prefixes.

    Args:
        layer: index of the layer.
        prefixes: key and value of the first layer, then of the next; empty without a prefix.
        key, value: `[batch, heads, positions, size]`.
    """
    if prefixes is None or layer is None:
        return key, value
    prefix = prefixes[2 * layer : 2 * layer + 2]
    key, value = (torch.cat(pair, 2) for pair in zip(prefix, (key, value), strict=True))
    return key, value
