"""Which model a file describes."""

from __future__ import annotations

from typing import Any

import pytest

from config.mindformers.files import run_of
from shardwright.errors import ConfigError


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arch__type": "GPT"}, r"model\.arch\.type: 'GPT' is not known; valid are LlamaFor"),
        ({"arch__type": None}, r"model\.arch\.type: missing; valid are LlamaForCausalLM, "),
        ({"model_config__type": "QwenConfig"}, "LlamaForCausalLM needs LlamaConfig, not QwenC"),
        ({"model_config__num_layers": None}, r"model_config\.num_layers: missing"),
        ({"model_config__num_heads": 7}, "hidden_size=64 cannot be divided into num_heads=7"),
        ({"model_config__num_layers": "many"}, "expected a number, got 'many'"),
        ({"model_config__ignore_token_id": 0}, "labels that do not count must be -100"),
        ({"model_config__compute_dtype": "int8"}, "'int8' is not known; valid are float32"),
        ({"model_config__kv_channels": 16}, "16 · num_heads 8 is not 64"),
    ],
)
def test_what_cannot_be_is_an_error_with_its_key(changes: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^small.yaml: .*{message}"):
        run_of(**{f"model__{path}": value for path, value in changes.items()})


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
    changes["model__model_config__attention_dropout_rate"] = 0.2
    with pytest.raises(ConfigError, match="must be equal, not hidden_dropout_rate 0, attention_"):
        run_of(**changes)
