"""Language models by name: their sizes, their loss, and their plans on simulated ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright as sw
from random_cases import random_cases
from random_plans import check_random_plan, random_plan
from shardwright.core.rules import rule_of
from shardwright.errors import ConfigError
from shardwright.models import LoRA, build, dimensions, example_batch
from shardwright.models.attention import Attention

# Those that differ when they are tiny.
ARCHITECTURES = [
    "llama2_7b",
    "llama2_70b",
    "qwen_7b",
    "baichuan2_7b",
    "baichuan2_13b",
    "pangualpha_2_6b",
]


def tiny(name: str, lora: LoRA | None = None) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A tiny model and a batch in which some labels are ignored, unevenly over the rows."""
    torch.manual_seed(0)
    net = build(f"{name}_tiny", lora=lora)
    for parameter in net.parameters():
        # Also those that start at zero have an effect.
        parameter.data += 0.02 * torch.randn_like(parameter)
    ids, _ = example_batch(dimensions(f"{name}_tiny"), 8, 16)
    labels = ids.clone()
    labels[0, :9] = labels[3, 4:] = -100
    return net, (ids, labels)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama2_7b", 6.738),
        ("llama2_13b", 13.016),
        ("llama2_70b", 68.977),
        ("qwen_7b", 7.721),
        ("qwen_14b", 14.167),
        ("baichuan2_7b", 7.506),
        ("baichuan2_13b", 13.897),
        ("pangualpha_2_6b", 2.625),
        ("pangualpha_13b", 12.801),
    ],
)
def test_a_published_model_has_the_published_number_of_parameters(
    name: str, billions: float
) -> None:
    with torch.device("meta"):
        net = build(name)
    assert round(sum(p.numel() for p in net.parameters()) / 1e9, 3) == billions


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_operator_has_a_rule_and_what_counts_can_be_cut_eight_times(name: str) -> None:
    net, batch = tiny(name)
    graph = sw.capture(net, batch)
    assert sw.examine(graph).without_rule == ()

    def capacity(op: str, *factors: str) -> list[int]:
        found = rule_of(graph.by_name[op])
        assert found is not None
        return [found.capacity[f] for f in factors if f in found.factors]

    attention = "model.layers.0.self_attn.scaled_dot_product_attention"
    assert capacity(attention, "b", "h") == [8, 8]
    assert capacity("model.layers.0.mlp.up_proj", "b", "s", "j") == [8, 16, 128]
    assert capacity("model.layers.0.mlp.down_proj", "b", "s", "k") == [8, 16, 128]
    assert capacity("model.layers.0.input_layernorm", "b", "s") == [8, 16]
    assert capacity("model.embed_tokens", "v", "b", "s") == [320, 8, 16]
    assert capacity("cross_entropy", "b", "s", "v") == [8, 16, 320]


@pytest.mark.parametrize("lora", [None, LoRA(rank=8)], ids=["full", "lora"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_tiny_model_on_eight_ranks_equals_one_device(name: str, lora: LoRA | None) -> None:
    net, batch = tiny(name, lora)
    graph = sw.capture(net, batch)
    check_random_plan(net, batch, {}, graph, sw.plan(graph, devices=8, mem_coeff=16.0))


@random_cases(1, slow=11)
def test_a_random_plan_of_a_tiny_model_equals_one_device(seed: int) -> None:
    """Each architecture in turn, with and without adapters."""
    name = ARCHITECTURES[seed % len(ARCHITECTURES)]
    net, batch = tiny(name, LoRA(rank=8) if seed // len(ARCHITECTURES) % 2 else None)
    graph = sw.capture(net, batch)
    check_random_plan(net, batch, {}, graph, random_plan(graph, 8, seed))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_each_kind_of_attention_computes_the_same_loss(name: str) -> None:
    losses = []
    for attention in get_args(Attention):
        torch.manual_seed(0)
        net = build(f"{name}_tiny", attention=attention, dtype=torch.float64)
        losses.append(net(*example_batch(dimensions(f"{name}_tiny"), 2, 16)).item())
    # The explicit softmax is in single precision.
    assert losses == pytest.approx([losses[0]] * 2, rel=1e-6)


def test_a_tiny_model_with_explicit_attention_on_eight_ranks_equals_one_device() -> None:
    net = build("llama2_70b_tiny", attention="explicit")
    batch = example_batch(dimensions("llama2_70b_tiny"), 8, 16)
    graph = sw.capture(net, batch)
    check_random_plan(net, batch, {}, graph, random_plan(graph, 8, seed=0))


def test_the_loss_is_the_mean_over_the_next_tokens_that_are_not_ignored() -> None:
    class Next(nn.Module):
        """Predicts of each token the token itself, more or less surely."""

        def forward(self, x: Tensor) -> Tensor:
            return F.one_hot(x, 320).float() * x.unsqueeze(-1).clamp(max=9)

    from shardwright.models.loss import next_token_loss

    ids = torch.randint(0, 320, (3, 8))
    labels = ids.clone()
    labels[0, :5] = -100
    scores = Next()(ids).log_softmax(-1)
    rows = [
        -scores[b, s, labels[b, s + 1]]
        for b in range(3)
        for s in range(7)
        if labels[b, s + 1] != -100
    ]
    assert next_token_loss(Next()(ids), labels).item() == pytest.approx(
        torch.stack(rows).mean().item()
    )


def test_parameters_have_the_dtype_that_is_asked_for_and_frequencies_stay_exact() -> None:
    net = build("llama2_7b_tiny", dtype=torch.bfloat16, lora=LoRA(rank=2))
    assert {p.dtype for p in net.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in net.buffers()} == {torch.float32}
    assert net(*example_batch(dimensions("llama2_7b_tiny"), 2, 8)).dtype == torch.float32


def test_sequence_length_and_number_of_layers_can_be_chosen() -> None:
    net = build("pangualpha_2_6b_tiny", seq_length=24, num_layers=3)
    shapes = {name: tuple(p.shape) for name, p in net.named_parameters()}
    assert shapes["model.embed_positions.weight"] == (24, 64)
    assert "model.layers.1.mlp.up_proj.weight" in shapes
    assert "model.layers.2.mlp.up_proj.weight" not in shapes  # the third is the query layer


def test_unknown_models_families_and_kinds_of_attention_are_errors() -> None:
    with pytest.raises(ConfigError, match="unknown family='mamba'\nuse one of llama, telechat"):
        build(replace(dimensions("llama2_7b_tiny"), family="mamba"))
    with pytest.raises(ConfigError, match="unknown model 'gpt5'"):
        build("gpt5")
    with pytest.raises(ConfigError, match="unknown attention='flash'\nuse one of fused, explicit"):
        build("llama2_7b_tiny", attention="flash")  # type: ignore[arg-type]
