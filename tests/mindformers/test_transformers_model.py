"""Files without `model.arch`: the keys of a `transformers` configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mindformers.files import small
from shardwright.errors import ConfigError
from shardwright.mindformers import LanguageRun, language_run, translate_run
from shardwright.models import build

QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 320,
    "max_position_embeddings": 64,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}
QWEN3_MOE = QWEN3 | {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
}
DEEPSEEK3 = {key: value for key, value in QWEN3.items() if key != "head_dim"} | {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 8,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_nextn_predict_layers": 1,
}


def newer(model_config: dict[str, Any], **changes: Any) -> LanguageRun:
    content = small(**changes) | {"model": {"model_config": model_config}, "use_legacy": False}
    return language_run(content, "small.yaml")


@pytest.mark.parametrize("config", [QWEN3, QWEN3_MOE, DEEPSEEK3], ids=lambda c: c["model_type"])
def test_the_model_is_that_of_transformers(config: dict[str, Any]) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        ours = build(newer(config).model.sizes)
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    shapes = {name: each.shape for name, each in ours.named_parameters()}
    assert shapes == {name: each.shape for name, each in theirs.named_parameters()}
    used, expected = ours.model.config.to_dict(), theirs.config.to_dict()  # type: ignore[union-attr]
    same = ("hidden_act", "rms_norm_eps", "norm_topk_prob", "routed_scaling_factor", "head_dim")
    assert all(used.get(name) == expected.get(name) for name in same)
    assert used["rope_parameters"]["rope_theta"] == 1e6


def test_keys_of_the_file_override_the_pretrained_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    model_config = {"num_hidden_layers": 2, "params_dtype": "bfloat16", "hidden_act": "swiglu"}
    handlers = [{"type": "take"}, {"type": "PackingHandler", "seq_length": 48}]
    run = newer(
        model_config,
        pretrained_model_dir=str(tmp_path),
        train_dataset={"data_loader": {"handler": handlers}},
    )
    sizes = run.model.sizes
    assert (sizes.family, sizes.num_layers, sizes.seq_length) == ("qwen3", 2, 48)
    assert (run.model.param_dtype, run.model.attention) == ("bfloat16", "fused")
    assert not [name for name in run.unused if name.startswith("model.")]


def test_architectures_name_the_model_and_other_losses_have_notes() -> None:
    config = DEEPSEEK3 | {"architectures": ["DeepseekV3ForCausalLM"]}
    del config["model_type"]
    run = newer(config)
    assert run.model.sizes.family == "deepseek_v3"
    assert "num_nextn_predict_layers has no effect: the loss has no term of" in run.notes[0]
    scaled = newer(QWEN3_MOE | {"routed_scaling_factor": 1.5})
    assert "routed_scaling_factor has no effect: the router of this model" in scaled.notes[0]


def test_rope_scaling_is_that_of_transformers() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    parameters = newer(QWEN3 | {"rope_scaling": scaling}).model.sizes.hf["rope_parameters"]
    assert parameters == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    }


def test_experts_are_divided_over_data_and_model_parallel_devices() -> None:
    degrees = {"data_parallel": 2, "model_parallel": 2, "expert_parallel": 4}
    run = newer(QWEN3_MOE, parallel__parallel_mode=1, parallel_config=degrees)
    expert = translate_run(run, devices=4).parallel.expert
    assert expert is not None and expert.expert_parallel == 4
    with pytest.raises(ConfigError, match="8 does not divide data_parallel · context_parallel"):
        newer(
            QWEN3_MOE, parallel__parallel_mode=1, parallel_config=degrees | {"expert_parallel": 8}
        )


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (QWEN3 | {"model_type": "gemma3"}, {}, "model_type: 'gemma3' is not supported\nuse one of"),
        ({}, {"pretrained_model_dir": "/absent"}, "no such file: /absent/config.json\nset it to"),
        (QWEN3 | {"attention_dropout": 0.1}, {}, "attention_dropout: 0.1 is not supported"),
        (QWEN3 | {"hidden_act": "gelu"}, {}, "hidden_act: 'gelu' is not supported"),
        (QWEN3 | {"qk_layernorm": False}, {}, "qk_layernorm: False is not supported"),
        (
            QWEN3_MOE | {"norm_topk_prob": False, "moe_router_pre_softmax": False},
            {},
            "moe_router_pre_softmax: False computes the softmax of the chosen experts only",
        ),
        (
            {key: value for key, value in QWEN3.items() if key != "hidden_size"},
            {},
            "hidden_size: the key is missing",
        ),
    ],
)
def test_other_models_and_missing_sizes_are_one_error(
    config: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=r"^small\.yaml: ") as caught:
        newer(config, **changes)
    assert message in str(caught.value)


def test_no_groups_of_experts_are_one_group() -> None:
    sizes = newer(DEEPSEEK3 | {"n_group": 0, "topk_group": 0}).model.sizes
    assert (sizes.hf["n_group"], sizes.hf["topk_group"]) == (1, 1)


def test_sizes_without_the_type_of_the_model_need_its_folder() -> None:
    config = {key: value for key, value in DEEPSEEK3.items() if key != "model_type"}
    with pytest.raises(ConfigError, match="model_type: the key is missing\nset it, or `pretrained"):
        newer(config, pretrained_model_dir="")
