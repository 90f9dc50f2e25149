"""Prefix tuning (Li and Liang, 2021) and P-tuning v2 (Liu et al., 2022): every layer of a frozen
model reads trained keys and values before its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardwright.errors import ConfigError


@dataclass(frozen=True)
class PrefixTuning:
    """The trained keys and values.

    Args:
        tokens: how many each layer reads before its own.
        projection: width of the MLP that computes those of all layers from an embedding, as in
            prefix tuning; None if they are trained themselves, as in P-tuning v2.
        dropout: dropout probability of keys and values.

    Raises:
        ConfigError: a number is not positive, or dropout not in [0, 1).
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
    """The keys and values of all layers, which have no positions: they are not rotated."""

    def __init__(self, prefix: PrefixTuning, layers: int, heads: int, head_size: int) -> None:
        super().__init__()
        self.form = (2 * layers, heads, head_size)
        width = 2 * layers * heads * head_size
        self.embedding = nn.Parameter(torch.empty(prefix.tokens, width))
        nn.init.normal_(self.embedding, std=0.01)
        self.projection: nn.Module = nn.Identity()
        if prefix.projection is not None:
            first, last = (width, prefix.projection), (prefix.projection, width)
            self.projection = nn.Sequential(nn.Linear(*first), nn.Tanh(), nn.Linear(*last))
        self.dropout = nn.Dropout(prefix.dropout)

    def forward(self, batch: int) -> tuple[Tensor, ...]:
        """Keys and values of the first layer, then of the next: `[batch, heads, tokens, size]`."""
        prefixes = self.projection(self.embedding).unflatten(-1, self.form)
        # Each sample drops others.
        prefixes = self.dropout(prefixes.expand(batch, *prefixes.shape))
        return prefixes.permute(2, 0, 3, 1, 4).unbind()


def add_prefix(
    layer: int | None, prefixes: tuple[Tensor, ...] | None, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor]:
    """The keys and values that a layer reads: its own, after its prefixes if there are any."""
    if prefixes is None or layer is None:
        return key, value
    before = prefixes[2 * layer : 2 * layer + 2]
    key, value = (torch.cat(pair, 2) for pair in zip(before, (key, value), strict=True))
    return key, value
