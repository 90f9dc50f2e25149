"""LLaMA, TeleChat, Qwen, GLM, Mixtral and DeepSeek, built from decoders of `transformers`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import ConfigError, needs_extra
from shardwright.models.attention import Attention, register_with_transformers
from shardwright.models.dropout import add_dropout
from shardwright.models.loss import next_token_loss
from shardwright.models.prefix import Prefixes, PrefixTuning
from shardwright.models.sizes import Dimensions


class Decoder(nn.Module):
    """A decoder of `transformers` with its language model head and loss.

    Parameters are named as in `transformers`, so that checkpoints of `transformers` can be loaded.

    Args:
        model: maps `input_ids` to hidden states.
        lm_head: maps hidden states to logits.
        logit_scale: factor of the logits.
    """

    def __init__(self, model: nn.Module, lm_head: nn.Module, logit_scale: float = 1.0) -> None:
        super().__init__()
        self.model = model
        self.lm_head = lm_head
        self.logit_scale = logit_scale
        self.prefix_tuning: Prefixes | None = None

    def tune_prefixes(self, prefix: PrefixTuning) -> None:
        """Add a trained prefix to each layer, and freeze all other weights.

        Raises:
            ConfigError: if the model has multi-head latent attention, whose keys and values have
                different sizes.
        """
        config: Any = self.model.config
        if hasattr(config, "kv_lora_rank"):
            raise ConfigError(
                "prefix: multi-head latent attention (DeepSeek) is not supported\nuse LoRA"
            )
        # The prefixes are added afterwards, and stay trained.
        self.requires_grad_(False)
        layers, heads = config.num_hidden_layers, config.num_key_value_heads
        self.prefix_tuning = Prefixes(prefix, layers, heads, config.head_dim)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """Compute the mean next-token loss; both arguments are `[batch, positions]`."""
        # A cache of keys and values only serves generation.
        options: dict[str, Any] = {"use_cache": False}
        if self.prefix_tuning is not None:
            # `transformers` passes further options on to the attention function.
            options["prefixes"] = self.prefix_tuning(input_ids.shape[0])
        hidden = self.model(input_ids=input_ids, **options).last_hidden_state
        logits = self.lm_head(hidden)
        # Without an operator that changes nothing.
        return next_token_loss(
            logits if self.logit_scale == 1 else logits * self.logit_scale, labels
        )


def decoder(sizes: Dimensions, attention: Attention) -> Decoder:
    """Build the decoder of a model family from the classes of `transformers`.

    Qwen 1 is built as Qwen 2 without grouped-query attention; published Qwen 1 checkpoints store
    query, key and value projections as one tensor.

    Raises:
        ConfigError: if `sizes.hf` has an argument that the configuration class does not have, or a
            model with experts has dropout.
    """
    with needs_extra(
        "transformers", f"the model family {sizes.family} needs `transformers`", ConfigError
    ):
        from transformers import AutoConfig
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    model_type, expert_arguments = MODEL_TYPES[sizes.family]
    # Checked here, because `transformers` ignores unknown arguments.
    # `head_dim` is set for every family below.
    valid_arguments = {*AutoConfig.for_model(model_type).to_dict(), "head_dim"}
    if unknown := sorted(set(sizes.hf) - valid_arguments):
        raise ConfigError(
            f"hf: the configuration of {model_type} has no argument {', '.join(unknown)}\n"
            "remove it from `hf`"
        )
    if sizes.dropout and expert_arguments:
        raise ConfigError(f"dropout={sizes.dropout}: {sizes.family} has no dropout\nset it to 0.0")
    expert_sizes = (sizes.num_experts, sizes.experts_per_token, sizes.intermediate_size)
    arguments = {
        **_make_hf_config_arguments(sizes, attention),
        # Dense families take none of the experts' sizes.
        **dict(zip(expert_arguments, expert_sizes, strict=False)),
    }
    config = AutoConfig.for_model(model_type, **arguments)
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    net = model_class(config)
    _fuse_norms(net)
    if sizes.family == "telechat":
        _add_telechat_biases(net)
    if sizes.dropout:
        add_dropout(net.model, sizes.dropout)
    # Without the model's own class, whose loss `Decoder` replaces.
    return Decoder(net.model, net.lm_head, sizes.logit_scale)


MODEL_TYPES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "llama": ("llama", ()),
    "telechat": ("llama", ()),
    "qwen": ("qwen2", ()),
    "qwen3": ("qwen3", ()),
    "glm": ("glm", ()),
    "mixtral": ("mixtral", ("num_local_experts", "num_experts_per_tok")),
    "qwen_moe": ("qwen2_moe", ("num_experts", "num_experts_per_tok", "moe_intermediate_size")),
    "qwen3_moe": ("qwen3_moe", ("num_experts", "num_experts_per_tok", "moe_intermediate_size")),
    "deepseek_v3": ("deepseek_v3", ("n_routed_experts", "num_experts_per_tok")),
    "deepseek_v2": ("deepseek_v2", ("n_routed_experts", "num_experts_per_tok")),
}
"""For each model family: `model_type` of `transformers`, and the names of its configuration
arguments for the number of experts, experts per token and expert width."""


def _make_hf_config_arguments(sizes: Dimensions, attention: Attention) -> dict[str, Any]:
    rotary = {"rope_type": "default", "rope_theta": sizes.rope_base}
    return {
        "hidden_size": sizes.hidden_size,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_size,
        "intermediate_size": sizes.intermediate_size,
        "vocab_size": sizes.vocab_size,
        "max_position_embeddings": sizes.seq_length,
        "rms_norm_eps": sizes.norm_eps,
        "tie_word_embeddings": False,
        # With a padding token, its row of the embedding would get no gradient.
        "pad_token_id": None,
        "attn_implementation": register_with_transformers(attention),
        **({"attention_dropout": sizes.dropout} if sizes.dropout else {}),
        # May override all arguments above; rotary parameters are merged below.
        **sizes.hf,
        "rope_parameters": {**rotary, **sizes.hf.get("rope_parameters", {})},
    }


def _add_telechat_biases(net: nn.Module) -> None:
    """Add biases to the output projections of attention and MLP, as TeleChat has."""
    for name, module in net.named_modules():
        if isinstance(module, nn.Linear) and name.endswith(("o_proj", "down_proj")):
            module.bias = nn.Parameter(torch.zeros(module.out_features))


def _fuse_norms(net: nn.Module) -> None:
    """Replace the RMSNorm modules of `transformers` with fused ones.

    RMSNorm of `transformers` consists of eight operators, which save five tensors for the backward
    pass; the fused operator saves one.
    """
    # A list, because the loop replaces modules.
    norms: list[tuple[str, Any]] = [
        (name, module) for name, module in net.named_modules() if _is_rms_norm(module)
    ]
    for name, composed_norm in norms:
        parent, _, attribute = name.rpartition(".")
        weight: torch.Tensor = composed_norm.weight
        # On the meta device, as the existing weight takes the place of the new one.
        with torch.device("meta"):
            norm = nn.RMSNorm(weight.shape[0], composed_norm.variance_epsilon)
        # The tensor of the old norm, so that its values, or its place on the meta device, stay.
        norm.weight = nn.Parameter(weight)
        setattr(net.get_submodule(parent), attribute, norm)


def _is_rms_norm(module: nn.Module) -> bool:
    # By name, as each model of `transformers` has an RMSNorm class of its own.
    return type(module).__name__.endswith("RMSNorm")
