"""A tiny model of an architecture with a batch to train it on, from its configuration alone."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig

BATCH, LENGTH, VOCABULARY, LABELS, IMAGE = 4, 16, 128, 4, 32

SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim"), 32),
    **dict.fromkeys(("embedding_size", "projection_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "n_inner", "hidden_dim"), 64),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("head_dim", "d_kv", "rotary_dim"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 64),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    "num_experts_per_tok": 2,
    "num_key_value_heads": 2,
    "type_vocab_size": 2,
    "vocab_size": VOCABULARY,
    "num_labels": LABELS,
    "image_size": IMAGE,
    "patch_size": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
"""What configurations call their sizes, and how small they become."""


def model(kind: str, class_name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model in training mode without dropout and random masks, with random weights, and the
    arguments of a call.

    Args:
        kind: `language`, or `image` or `audio` for a classifier.
    """
    torch.manual_seed(0)
    architecture = getattr(transformers, class_name)
    config = shrunk(architecture.config_class())
    net: nn.Module = architecture(config)
    for module in net.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return net.train(), batch(kind, config)


def shrunk(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration itself, and those inside of it, with small sizes."""
    of_heads = isinstance(getattr(config, "num_heads", None), list)  # Of each stage of its own.
    for name, size in SIZES.items():
        with suppress(AttributeError, ValueError):  # It follows from others, or from the layer.
            if type(getattr(config, name)) is int and not (of_heads and name == "embed_dim"):
                setattr(config, name, size)
    if hasattr(config, "kv_lora_rank") and hasattr(config, "num_key_value_heads"):
        config.num_key_value_heads = config.num_attention_heads
    for name, value in list(vars(config).items()):
        if isinstance(value, PretrainedConfig):
            shrunk(value)
        if name == "layer_types" and isinstance(value, list):
            kinds = list(dict.fromkeys(value))
            config.layer_types = (kinds if len(kinds) > 1 else value)[:2]
        if isinstance(value, float) and any(part in name for part in ("drop", "noise")):
            setattr(config, name, 0.0)
    if hasattr(config, "apply_spec_augment"):
        config.apply_spec_augment = False
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0
    return config


def batch(kind: str, config: PretrainedConfig) -> dict[str, Tensor]:
    """Inputs with labels."""
    generator = torch.Generator().manual_seed(0)
    if kind == "language":
        ids = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=generator)
        return {"input_ids": ids, "labels": ids}
    labels = torch.randint(LABELS, (BATCH,), generator=generator)
    options: Any = config
    if kind == "audio":
        return {"input_values": torch.randn(BATCH, 1600, generator=generator), "labels": labels}
    shape = BATCH, getattr(options, "num_channels", 3), IMAGE, IMAGE
    return {"pixel_values": torch.randn(shape, generator=generator), "labels": labels}
