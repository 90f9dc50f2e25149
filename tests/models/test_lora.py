"""Low-rank adaptation."""

from __future__ import annotations

import pytest
import torch

import shardwright as sw
from shardwright.errors import ConfigError
from shardwright.models import MODELS, LoRA, build, example_batch

SIZES = MODELS["llama2_7b_tiny"]


@pytest.mark.parametrize(
    ("targets", "adapted"),
    [
        (("q_proj", "v_proj"), {"q_proj", "v_proj"}),
        (".*q_proj|.*k_proj", {"q_proj", "k_proj"}),
        (r".*layers\.1\.mlp\.up_proj", {"up_proj"}),
    ],
)
def test_targets_are_names_or_an_expression(
    targets: str | tuple[str, ...], adapted: set[str]
) -> None:
    net = build("llama2_7b_tiny", lora=LoRA(targets, rank=4))
    trainable = {name for name, p in net.named_parameters() if p.requires_grad}
    assert {name.split(".")[-4] for name in trainable} == adapted
    assert all("lora_" in name for name in trainable)


def test_a_new_adapter_changes_nothing_and_alpha_scales_it() -> None:
    batch = example_batch(SIZES, 2, 16)
    losses = []
    for lora in (None, LoRA(), LoRA(alpha=16), LoRA(alpha=64)):
        torch.manual_seed(0)
        net = build("llama2_7b_tiny", lora=lora)
        if len(losses) > 1:
            for name, parameter in net.named_parameters():
                if "lora_B" in name:
                    parameter.data.fill_(0.1)
        losses.append(net(*batch).item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert len(set(losses[1:])) == 3


def test_no_gradient_of_a_frozen_weight_is_sent() -> None:
    batch = example_batch(SIZES, 8, 16)
    full, adapted = (
        sw.plan(build("llama2_7b_tiny", lora=lora), batch, devices=8, mode="data_parallel")
        for lora in (None, LoRA(rank=2))
    )
    small = sum(p.numel() for p in build("llama2_7b_tiny", lora=LoRA(rank=2)).parameters())
    small -= sum(p.numel() for p in build("llama2_7b_tiny").parameters())
    assert adapted.backward_bytes == 2 * 7 * small * 4 // 8
    assert adapted.backward_bytes < full.backward_bytes / 20


def test_chosen_weights_are_trained_beside_the_adapters() -> None:
    net = build("llama2_7b_tiny", lora=LoRA(trained=["*embed_tokens*", "*lm_head*"]))
    trained = {n for n, p in net.named_parameters() if p.requires_grad and "lora_" not in n}
    assert trained == {"model.embed_tokens.weight", "lm_head.weight"}
    with pytest.raises(ConfigError, match=r"trained='\*wte\*' matches no parameter"):
        build("llama2_7b_tiny", lora=LoRA(trained=["*wte*"]))


def test_targets_that_are_not_there_are_an_error_that_names_the_linear_layers() -> None:
    with pytest.raises(
        ConfigError, match=r"(?s)wq.* of this model: down_proj, gate_proj, k_proj, lm_head"
    ):
        build("llama2_7b_tiny", lora=LoRA(".*wq"))


@pytest.mark.parametrize("wrong", [{"rank": 0}, {"alpha": 0}, {"dropout": 1.0}])
def test_numbers_that_mean_nothing_are_errors(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="LoRA: "):
        LoRA(**wrong)  # type: ignore[arg-type]
