"""Folders of transformers and peft, on real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

import shardwright as sw
from api.pretrained_ranks import CHECKS, IDS, LlamaForCausalLM, llama
from torchrun import torchrun


@pytest.fixture(scope="module")
def output() -> str:
    return torchrun(Path(__file__).with_name("pretrained_ranks.py"), 2)


@pytest.mark.distributed
@pytest.mark.parametrize("check", [check.__name__ for check in CHECKS])
def test_on_two_ranks(check: str, output: str) -> None:
    assert f"passed {check}" in output, output


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    plan = sw.plan(llama(), kwargs={"input_ids": IDS, "labels": IDS}, devices=1)
    with pytest.raises(sw.CheckpointError, match=r"has no config\.json"):
        sw.from_pretrained(LlamaForCausalLM, tmp_path, plan)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(sw.CheckpointError, match=r"config\.json"):
        sw.from_pretrained(LlamaForCausalLM, tmp_path, plan)
