"""Any causal language model of `transformers`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwright as sw
from shardwright.errors import ConfigError
from shardwright.models import LoRA, build_hf

GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 8, "vocab_size": 320}
SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 128,
    "vocab_size": 320,
    "head_dim": 8,
}
OTHERS = [
    GPT2,
    {"model_type": "mistral", "sliding_window": 4, **SMALL},
    {"model_type": "mistral", "sliding_window": None, **SMALL},
    {"model_type": "gemma2", **SMALL},
    {"model_type": "qwen3", **SMALL},
]


@pytest.mark.parametrize("options", OTHERS, ids=lambda o: o["model_type"])
def test_the_loss_is_that_of_transformers_and_every_operator_has_a_rule(
    options: dict[str, Any],
) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    net = build_hf(options).eval()
    torch.manual_seed(0)
    config = AutoConfig.for_model(**options)
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    ids = torch.randint(0, 320, (8, 16))
    wanted = plain(input_ids=ids, labels=ids).loss.item()
    assert net(ids, ids).item() == pytest.approx(wanted, rel=1e-5)
    assert sw.examine(net, (ids, ids)).without_rule == ()


def test_a_config_file_or_its_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GPT2))
    for source in (tmp_path, tmp_path / "config.json"):
        net = build_hf(source, lora=LoRA(("c_attn",), rank=2))
        assert sum(p.numel() for p in net.parameters() if p.requires_grad) > 0
        assert len(net.net.transformer.h) == 2


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("no/such/folder", "no such file or folder: no/such/folder"),
        ({"n_layer": 2}, "`model_type` is missing"),
        ({"model_type": "gpt99"}, "gpt99"),
        ({"model_type": "vit"}, "no causal language model 'vit'"),
    ],
)
def test_what_cannot_be_built_is_an_error(source: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_hf(source)


def test_code_beside_a_configuration_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    content = {"model_type": "planted", "auto_map": {"AutoConfig": "planted.Own"}}
    (tmp_path / "config.json").write_text(json.dumps(content))
    (tmp_path / "planted.py").write_text("open('run', 'w')")
    with pytest.raises(ConfigError, match="contains custom code"):
        build_hf(tmp_path / "config.json")
    with pytest.raises(ConfigError, match="contains custom code"):
        build_hf(tmp_path)
    assert not (tmp_path / "run").exists()
