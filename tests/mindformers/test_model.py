"""Which model a file describes."""

from __future__ import annotations

from typing import Any

import pytest

from mindformers.files import run_of
from shardwright.errors import ConfigError
from shardwright.mindformers import LanguageRun
from shardwright.models import Dimensions, PrefixTuning


@pytest.mark.parametrize(
    ("arch", "extra", "family", "positions"),
    [
        ("LlamaForCausalLM", {}, "llama", "rotary"),
        ("LlamaForCausalLM", {"qkv_has_bias": True}, "qwen", "rotary"),
        ("QwenForCausalLM", {"rotary_pct": 1.0, "kv_channels": 8}, "qwen", "rotary"),
        ("TelechatForCausalLM", {}, "telechat", "rotary"),
        ("MixtralForCausalLM", {}, "llama", "rotary"),
        ("InternLM2ForCausalLM", {"type": "InternLM2Config"}, "llama", "rotary"),
        ("Baichuan13BForCausalLM", {}, "baichuan1", "alibi"),
        ("GPT2LMHeadModel", {"hidden_act": "fast_gelu"}, "gpt", "learned"),
        ("Baichuan7BV2ForCausalLM", {}, "baichuan", "rotary"),
        ("Baichuan13BV2ForCausalLM", {}, "baichuan", "alibi"),
        ("PanguAlphaHeadModel", {"ffn_hidden_size": 256}, "pangualpha", "learned"),
    ],
)
def test_the_architecture_gives_family_and_positions(
    arch: str, extra: Any, family: str, positions: str
) -> None:
    changes = {f"model__model_config__{name}": value for name, value in extra.items()}
    sizes = run_of(model__arch__type=arch, **changes).model.sizes
    assert (sizes.family, sizes.positions) == (family, positions)


def model_of(arch: str, config: dict[str, Any], **changes: Any) -> Dimensions:
    said = {f"model__model_config__{name}": value for name, value in config.items()}
    return run_of(model__arch__type=arch, **said, **changes).model.sizes


def test_glm_has_sizes_and_names_of_its_own() -> None:
    renamed: dict[str, Any] = {
        "num_heads": None,
        "vocab_size": None,
        "num_attention_heads": 8,
        "padded_vocab_size": 512,
        "ffn_hidden_size": 96,
        "multi_query_group_num": 2,
        "kv_channels": 8,
        "rope_ratio": 50,
        "layernorm_epsilon": "1e-6",
    }
    sizes = model_of("ChatGLM2ForConditionalGeneration", renamed)
    assert (sizes.family, sizes.num_kv_heads, sizes.vocab_size) == ("glm", 2, 512)
    assert (sizes.intermediate_size, sizes.rope_base, sizes.norm_eps) == (96, 500000, 1e-6)
    assert sizes.hf == {"attention_bias": True}


def test_experts_make_mixtral_or_qwen() -> None:
    routed = {"moe_config__expert_num": 8, "moe_config__num_experts_chosen": 2}
    sizes = model_of("LlamaForCausalLM", {}, **routed)
    assert (sizes.family, sizes.num_experts, sizes.experts_per_token) == ("mixtral", 8, 2)
    shared = {"shared_expert_num": 4, "use_shared_expert_gating": True, "norm_topk_prob": False}
    sizes = model_of(
        "LlamaForCausalLM",
        {"qkv_has_bias": True, "intermediate_size": 64},
        moe_config={"expert_num": 8, "num_experts_chosen": 2, **shared},
    )
    assert sizes.family == "qwen_moe"
    assert sizes.hf == {"shared_expert_intermediate_size": 256, "norm_topk_prob": False}


