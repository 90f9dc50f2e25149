"""LoRA (Hu et al., 2021) with `peft`: small trainable matrices beside frozen weights."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from shardwright.errors import ConfigError, needs_extra


@dataclass(frozen=True)
class LoRA:
    """A LoRA configuration.

    Args:
        target_modules: linear layers that get adapters: a regular expression for full module paths,
            or module names (the last component of their paths).
        rank: rank of the adapters' two matrices.
        alpha: numerator of `alpha / rank`, the scale of the adapters' outputs.
        dropout: dropout probability of the adapters' inputs.
        trained: name patterns of further parameters to train, for example `*lm_head*`.

    Raises:
        ConfigError: if rank or alpha is not positive, dropout is not in [0, 1), or `target_modules`
            is not a valid regular expression.
    """

    target_modules: str | Sequence[str] = ("q_proj", "k_proj", "v_proj", "o_proj")
    rank: int = 16
    alpha: float = 16
    dropout: float = 0.0
    trained: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.rank < 1 or not self.alpha > 0:
            raise ConfigError(
                f"LoRA: rank={self.rank} or alpha={self.alpha} is not positive\n"
                "use for example rank=8 and alpha=16"
            )
        if not 0 <= self.dropout < 1:
            raise ConfigError(
                f"LoRA: dropout={self.dropout} is not in [0, 1)\nuse for example dropout=0.1"
            )
        try:
            # A list has names of modules, which are no expressions.
            re.compile(self.target_modules if isinstance(self.target_modules, str) else "")
        except re.error as error:
            raise ConfigError(
                f"LoRA: target_modules={self.target_modules!r} is not a valid regular expression:"
                f" {error}\nuse a Python regular expression, or a list of module names"
            ) from None


def adapt(net: nn.Module, lora: LoRA) -> nn.Module:
    """Add adapters to the matching linear layers of `net`, in place, and freeze other parameters.

    Raises:
        ConfigError: if `target_modules` matches no module, or a pattern in `trained` no parameter.
    """
    with needs_extra("transformers", "LoRA needs `peft`", ConfigError):
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
    # `peft` raises ValueError if no module matches.
    except ValueError as error:
        linear = sorted({n.split(".")[-1] for n, m in net.named_modules() if type(m) is nn.Linear})
        raise ConfigError(
            f"LoRA: {error}\nuse target modules of this model: {', '.join(linear)}"
        ) from None
    parameters = dict(adapted.named_parameters())
    for pattern in lora.trained:
        if not fnmatch.filter(parameters, pattern):
            raise ConfigError(
                f"LoRA: trained={pattern!r} matches no parameter\n"
                "use patterns of full parameter names, for example '*lm_head*'"
            )
    for name, parameter in parameters.items():
        is_trained = any(fnmatch.fnmatch(name, pattern) for pattern in lora.trained)
        # `peft` names the parameters of adapters `lora_A` and `lora_B`.
        parameter.requires_grad_("lora_" in name or is_trained)
    return adapted
