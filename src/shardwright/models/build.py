"""Language models by name, by their sizes, or by a configuration of `transformers`."""

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
from shardwright.models.hf_causal_lm import causal_lm
from shardwright.models.llama_qwen import llama, qwen
from shardwright.models.lora import LoRA, adapt
from shardwright.models.pangualpha import PanguAlpha
from shardwright.models.sizes import Dimensions, dimensions

_FAMILIES: Mapping[str, Callable[[Dimensions, Attention], nn.Module]] = {
    "llama": llama,
    "qwen": qwen,
    "baichuan": Baichuan,
    "pangualpha": PanguAlpha,
}


def build(
    model: str | Dimensions,
    *,
    seq_length: int | None = None,
    num_layers: int | None = None,
    lora: LoRA | None = None,
    attention: Attention = "fused",
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """A language model with new weights whose call `net(input_ids, labels)` returns its loss.

    The loss is the mean over all targets that are not -100; the model shifts the labels itself, so
    that both arguments, batch × positions, may be one tensor. On the meta device (`with
    torch.device("meta")`) nothing is allocated.

    Args:
        model: a name of `shardwright.models.MODELS`, or sizes.
        seq_length: positions that the model is made for, in place of the published number.
        num_layers: blocks, in place of the published number.
        lora: what is adapted; all other weights are frozen then.
        attention: `fused`, one operator; `masked`, one whose queries may be cut along the sequence;
            or `explicit`, which keeps all scores.
        dtype: of the parameters.

    Raises:
        ConfigError: an unknown name, sizes that do not divide, or nothing to adapt.
    """
    sizes = dimensions(model) if isinstance(model, str) else model
    sizes = replace(
        sizes,
        seq_length=sizes.seq_length if seq_length is None else seq_length,
        num_layers=sizes.num_layers if num_layers is None else num_layers,
    )
    return _finished(_FAMILIES[sizes.family](sizes, _known(attention)), lora, dtype)


def build_hf(
    source: str | Path | Mapping[str, Any],
    *,
    lora: LoRA | None = None,
    attention: Attention = "fused",
    dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """Any causal language model of `transformers` with new weights, called as those of `build`.

    Args:
        source: path of a `config.json` or of its folder, or the arguments of
            `transformers.AutoConfig.for_model`.
        lora, attention, dtype: as of `build`.

    Raises:
        ConfigError: no such file, no such model, or nothing to adapt.
    """
    return _finished(causal_lm(source, _known(attention)), lora, dtype)


def example_batch(
    sizes: Dimensions,
    batch_size: int,
    seq_length: int | None = None,
    device: str | torch.device = "cpu",
) -> tuple[Tensor, Tensor]:
    """Random `input_ids` and the same as labels, batch × positions."""
    shape = (batch_size, sizes.seq_length if seq_length is None else seq_length)
    ids = torch.randint(0, sizes.vocab_size, shape, device=device)
    return ids, ids


def _known(attention: Attention) -> Attention:
    if attention not in get_args(Attention):
        valid = ", ".join(get_args(Attention))
        raise ConfigError(f"attention={attention!r}: valid are {valid}")
    return attention


def _finished(net: nn.Module, lora: LoRA | None, dtype: torch.dtype) -> nn.Module:
    """Adapters added, and all parameters in `dtype`.

    Buffers keep theirs: the frequencies of rotary positions need single precision.
    """
    if lora is not None:
        net = adapt(net, lora)
    for parameter in net.parameters():
        parameter.data = parameter.data.to(dtype)
    return net