def test_deepseek_v2_has_latent_attention_and_experts_in_groups() -> None:
    latent = {"kv_lora_rank": 16, "q_lora_rank": 24, "v_head_dim": 8}
    heads = {"qk_rope_head_dim": 4, "qk_nope_head_dim": 8}
    routed = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
    experts = {"shared_expert_num": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
    numbers = {"expert_num": 16, "num_experts_chosen": 3, "routed_scaling_factor": 16.0}
    sizes = model_of(
        "DeepseekV2ForCausalLM",
        {**latent, **heads, "intermediate_size": 96},
        moe_config={**routed, **experts, **numbers, "norm_topk_prob": False},
    )
    assert (sizes.family, sizes.intermediate_size, sizes.num_experts) == ("deepseek_v2", 96, 16)
    assert sizes.experts_per_token == 3
    assert sizes.hf == {
        **latent,
        **heads,
        **routed,
        "n_shared_experts": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 16.0,
    }


LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "v_head_dim": 8}
HEADS = {"qk_rope_head_dim": 4, "qk_nope_head_dim": 8}
SHARED = {"shared_expert_num": 1, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
ROUTED = {"expert_num": 16, "num_experts_chosen": 3, "routed_scaling_factor": 2.5}


def deepseek_v3(moe: dict[str, Any], **changes: Any) -> LanguageRun:
    said = {f"model__model_config__{name}": value for name, value in {**LATENT, **HEADS}.items()}
    moe_config = {**SHARED, **ROUTED, **moe}
    arch = "DeepseekV3ForCausalLM"
    return run_of(model__arch__type=arch, moe_config=moe_config, **said, **changes)


@pytest.mark.parametrize(
    ("moe", "groups", "normalizes"),
    [
        ({}, 1, True),
        # Without the method, the sizes of groups have no effect.
        ({"n_group": 4, "topk_group": 2, "norm_topk_prob": False}, 1, False),
        ({"topk_method": "noaux_tc", "n_group": 4, "topk_group": 1}, 4, True),
    ],
)
def test_deepseek_v3_routes_with_sigmoid(moe: Any, groups: int, normalizes: bool) -> None:
    run = deepseek_v3({"use_gating_sigmoid": True, "balance_via_topk_bias": True, **moe})
    sizes = run.model.sizes
    assert (sizes.family, sizes.num_experts, sizes.experts_per_token) == ("deepseek_v3", 16, 3)
    assert sizes.hf == {
        **LATENT,
        **HEADS,
        "head_dim": 4,
        "n_shared_experts": 1,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "n_group": groups,
        "topk_group": 1,
        "norm_topk_prob": normalizes,
    }
    assert any("balance_via_topk_bias has no effect" in note for note in run.notes)


def test_deepseek_v3_with_softmax_is_deepseek_v2() -> None:
    sizes = deepseek_v3({"norm_topk_prob": False, "n_group": 4}).model.sizes
    assert (sizes.family, sizes.hf["topk_method"]) == ("deepseek_v2", "greedy")
    assert "n_group" not in sizes.hf
    with pytest.raises(ConfigError, match="softmax does not normalize expert weights\nset it to F"):
        deepseek_v3({})


def test_layers_of_multi_token_prediction_are_the_last_and_not_built() -> None:
    stages = {"parallel_config__pipeline_stage": 2, "parallel_config__micro_batch_num": 2}
    changes: Any = {"parallel__parallel_mode": 1, "model__model_config__mtp_depth": 1, **stages}
    moe = {"use_gating_sigmoid": True}
    run = deepseek_v3(moe, model__model_config__offset=[1, 0], **changes)
    assert run.layers == (3, 1)
    assert any("mtp_depth has no effect" in note for note in run.notes)
    with pytest.raises(ConfigError, match="offset: the last stage has only the layers"):
        deepseek_v3(moe, model__model_config__offset=[2, -1], **changes)


def test_telechat_has_dropout_and_by_its_name_a_tied_head_or_no_biases() -> None:
    rates = dict.fromkeys(("embed", "hidden", "attention"), 0.1)
    dropout = {f"{name}_dropout_prob": rate for name, rate in rates.items()}
    first = model_of("TelechatForCausalLM", {"net_name": "telechat_7b", **dropout})
    assert (first.family, first.dropout, first.hf) == (
        "telechat",
        0.1,
        {"tie_word_embeddings": True},
    )
    scaled = {"use_mup": True, "output_mult": 2.0, "mup_scale_factor": 32.0}
    largest = {"net_name": "telechat_52b", "wo_has_bias": False, **scaled}
    last = model_of("TelechatForCausalLM", largest)
    assert (last.family, last.dropout, last.logit_scale, last.hf) == ("llama", 0.0, 1 / 16, {})


@pytest.mark.parametrize(
    ("config", "error"),
    [
        ({"wo_has_bias": False}, "the MLP of TeleChat 2 has a bias\nset it to True"),
        ({"net_name": "telechat_52b"}, "the MLP of telechat_52b has no bias\nset it to False"),
        ({"hidden_dropout_prob": 0.1}, "embed_dropout_prob: dropout rates differ"),
    ],
)
def test_telechat_has_all_biases_or_none_and_one_dropout(config: Any, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        model_of("TelechatForCausalLM", config)


@pytest.mark.parametrize(
    ("arch", "pet", "prefix"),
    [
        (
            "LlamaForCausalLM",
            {
                "pet_type": "prefixtuning",
                "prefix_token_num": 16,
                "mid_dim": 512,
                "dropout_rate": 0.01,
            },
            PrefixTuning(16, 512, 0.01),
        ),
        (
            "LlamaForCausalLM",
            {"pet_type": "ptuning2", "pre_seq_len": 16, "prefix_projection": True},
            PrefixTuning(16, 128, 0.01),
        ),
        ("ChatGLM2WithPtuning2", {"dropout_prob": 0.0}, PrefixTuning(128)),
    ],
)
def test_prefixes_are_trained_beside_frozen_weights(
    arch: str, pet: dict[str, Any], prefix: PrefixTuning
) -> None:
    found = run_of(model__arch__type=arch, model__model_config__pet_config=pet).model.adaptation
    assert (found.prefix, found.lora) == (prefix, None)


def test_weights_that_are_not_frozen_bear_the_names_that_they_have_here() -> None:
    pet = {"target_modules": ".*wq", "freeze_exclude": ["*wte*", "*lm_head*", "*.wo.*"]}
    lora = run_of(model__model_config__pet_config=pet).model.adaptation.lora
    assert lora is not None
    assert lora.trained == ["*embed_tokens*", "*lm_head*", "*.o_proj.*"]


@pytest.mark.parametrize(
    ("arch", "base", "note"),
    [
        ("LlamaForCausalLM", 5e5, "rotary_emb_base has no effect: LlamaConfig has theta 500000"),
        ("QwenForCausalLM", 2e4, "theta has no effect: QwenConfig has rotary_emb_base 20000"),
    ],
)
def test_keys_of_another_configuration_have_no_effect(arch: str, base: float, note: str) -> None:
    channels = {} if arch == "QwenForCausalLM" else {"kv_channels": 16}
    config = {"theta": 5e5, "rotary_emb_base": 2e4, **channels}
    run = run_of(
        **{f"model__model_config__{n}": v for n, v in config.items()}, model__arch__type=arch
    )
    assert run.model.sizes.rope_base == base
    assert any(note in each for each in run.notes)


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("method", "factor", "base", "rotary"),
    [
        ("NTK", 4.0, 40000.0, {}),
        ("PI", 4.0, 10000.0, {"rope_type": "linear", "factor": 4.0}),
        ("LLAMA3", LLAMA3, 10000.0, {"rope_type": "llama3", **LLAMA3}),
    ],
)
def test_positions_are_extended(method: str, factor: Any, base: float, rotary: Any) -> None:
    extended = {"extend_method": method, "scaling_factor": factor}
    sizes = model_of("LlamaForCausalLM", extended)
    assert (sizes.rope_base, sizes.hf.get("rope_parameters", {})) == (base, rotary)


def test_layers_that_are_adapted_bear_the_names_that_they_have_here() -> None:
    pet = {"pet_type": "lora", "lora_rank": 8, "target_modules": ".*wq|.*w1|.*mlp.w2"}
    lora = run_of(model__model_config__pet_config=pet).model.adaptation.lora
    assert lora is not None
    assert lora.target_modules == ".*q_proj|.*gate_proj|.*mlp.down_proj"
    assert (lora.rank, lora.alpha, lora.dropout) == (8, 16, 0.0)
    assert run_of().model.adaptation.lora is None
    merged = run_of(
        model__model_config__pet_config={"target_modules": ".*query_key_value*"},
        model__arch__type="ChatGLM2ForConditionalGeneration",
    )
    assert merged.model.adaptation.lora is not None
    assert merged.model.adaptation.lora.target_modules == ".*(?:q_proj|k_proj|v_proj)"
    assert any("have separate adapters" in note for note in merged.notes)


def test_half_precision_is_bfloat16_and_that_is_noted() -> None:
    run = run_of(model__model_config__compute_dtype="float16")
    assert (run.model.compute_dtype, run.model.param_dtype) == ("bfloat16", "float32")
    assert any("compute_dtype is bfloat16" in note for note in run.notes)


def test_attention_is_fused_where_it_is_asked_for() -> None:
    assert run_of(model__model_config__use_flash_attention=True).model.attention == "fused"
    assert run_of().model.attention == "explicit"


def test_dropout_in_pangualpha_is_one_rate() -> None:
    changes: Any = {"model__arch__type": "PanguAlphaHeadModel"}
    assert run_of(**changes).model.sizes.dropout == 0.1
    changes["model__model_config__hidden_dropout_rate"] = 0.0
    assert run_of(**changes).model.sizes.dropout == 0.0
