"""Read `moe_config` of a MindFormers file: mixture of experts (MoE)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shardwright.mindformers.keys import Keys

_KEYS_WITHOUT_EFFECT: Mapping[str, str] = {
    "capacity_factor": "no token is dropped",
    "aux_loss_factor": "the loss has no load-balancing term",
    "z_loss_factor": "the loss has no router z-loss term",
}
"""Reasons why keys of `moe_config` have no effect, by key."""


def read_experts(
    section: Keys, config: Keys, family: str, notes: list[str]
) -> tuple[str, dict[str, Any]]:
    """Read the mixture-of-experts options, and choose the model family by experts and QKV biases.

    MindFormers has one LLaMA architecture with options; Shardwright has separate families: Qwen
    (biases), Mixtral (experts) and Qwen-MoE (both).

    Args:
        section: the section `moe_config`.
        config: the section `model.model_config`.
        family: model family of the architecture.
        notes: receives a note for each key without effect.

    Returns:
        The model family with experts, and the fields of `Dimensions` that describe the experts.

    Raises:
        ConfigError: if no supported model has these options.
    """
    num_experts, has_qkv_bias = section.integer("expert_num", 1), config.flag("qkv_has_bias", False)
    if has_qkv_bias and family not in ("llama", "qwen"):
        raise config.error("qkv_has_bias", f"{family} has no QKV biases\nset it to False")
    # DeepSeek has its latent attention read below, also without experts.
    if num_experts == 1 and family not in ("deepseek_v2", "deepseek_v3"):
        return ("qwen" if family == "llama" and has_qkv_bias else family), {}
    if family not in _EXPERT_READERS:
        raise section.error(
            "expert_num", f"{num_experts} experts are not supported for {family}\nset it to 1"
        )
    family, sizes = _EXPERT_READERS[family](section, config)
    for name, reason in _KEYS_WITHOUT_EFFECT.items():
        # 0, like a missing key, asks for nothing.
        if section.number(name, 0.0):
            notes.append(f"moe_config.{name} has no effect: {reason}")
    if section.flag("balance_via_topk_bias", False):
        notes.append(
            "moe_config.balance_via_topk_bias has no effect: the biases of the router stay as they"
            " are loaded, by default 0"
        )
    return family, {
        "num_experts": num_experts,
        "experts_per_token": section.integer("num_experts_chosen", 1),
        **sizes,
    }


def _read_mixtral_or_qwen(section: Keys, config: Keys) -> tuple[str, dict[str, Any]]:
    has_qkv_bias = config.flag("qkv_has_bias", False)
    shared = section.integer("shared_expert_num", 0, minimum=0)
    normalized = section.flag("norm_topk_prob", True)
    if section.integer("first_k_dense_replace", 0, minimum=0):
        raise section.error(
            "first_k_dense_replace", "Mixtral and Qwen have no dense layers\nset it to 0"
        )
    if section.string("topk_method", "greedy") != "greedy":
        raise section.error(
            "topk_method", "Mixtral and Qwen do not route to groups of experts\nset it to greedy"
        )
    if shared and not (has_qkv_bias and section.flag("use_shared_expert_gating", False)):
        raise section.error(
            "shared_expert_num",
            "shared experts need qkv_has_bias and use_shared_expert_gating, as in Qwen\nset both"
            " keys to True",
        )
    if not shared and (has_qkv_bias or not normalized):
        name = "norm_topk_prob" if not normalized else "shared_expert_num"
        raise section.error(
            name, "Mixtral does not support this value\nfor Qwen, set shared_expert_num"
        )
    if not shared:
        return "mixtral", {}
    # `transformers` has one shared expert, as wide as all of them.
    width = shared * config.integer("intermediate_size")
    hf = {"shared_expert_intermediate_size": width, "norm_topk_prob": normalized}
    return "qwen_moe", {"hf": hf}


def _read_deepseek_v2(section: Keys, config: Keys) -> tuple[str, dict[str, Any]]:
    """Read DeepSeek-V2's latent attention, shared experts and leading dense layers."""
    # A missing key means True, as in MindFormers, so that these files must set it.
    if section.flag("norm_topk_prob", True):
        raise section.error(
            "norm_topk_prob",
            "a router with softmax does not normalize expert weights\nset it to False",
        )
    method = section.string("topk_method", "greedy", valid=("greedy", "group_limited_greedy"))
    hf = {"topk_method": method, **_read_deepseek_sizes(section, config)}
    # None is a value: queries without a latent.
    hf["q_lora_rank"] = config.integer("q_lora_rank") if config.has("q_lora_rank") else None
    return "deepseek_v2", {"hf": hf | _read_groups(section, method)}


def _read_deepseek_v3(section: Keys, config: Keys) -> tuple[str, dict[str, Any]]:
    """Read the model family and the experts of a DeepSeek-V3 file.

    With a softmax router, the default of MindFormers, the model is built as DeepSeek-V2.
    """
    if not section.flag("use_gating_sigmoid", False):
        return _read_deepseek_v2(section, config)
    method = section.string("topk_method", "greedy", valid=("greedy", "noaux_tc"))
    hf: dict[str, Any] = {
        **_read_deepseek_sizes(section, config),
        "q_lora_rank": config.integer("q_lora_rank"),
        # Only the rotary dimensions, as in `transformers`.
        "head_dim": config.integer("qk_rope_head_dim"),
        "norm_topk_prob": section.flag("norm_topk_prob", True),
        # With one group, every expert can be chosen.
        "n_group": 1,
        "topk_group": 1,
    }
    return "deepseek_v3", {"hf": hf | _read_groups(section, method)}


def _read_groups(section: Keys, method: str) -> dict[str, Any]:
    # MindFormers ignores the sizes of groups otherwise.
    names = ("n_group", "topk_group") if method != "greedy" else ()
    return {name: section.integer(name) for name in names}


def _read_deepseek_sizes(section: Keys, config: Keys) -> dict[str, Any]:
    if section.flag("use_shared_expert_gating", False):
        raise section.error(
            "use_shared_expert_gating", "DeepSeek has no shared expert gate\nset it to False"
        )
    return {
        "n_shared_experts": section.integer("shared_expert_num"),
        "moe_intermediate_size": section.integer("moe_intermediate_size"),
        "first_k_dense_replace": section.integer("first_k_dense_replace", 0, minimum=0),
        "routed_scaling_factor": section.number("routed_scaling_factor", 1.0, above=0),
        **{name: config.integer(name) for name in _MLA_SIZES},
    }


_MLA_SIZES = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
"""MindFormers keys of the sizes of multi-head latent attention (MLA)."""

_EXPERT_READERS: Mapping[str, Callable[[Keys, Keys], tuple[str, dict[str, Any]]]] = {
    "llama": _read_mixtral_or_qwen,
    "deepseek_v2": _read_deepseek_v2,
    "deepseek_v3": _read_deepseek_v3,
}
"""Readers of MindFormers' `moe_config`, by dense model family; each returns the model family with
experts, and the fields of `Dimensions` that describe the experts."""
