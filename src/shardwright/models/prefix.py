"""Prefix tuning (Li and Liang, 2021) and P-tuning v2 (Liu et al., 2022): trained keys and values,
prepended in every layer of a frozen model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwright.errors import ConfigError


@dataclass(frozen=True)
class PrefixTuning:
    """A prefix tuning configuration.

    Args:
        tokens: length of the prefix.
        projection: hidden width of the MLP that computes keys and values from an embedding, as in
            prefix tuning; None to train keys and values directly, as in P-tuning v2.
        dropout: dropout probability of keys and values.

    Raises:
        ConfigError: a number is not positive, or dropout is not in [0, 1).
    """

    tokens: int = 16
    projection: int | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("tokens", "projection"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise ConfigError(f"prefix tuning: {name}={number} must be positive")
        if not 0 <= self.dropout < 1:
            raise ConfigError(
                f"prefix tuning: dropout={self.dropout} must be at least 0 and below 1"
            )


class Prefixes(nn.Module):
    """The prefix keys and values of all layers. They have no positions: RoPE does not rotate them.

    Args:
        prefix: the configuration.
        layers: number of layers.
        heads: number of key-value heads.
        head_size: size of a head.
    """

    def __init__(self, prefix: PrefixTuning, layers: int, heads: int, head_size: int) -> None:
        super().__init__()
        self.shape = (2 * layers, heads, head_size)
        width = 2 * layers * heads * head_size
        self.embedding = nn.Parameter(torch.empty(prefix.tokens, width))
        nn.init.normal_(self.embedding, std=0.01)
        self.projection: nn.Module = nn.Identity()
        if prefix.projection is not None:
            first, last = (width, prefix.projection), (prefix.projection, width)
            self.projection = nn.Sequential(nn.Linear(*first), nn.Tanh(), nn.Linear(*last))
        self.dropout = nn.Dropout(prefix.dropout)

    def forward(self, batch: int) -> tuple[Tensor, ...]:
        """Compute keys and values.

        Returns:
            Key and value of the first layer, then of the next, each `[batch, heads, tokens, size]`.
        """
        prefixes = self.projection(self.embedding).unflatten(-1, self.shape)
        # Expanded before dropout, so that each sample draws its own mask.
        prefixes = self.dropout(prefixes.expand(batch, *prefixes.shape))
        return prefixes.permute(2, 0, 3, 1, 4).unbind()


def add_prefix(
    layer: int | None, prefixes: tuple[Tensor, ...] | None, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    """Prepend the prefix of `layer` to its keys and values, if there are prefixes."""
    if prefixes is None or layer is None:
        return key, value
    prefix = prefixes[2 * layer : 2 * layer + 2]
    key, value = (torch.cat(pair, 2) for pair in zip(prefix, (key, value), strict=True))
    return key, value
