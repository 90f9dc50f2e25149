"""What `test_pretrained.py` runs on each of two ranks."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))

import shardwright as sw
from random_plans import random_plan
from torchrun import run_checks

IDS = torch.arange(32).view(4, 8)
CALL: dict[str, Any] = {"input_ids": IDS, "labels": IDS}


def llama(hidden: int = 32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=hidden,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def planned(net: nn.Module, seed: int) -> tuple[Any, sw.Plan]:
    plan = random_plan(sw.capture(net, (), CALL), 2, seed)
    return sw.parallelize(net, plan, copy=True), plan


def shared_folder() -> Path:
    box = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(box, src=0)
    return Path(box[0])


def check_a_model_is_written_whole_and_read_in_shards() -> None:
    folder, eager = shared_folder(), llama()
    net, _ = planned(llama(), 0)
    (folder / "tokens.bin").touch()
    sw.save_pretrained(net, folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert (folder / "model.safetensors.index.json").exists()
    checked = {each.stem for each in folder.glob("*.checksum")}
    assert checked == {each.name for each in folder.glob("*.safetensors")}
    torch.testing.assert_close(net(**CALL).loss, eager(**CALL).loss)
    torch.testing.assert_close(
        dict(LlamaForCausalLM.from_pretrained(folder).state_dict()), dict(eager.state_dict())
    )
    _, plan = planned(llama(), 1)
    torch.manual_seed(5 + dist.get_rank())
    copy = sw.from_pretrained(LlamaForCausalLM, folder, plan)
    torch.testing.assert_close(copy(**CALL).loss, eager(**CALL).loss)
    with sw.whole(copy):
        generated = copy.generate(IDS, max_new_tokens=3, do_sample=False, pad_token_id=0)
        assert torch.equal(
            generated, eager.generate(IDS, max_new_tokens=3, do_sample=False, pad_token_id=0)
        )
    _, other = planned(llama(hidden=64), 1)
    with pytest.raises(sw.PlanError, match="in the plan"):
        sw.from_pretrained(LlamaForCausalLM, folder, other)
    dist.barrier()
    if dist.get_rank() == 0:
        sorted(folder.glob("*.safetensors"))[-1].unlink()
    dist.barrier()
    with pytest.raises(sw.CheckpointError, match=r"model-.*\.safetensors is missing"):
        sw.from_pretrained(LlamaForCausalLM, folder, plan)


def check_of_peft_adapters_alone_are_written() -> None:
    folder = shared_folder()

    def adapted() -> PeftModel:
        return get_peft_model(
            llama(), LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
        )

    net, _ = planned(adapted(), 2)
    eager = adapted()
    sw.save_pretrained(net, folder)
    assert not (folder / "model.safetensors").exists()
    read = PeftModel.from_pretrained(llama(), folder)
    torch.testing.assert_close(read(**CALL).loss, eager(**CALL).loss)


def check_methods_of_the_model_that_cannot_follow_a_plan_say_what_to_do() -> None:
    net, _ = planned(llama(), 4)
    with pytest.raises(sw.PlanError, match=r"with sw\.whole\(net\): net\.generate\(\.\.\.\)"):
        net.generate(IDS, max_new_tokens=3, pad_token_id=0)
    net.resize_token_embeddings(64)
    torch.testing.assert_close(net(**CALL).loss, llama()(**CALL).loss)
    net.gradient_checkpointing_enable()
    eager = llama()
    eager.gradient_checkpointing_enable()
    for each in (net.train(), eager.train()):
        each(**CALL).loss.backward()
    weight = net.lm_head.weight.grad.full_tensor()
    torch.testing.assert_close(weight, eager.lm_head.weight.grad)
    other, _ = planned(llama(), 4)
    with pytest.raises(sw.PlanError, match=r"`resize_token_embeddings`\) before `sw\.plan`"):
        other.resize_token_embeddings(70, mean_resizing=False)


def check_what_cannot_be_written_is_one_error_on_all_ranks() -> None:
    net, _ = planned(llama(), 3)
    file = shared_folder() / "file"
    file.touch()
    with pytest.raises(sw.CheckpointError, match="file"):
        sw.save_pretrained(net, file / "inside")
    linear = nn.Linear(4, 4)
    plan = sw.plan(linear, (torch.ones(4, 4),), devices=2)
    with pytest.raises(sw.CheckpointError, match="Linear has no method `save_pretrained`"):
        sw.save_pretrained(sw.parallelize(linear, plan, copy=True), file)


CHECKS = (
    check_a_model_is_written_whole_and_read_in_shards,
    check_methods_of_the_model_that_cannot_follow_a_plan_say_what_to_do,
    check_of_peft_adapters_alone_are_written,
    check_what_cannot_be_written_is_one_error_on_all_ranks,
)


if __name__ == "__main__":
    run_checks(CHECKS)
