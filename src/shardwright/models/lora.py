"""Low-rank adaptation: small trainable matrices beside frozen ones, by `peft`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from shardwright.errors import ConfigError


@dataclass(frozen=True)
class LoRA:
    """What is adapted, and how strongly.

    Args:
        target_modules: a regular expression for whole module paths, or names of modules (the last
            parts of their paths).
        rank: rank of the added product.
        alpha: the added product is multiplied by `alpha / rank`.
        dropout: probability with which its inputs are dropped.

    Raises:
        ConfigError: rank or alpha is not positive, dropout is no probability below 1, or
            `target_modules` is no regular expression.
    """

    target_modules: str | Sequence[str] = ("q_proj", "k_proj", "v_proj", "o_proj")
    rank: int = 16
    alpha: float = 16
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.rank < 1 or not self.alpha > 0:
            raise ConfigError(f"LoRA: rank={self.rank} and alpha={self.alpha} must be positive")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"LoRA: dropout={self.dropout} must be at least 0 and below 1")
        try:
            re.compile(self.target_modules if isinstance(self.target_modules, str) else "")
        except re.error as error:
            raise ConfigError(
                f"LoRA: target_modules={self.target_modules!r} is no regular expression: {error}"
            ) from None


def adapt(net: nn.Module, lora: LoRA) -> nn.Module:
    """`net` with matrices added to the chosen linear layers in place; only these are trained.

    Raises:
        ConfigError: no module is chosen.
    """
    from peft import LoraConfig, inject_adapter_in_model

    targets = lora.target_modules
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        lora_dropout=lora.dropout,
        target_modules=targets if isinstance(targets, str) else list(targets),
    )
    try:
        adapted = inject_adapter_in_model(config, net)
    except ValueError as error:
        linear = sorted({n.split(".")[-1] for n, m in net.named_modules() if type(m) is nn.Linear})
        raise ConfigError(
            f"LoRA: {error}; linear layers of this model are called {', '.join(linear)}"
        ) from None
    for name, parameter in adapted.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return adapted
