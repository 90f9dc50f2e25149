"""Read the keys by which TeleChat differs from LLaMA: biases, dropout, tied head, scaled logits."""

from __future__ import annotations

from typing import Any

from shardwright.mindformers.dropout import read_dropout
from shardwright.mindformers.keys import Keys

_DROPOUT_KEYS = ("embed_dropout_prob", "hidden_dropout_prob", "attention_dropout_prob")

TELECHAT_KEYS = (*_DROPOUT_KEYS, "wo_has_bias")
"""Keys with a single supported value in all families except TeleChat."""


def read_telechat(config: Keys) -> tuple[str, dict[str, Any]]:
    """Read TeleChat's own keys of `model.model_config`.

    As in MindFormers, some properties follow from the model's name, the key `net_name`: TeleChat 7B
    ties head and embedding, and the MLP of TeleChat 52B has no bias. TeleChat 2 has no `net_name`.

    Returns:
        The model family, and fields of `Dimensions`.

    Raises:
        ConfigError: if only one of attention and MLP has biases, or a number is invalid.
    """
    name = config.string("net_name")
    mlp_has_bias = name != "telechat_52b"
    if config.flag("wo_has_bias", True) != mlp_has_bias:
        mlp = f"the MLP of {name or 'TeleChat 2'} has {'a' if mlp_has_bias else 'no'} bias"
        raise config.error(
            "wo_has_bias",
            f"attention and MLP both need an output bias, or neither, but {mlp}\nset it to"
            f" {mlp_has_bias}",
        )
    # MindFormers' default is no dropout, also beside a key that is set.
    rates = config.with_defaults(dict.fromkeys(_DROPOUT_KEYS, 0.0))
    sizes: dict[str, Any] = {"dropout": read_dropout(rates, _DROPOUT_KEYS, 0.0)}
    if name == "telechat_7b":
        sizes["hf"] = {"tie_word_embeddings": True}
    if config.flag("use_mup", False):
        # Maximal update parametrization (Yang et al., 2022) divides the logits by the factor of the
        # width.
        factor = config.number("mup_scale_factor", 1.0, above=0)
        sizes["logit_scale"] = config.number("output_mult", 1.0, above=0) / factor
    # Without biases it is LLaMA.
    return ("telechat" if mlp_has_bias else "llama"), sizes
