"""LLaMA, TeleChat, Qwen, GLM, Mixtral and DeepSeek-V2: the decoders of `transformers`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import ConfigError, needs_extra
from shardwright.models.attention import Attention, register_with_transformers
from shardwright.models.loss import next_token_loss
from shardwright.models.prefix import Prefixes, PrefixTuning
from shardwright.models.sizes import Dimensions


class Decoder(nn.Module):
    """A decoder of `transformers` with its head and loss.

    Parameters have the same names as in `transformers`, so its checkpoints can be loaded.

    Args:
        model: from `input_ids` to hidden states.
        lm_head: from hidden states to logits.
    """

    def __init__(self, model: nn.Module, lm_head: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.lm_head = lm_head
        self.prefix_tuning: Prefixes | None = None

    def tune_prefixes(self, prefix: PrefixTuning) -> None:
        """Adds keys and values, beside which nothing is trained.

        Raises:
            ConfigError: the model has latent attention, whose keys and values differ in size.
        """
        config: Any = self.model.config
        if hasattr(config, "kv_lora_rank"):
            raise ConfigError("prefix: models with latent attention take none")
        self.requires_grad_(False)
        layers, heads = config.num_hidden_layers, config.num_key_value_heads
        self.prefix_tuning = Prefixes(prefix, layers, heads, config.head_dim)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        """The mean next-token loss; both arguments are `[batch, positions]`."""
        options: dict[str, Any] = {"use_cache": False}
        if self.prefix_tuning is not None:
            options["prefixes"] = self.prefix_tuning(input_ids.shape[0])
        hidden = self.model(input_ids=input_ids, **options).last_hidden_state
        return next_token_loss(self.lm_head(hidden), labels)


def decoder(sizes: Dimensions, attention: Attention) -> Decoder:
    """A decoder of `transformers`, which has the configuration and the code of its family.

    Qwen 1 is built as Qwen 2 with as many key-value heads as query heads; it stores its queries,
    keys and values as one tensor.

    Raises:
        ConfigError: the configuration has no such argument.
    """
    with needs_extra(
        "transformers", f"the model family {sizes.family} needs transformers", ConfigError
    ):
        from transformers import AutoConfig
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    model_type, experts = MODEL_TYPES[sizes.family]
    known = AutoConfig.for_model(model_type).to_dict()
    if unknown := sorted(set(sizes.hf) - set(known)):
        raise ConfigError(f"hf: the configuration of {model_type} has no {', '.join(unknown)}")
    numbers = (sizes.num_experts, sizes.experts_per_token, sizes.intermediate_size)
    arguments = {**_arguments(sizes, attention), **dict(zip(experts, numbers, strict=False))}
    config = AutoConfig.for_model(model_type, **arguments)
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    net = kind(config)
    _fuse_norms(net)
    if sizes.family == "telechat":
        _add_biases(net)
    return Decoder(net.model, net.lm_head)


MODEL_TYPES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "llama": ("llama", ()),
    "telechat": ("llama", ()),
    "qwen": ("qwen2", ()),
    "glm": ("glm", ()),
    "mixtral": ("mixtral", ("num_local_experts", "num_experts_per_tok")),
    "qwen_moe": ("qwen2_moe", ("num_experts", "num_experts_per_tok", "moe_intermediate_size")),
    "deepseek_v2": ("deepseek_v2", ("n_routed_experts", "num_experts_per_tok")),
}
"""By family its name in `transformers`, and those of the number of experts, of those that a token
chooses, and of their width."""


def _arguments(sizes: Dimensions, attention: Attention) -> dict[str, Any]:
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
        "pad_token_id": None,
        "attn_implementation": register_with_transformers(attention),
        **sizes.hf,
        "rope_parameters": {**rotary, **sizes.hf.get("rope_parameters", {})},
    }


def _add_biases(net: nn.Module) -> None:
    """TeleChat is LLaMA with biases of the layers that add to the residual stream."""
    for name, module in net.named_modules():
        if isinstance(module, nn.Linear) and name.endswith(("o_proj", "down_proj")):
            module.bias = nn.Parameter(torch.zeros(module.out_features))


def _fuse_norms(net: nn.Module) -> None:
    """Replaces RMSNorm, which `transformers` composes of eight operators, by a fused one, for which
    autograd saves one tensor instead of five."""
    norms: list[tuple[str, Any]] = [(n, m) for n, m in net.named_modules() if _is_rms_norm(m)]
    for name, composed in norms:
        owner, _, attribute = name.rpartition(".")
        weight: torch.Tensor = composed.weight
        with torch.device("meta"):
            norm = nn.RMSNorm(weight.shape[0], composed.variance_epsilon)
        norm.weight = nn.Parameter(weight)
        setattr(net.get_submodule(owner), attribute, norm)


def _is_rms_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("RMSNorm")
