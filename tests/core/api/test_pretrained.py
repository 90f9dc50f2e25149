"""Folders of transformers and peft, on real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn
from transformers import GPT2LMHeadModel

import shardwright as sw
from core.api.pretrained_ranks import CHECKS, IDS, LlamaForCausalLM, llama
from torchrun import checks_on_ranks

test_on_two_ranks = checks_on_ranks(CHECKS, 2)


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    plan = sw.plan(llama(), kwargs={"input_ids": IDS, "labels": IDS}, devices=1)
    with pytest.raises(sw.CheckpointError, match=r"has no `config\.json`"):
        sw.from_pretrained(LlamaForCausalLM, tmp_path, plan)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(sw.CheckpointError, match=r"config\.json"):
        sw.from_pretrained(LlamaForCausalLM, tmp_path, plan)


def test_a_folder_of_another_model_or_that_lacks_a_file_is_refused(tmp_path: Path) -> None:
    plan = sw.plan(llama(), kwargs={"input_ids": IDS, "labels": IDS}, devices=1)

    def refused(words: str, folder: Path = tmp_path, cls: Any = LlamaForCausalLM) -> None:
        with pytest.raises(sw.CheckpointError, match=words):
            sw.from_pretrained(cls, folder, plan)

    llama().save_pretrained(tmp_path, max_shard_size="20KB")
    refused("no such folder", tmp_path / "absent")
    refused("not a model class", cls=nn.Linear)
    refused("needs a GPT2Config, but its config.json is a LlamaConfig", cls=GPT2LMHeadModel)
    with pytest.raises(sw.PlanError, match=r"Plan\.load"):
        sw.from_pretrained(LlamaForCausalLM, tmp_path, "plan.json")  # type: ignore[arg-type]
    index, (first, *_) = tmp_path / "model.safetensors.index.json", tmp_path.glob("*-00001-*")
    first.unlink()
    refused("model-00001-of-.* is missing")
    index.unlink()
    refused("model-00001-of-.* is missing")
    for file in tmp_path.glob("*.safetensors"):
        file.rename(file.with_suffix(".bin"))
    refused("has only .bin files")
