"""Which model a file describes."""

from __future__ import annotations

from typing import Any

import pytest

from config.mindformers.files import run_of


@pytest.mark.parametrize(
    ("arch", "extra", "family", "positions"),
    [
        ("LlamaForCausalLM", {}, "llama", "rotary"),
        ("LlamaForCausalLM", {"qkv_has_bias": True}, "qwen", "rotary"),
        ("QwenForCausalLM", {"rotary_pct": 1.0, "kv_channels": 8}, "qwen", "rotary"),
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


def test_layers_that_are_adapted_bear_the_names_that_they_have_here() -> None:
    pet = {"pet_type": "lora", "lora_rank": 8, "target_modules": ".*wq|.*w1|.*mlp.w2"}
    lora = run_of(model__model_config__pet_config=pet).model.lora
    assert lora is not None
    assert lora.target_modules == ".*q_proj|.*gate_proj|.*mlp.down_proj"
    assert (lora.rank, lora.alpha, lora.dropout) == (8, 16, 0.0)
    assert run_of().model.lora is None


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
