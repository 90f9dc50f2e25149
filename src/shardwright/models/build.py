"""Build language models by name, from dimensions, or from a `transformers` configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from shardwright.errors import ConfigError
from shardwright.models.attention import Attention
from shardwright.models.baichuan import Baichuan
from shardwright.models.decoder import MODEL_TYPES, Decoder, decoder
from shardwright.models.gpt import GPT, PanguAlpha
from shardwright.models.hf_causal_lm import causal_lm
from shardwright.models.lora import LoRA, adapt
from shardwright.models.prefix import PrefixTuning
from shardwright.models.sizes import Dimensions, dimensions

FAMILIES: Mapping[str, Callable[[Dimensions, Attention], nn.Module]] = {
    **dict.fromkeys(MODEL_TYPES, decoder),
    **dict.fromkeys(("baichuan1", "baichuan"), Baichuan),
    "pangualpha": PanguAlpha,
    "gpt": GPT,
}
"""Constructor of the models of each family, by name of the family."""


def build(
    model: str | Dimensions,
    *,
    seq_length: int | None = None,
    num_layers: int | None = None,
    lora: LoRA | None = None,
    prefix: PrefixTuning | None = None,
    attention: Attention = "fused",
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """Build a randomly initialized language model; `net(input_ids, labels)` returns its loss.

    The loss is the mean over all labels other than -100. The model shifts the labels itself, so
    both arguments, `[batch, positions]`, can be the same tensor. Inside `with
    torch.device("meta")`, no memory is allocated.

    Args:
        model: a name in `shardwright.models.MODELS`, or dimensions.
        seq_length: maximum sequence length; by default that of `model`.
        num_layers: number of blocks; by default that of `model`.
        lora: LoRA adapters to add; all other weights are frozen.
        prefix: prefix tuning instead of LoRA; all weights of the model are frozen.
        attention: `fused` (flash attention), or `explicit` (unfused; saves the score matrix for the
            backward pass).
        dtype: dtype of the parameters.

    Raises:
        ConfigError: if the name or family is unknown, the dimensions contradict each other, no
            module matches `lora`, or the family does not support `prefix`.
    """
    sizes = dimensions(model) if isinstance(model, str) else model
    # `replace` checks the changed sizes again.
    sizes = replace(
        sizes,
        seq_length=sizes.seq_length if seq_length is None else seq_length,
        num_layers=sizes.num_layers if num_layers is None else num_layers,
    )
    if sizes.family not in FAMILIES:
        raise ConfigError(f"unknown family={sizes.family!r}\nuse one of {', '.join(FAMILIES)}")
    net = FAMILIES[sizes.family](sizes, _require_valid_attention(attention))
    if prefix is not None:
        _add_prefixes(net, prefix, lora)
    return _add_lora_and_cast(net, lora, dtype)


def build_hf(
    source: str | Path | Mapping[str, Any],
    *,
    lora: LoRA | None = None,
    attention: Attention = "fused",
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """Build a randomly initialized causal language model of `transformers`.

    `net(input_ids, labels)` returns the mean next-token loss; both arguments are
    `[batch, positions]`, and the model shifts the labels itself.

    Args:
        source: path of a `config.json` or of its folder, or the arguments of
            `transformers.AutoConfig.for_model`.
        lora: LoRA adapters to add; all other weights are frozen.
        attention: `fused` (flash attention), or `explicit` (unfused; saves the score matrix).
        dtype: dtype of the parameters.

    Raises:
        ConfigError: if the file or model does not exist, or no module matches `lora`.
    """
    return _add_lora_and_cast(causal_lm(source, _require_valid_attention(attention)), lora, dtype)


def example_batch(
    sizes: Dimensions,
    batch_size: int,
    seq_length: int | None = None,
    device: str | torch.device = "cpu",
) -> tuple[Tensor, Tensor]:
    """Draw random token ids, as `input_ids` and as labels of a language model.

    Args:
        sizes: dimensions with the vocabulary size, and the default of `seq_length`.
        batch_size: number of samples.
        seq_length: tokens per sample; by default that of `sizes`.

    Returns:
        Token ids `[batch_size, seq_length]`, twice.
    """
    shape = (batch_size, sizes.seq_length if seq_length is None else seq_length)
    ids = torch.randint(0, sizes.vocab_size, shape, device=device)
    return ids, ids


def _require_valid_attention(attention: Attention) -> Attention:
    if attention not in get_args(Attention):
        valid = ", ".join(get_args(Attention))
        raise ConfigError(f"unknown attention={attention!r}\nuse one of {valid}")
    return attention


def _add_prefixes(net: nn.Module, prefix: PrefixTuning, lora: LoRA | None) -> None:
    if lora is not None:
        raise ConfigError("`prefix` and `lora` cannot be combined\nset only one of them")
    if not isinstance(net, Decoder):
        raise ConfigError(
            f"prefix: {type(net).__name__} does not support prefix tuning\nuse one of the families"
            f" {', '.join(MODEL_TYPES)}"
        )
    net.tune_prefixes(prefix)


def _add_lora_and_cast(net: nn.Module, lora: LoRA | None, dtype: torch.dtype) -> nn.Module:
    """Add LoRA adapters if `lora` is given, and cast all parameters to `dtype`."""
    # Not with `net.to(dtype)`, which also casts buffers: rotary frequencies need float32.
    if lora is not None:
        net = adapt(net, lora)
    for parameter in net.parameters():
        # In the existing parameters, so that modules that share one still do.
        parameter.data = parameter.data.to(dtype)
    return net
