"""Trained keys and values before those of frozen layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import shardwright as sw
from random_plans import check_random_plan, random_plan
from shardwright.errors import ConfigError
from shardwright.models import MODELS, Dimensions, LoRA, PrefixTuning, build, example_batch
from shardwright.models.attention import Attention
from shardwright.models.expert_sharding import pin_expert

LLAMA = replace(MODELS["llama2_7b_tiny"], num_layers=1, hidden_size=32, intermediate_size=48)
GLM = replace(LLAMA, family="glm", num_kv_heads=2, hf={"attention_bias": True})
MODELS_WITH_PREFIXES = {"llama": LLAMA, "glm": GLM}
PROJECTED, PLAIN = PrefixTuning(8, projection=16), PrefixTuning(8)
CASES = [("llama", "fused", PROJECTED), ("llama", "explicit", PLAIN), ("glm", "fused", PLAIN)]


@pytest.mark.parametrize(("name", "attention", "prefix"), CASES)
def test_prefixes_are_a_cache_of_transformers_without_positions(
    name: str, attention: Attention, prefix: PrefixTuning
) -> None:
    from transformers import DynamicCache

    sizes = replace(MODELS_WITH_PREFIXES[name], num_layers=2)
    torch.manual_seed(0)
    net: Any = build(sizes, prefix=prefix, attention=attention)
    ids, labels = example_batch(sizes, 2, 16)
    with torch.no_grad():
        net.prefix_tuning.embedding.normal_()
    prefixes = net.prefix_tuning.projection(net.prefix_tuning.embedding).unflatten(
        -1, net.prefix_tuning.shape
    )
    cache = DynamicCache()
    for layer in range(2):
        key, value = (
            prefixes[:, 2 * layer + which].transpose(0, 1).expand(2, -1, -1, -1) for which in (0, 1)
        )
        cache.update(key, value, layer)
    net.model.set_attn_implementation("eager")
    plain = net.model(
        input_ids=ids, position_ids=torch.arange(16).unsqueeze(0), past_key_values=cache
    )
    logits = net.lm_head(plain.last_hidden_state)
    wanted = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    net.model.set_attn_implementation(f"shardwright_{attention}")
    torch.testing.assert_close(net(ids, labels), wanted)
    with torch.no_grad():
        net.prefix_tuning.embedding.zero_()
    assert net(ids, labels).item() != pytest.approx(wanted.item(), rel=1e-5)


@pytest.mark.parametrize(("name", "attention", "prefix"), CASES)
def test_random_plans_equal_one_device(
    name: str, attention: Attention, prefix: PrefixTuning
) -> None:
    sizes = MODELS_WITH_PREFIXES[name]
    torch.manual_seed(0)
    net, batch = build(sizes, prefix=prefix, attention=attention), example_batch(sizes, 4, 16)
    graph = sw.capture(net, batch)
    for seed in range(3):
        check_random_plan(net, batch, {}, graph, random_plan(graph, 4, seed))


def test_an_expert_cuts_heads_and_stages_and_two_steps_equal_one_device() -> None:
    sizes = replace(LLAMA, num_layers=2)
    torch.manual_seed(0)
    net, batch = build(sizes, prefix=PROJECTED), example_batch(sizes, 8, 16)
    pin_expert(net, data_parallel=2, model_parallel=2)
    options: Any = {"mode": "sharding_propagation", "stages": 2, "micro_batches": 2}
    plan = sw.plan(net, batch, devices=8, hsdp={"level": "level1", "threshold": 0}, **options)
    assert sw.check(net, batch, {}, plan).passes()


def test_only_prefixes_are_trained_and_only_the_gradient_of_their_values_is_sent() -> None:
    net, batch = build(LLAMA, prefix=PROJECTED), example_batch(LLAMA, 8, 16)
    trained = {name for name, p in net.named_parameters() if p.requires_grad}
    kinds = ("weight", "bias")
    layers = [f"prefix_tuning.projection.{layer}.{kind}" for layer in (0, 2) for kind in kinds]
    assert trained == {"prefix_tuning.embedding", *layers}
    plan = sw.plan(net, batch, devices=8, mode="data_parallel")
    keys_and_values = 8 * 2 * LLAMA.hidden_size
    assert plan.backward_bytes == 2 * 7 * keys_and_values * 4 // 8


def test_each_sample_drops_other_numbers() -> None:
    net: Any = build(LLAMA, prefix=PrefixTuning(8, dropout=0.5))
    first, second = net.prefix_tuning(2)[0]
    assert not torch.equal(first, second)
    zeros = [(each == 0).float().mean().item() for each in (first, second)]
    assert zeros == [pytest.approx(0.5, abs=0.2)] * 2
    first, second = net.eval().prefix_tuning(2)[0]
    assert torch.equal(first, second) and first.count_nonzero() == first.numel()


WINDOWED: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}


@pytest.mark.parametrize(
    ("sizes", "lora", "message"),
    [
        (LLAMA, LoRA(), "`prefix` and `lora` cannot be combined"),
        (
            MODELS["baichuan2_7b_tiny"],
            None,
            "prefix: Baichuan does not support prefix",
        ),
        (
            replace(LLAMA, family="deepseek_v2", num_experts=4),
            None,
            "multi-head latent attention .DeepSeek. is not supported",
        ),
    ],
)
def test_models_that_take_no_prefixes_are_errors(
    sizes: Dimensions, lora: LoRA | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build(sizes, prefix=PLAIN, lora=lora)


def test_prefixes_beside_a_mask_are_an_error() -> None:
    net = build(replace(LLAMA, family="qwen", hf=WINDOWED), prefix=PLAIN)
    with pytest.raises(ConfigError, match="prefix tuning needs causal attention without a mask"):
        net(*example_batch(LLAMA, 2, 16))


@pytest.mark.parametrize("wrong", [{"tokens": 0}, {"projection": 0}, {"dropout": 1.0}])
def test_numbers_that_mean_nothing_are_errors(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="prefix tuning: "):
        PrefixTuning(**wrong)
