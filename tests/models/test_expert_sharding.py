"""The expert's configuration: Megatron's collectives come out of its pins."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from torch import nn

import shardwright as sw
from shardwright.core.plan import Plan
from shardwright.errors import ConfigError
from shardwright.models import MODELS, build, example_batch
from shardwright.models.attention import Attention
from shardwright.models.expert_sharding import expert_stages, pin_expert

LLAMA = MODELS["llama2_7b_tiny"]
TINY = ("llama2_7b_tiny", "qwen_7b_tiny", "baichuan2_13b_tiny", "pangualpha_2_6b_tiny")


def planned(model: str, dp: int, mp: int, seq_parallel: bool = False, layers: int = 2) -> Plan:
    with torch.device("meta"):
        net = build(model, num_layers=layers)
        batch = example_batch(MODELS[model], 8)
    pin_expert(net, data_parallel=dp, model_parallel=mp, seq_parallel=seq_parallel)
    return sw.plan(net, batch, devices=dp * mp, mode="sharding_propagation")


@pytest.mark.parametrize("seq_parallel", [False, True])
def test_each_layer_pays_two_all_reduces_forward_and_two_backward(seq_parallel: bool) -> None:
    two, four = (planned("llama2_7b_tiny", 1, 8, seq_parallel, n) for n in (2, 4))
    activation = 8 * LLAMA.seq_length * LLAMA.hidden_size * 4
    all_reduce = 2 * 7 * activation // 8
    assert four.forward_bytes - two.forward_bytes == 2 * 2 * all_reduce
    norms = 2 * 2 * 2 * 7 * LLAMA.hidden_size * 4 // 8 if seq_parallel else 0
    assert four.backward_bytes - two.backward_bytes == 2 * 2 * all_reduce + norms


def test_sequence_parallel_makes_them_reduce_scatters_and_all_gathers() -> None:
    plan = planned("llama2_7b_tiny", 2, 4, seq_parallel=True)
    steps = [s for c in plan.row("model.layers.0.mlp.down_proj").redistributions for s in c.steps]
    assert "reduce_scatter dim 1 over tp / all_gather" in steps
    assert plan.row("model.layers.1.add").strategy == ((2, 4, 1), (2, 4, 1))


def test_data_parallel_sends_nothing_forward_but_the_loss() -> None:
    assert planned("llama2_7b_tiny", 8, 1).forward_bytes < 100


@pytest.mark.parametrize("model", TINY)
def test_the_plan_equals_one_device(model: str) -> None:
    torch.manual_seed(0)
    net = build(model).eval()
    batch = example_batch(MODELS[model], 4)
    pin_expert(net, data_parallel=2, model_parallel=4, seq_parallel=True)
    plan = sw.plan(net, batch, devices=8, mode="sharding_propagation")
    assert sw.check(net, batch, {}, plan).passes()


@pytest.mark.parametrize(
    ("model", "attention"),
    [("llama2_70b_tiny", "fused"), ("baichuan2_13b_tiny", "fused"), (TINY[3], "explicit")],
)
def test_context_parallel_equals_one_device(model: str, attention: Attention) -> None:
    torch.manual_seed(0)
    net = build(model, attention=attention).eval()
    batch = example_batch(MODELS[model], 4)
    pin_expert(net, data_parallel=2, model_parallel=2, context_parallel=2, seq_parallel=True)
    plan = sw.plan(net, batch, devices=8, mode="sharding_propagation")
    assert sw.check(net, batch, {}, plan).passes()


SMALL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "num_experts_per_tok": 2,
}


def with_biases_and_interleaved_gates() -> nn.Module:
    config = transformers.GptOssConfig(
        **SMALL, num_hidden_layers=1, num_local_experts=4, attn_implementation="eager"
    )
    net = transformers.GptOssForCausalLM(config)
    nn.init.normal_(net.model.layers[0].mlp.experts.gate_up_proj_bias)
    nn.init.normal_(net.model.layers[0].mlp.experts.down_proj_bias)
    return net


def without_gates() -> nn.Module:
    groups = {"n_group": 1, "topk_group": 1, "mamba_num_heads": 2, "mamba_head_dim": 8}
    config = transformers.NemotronHConfig(
        **{**SMALL, **groups},
        layers_block_type=["attention", "moe"],
        n_routed_experts=4,
        moe_intermediate_size=12,
        moe_shared_expert_intermediate_size=12,
    )
    return transformers.NemotronHForCausalLM(config)


@pytest.mark.parametrize(
    ("build", "cut"),
    [
        (with_biases_and_interleaved_gates, ((2, 2, 1, 1), (2, 1, 2), (2, 2, 1), (2, 1))),
        (without_gates, ((2, 1, 2, 1), (2, 1, 2))),
    ],
)
def test_experts_of_every_form_are_cut_as_others(
    build: Callable[[], nn.Module], cut: tuple[tuple[int, ...], ...]
) -> None:
    torch.manual_seed(0)
    net = build().eval()
    pin_expert(net, data_parallel=2, model_parallel=2, expert_parallel=2)
    ids = torch.randint(0, 64, (4, 8))
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    plan = sw.plan(net, (), batch, devices=4, mode="sharding_propagation")
    (experts,) = (cuts for name, cuts in plan.strategies.items() if name.endswith(".experts"))
    assert experts[3:] == cut
    assert sw.check(net, (), batch, plan).passes()


@pytest.mark.parametrize("degree", ["model_parallel", "context_parallel"])
def test_experts_are_divided_over_devices_of_data_and_other_parallelism(degree: str) -> None:
    torch.manual_seed(0)
    net = without_gates().eval()
    pin_expert(net, **{"data_parallel": 2, "model_parallel": 1, degree: 2}, expert_parallel=4)
    ids = torch.randint(0, 64, (4, 8))
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    plan = sw.plan(net, (), batch, devices=4, mode="sharding_propagation")
    (experts,) = (cuts for name, cuts in plan.strategies.items() if name.endswith(".experts"))
    assert experts[3:] == ((4, 1, 1, 1), (4, 1, 1))
    assert sw.check(net, (), batch, plan).passes()
    degrees = "data_parallel 2 · context_parallel 1 · model_parallel 2"
    with pytest.raises(ConfigError, match=f"8 does not divide {degrees}"):
        pin_expert(net, data_parallel=2, model_parallel=2, expert_parallel=8)


def test_whole_experts_are_divided_over_tensor_parallel_devices_first() -> None:
    torch.manual_seed(0)
    net = without_gates().eval()
    pin_expert(net, data_parallel=2, model_parallel=2, expert_parallel=2, whole_experts=True)
    ids = torch.randint(0, 64, (4, 8))
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    plan = sw.plan(net, (), batch, devices=4, mode="sharding_propagation")
    (experts,) = (cuts for name, cuts in plan.strategies.items() if name.endswith(".experts"))
    assert experts[3:] == ((2, 1, 1, 1), (2, 1, 1))
    assert sw.check(net, (), batch, plan).passes()


@pytest.mark.parametrize(
    ("cp", "mp", "queries", "steps"),
    [
        (8, 1, (1, 8, 1, 1), "all_to_all dim 2 to dim 1 over sp / all_to_all"),
        (4, 4, (1, 4, 4, 1), "all_gather dim 2 over sp / reduce_scatter"),
    ],
)
def test_attention_cuts_heads_where_they_divide_else_queries(
    cp: int, mp: int, queries: tuple[int, ...], steps: str
) -> None:
    with torch.device("meta"):
        net = build("llama2_70b_tiny")
        batch = example_batch(MODELS["llama2_70b_tiny"], 1)
    pin_expert(net, data_parallel=1, model_parallel=mp, context_parallel=cp)
    plan = sw.plan(net, batch, devices=cp * mp, mode="sharding_propagation")
    row = plan.row("model.layers.0.self_attn.scaled_dot_product_attention")
    assert row.strategy[0] == queries
    assert steps in [s for c in row.redistributions for s in c.steps]


def test_stages_take_equally_many_blocks() -> None:
    with torch.device("meta"):
        net = build("llama2_7b_tiny", num_layers=4)
    stages = expert_stages(net, 2)
    assert [stages[f"model.layers.{i}"] for i in range(4)] == [0, 0, 1, 1]
    assert (stages["model.embed_tokens"], stages["model.norm"], stages["lm_head"]) == (0, 1, 1)
    with pytest.raises(ConfigError, match="4 layers cannot fill 5 stages"):
        expert_stages(net, 5)


def test_sizes_that_do_not_divide_are_refused_by_name() -> None:
    with torch.device("meta"):
        net = build("llama2_7b_tiny")
    with pytest.raises(ConfigError, match="320 entries are not divisible by model_parallel 7"):
        pin_expert(net, data_parallel=1, model_parallel=7)


def test_a_whole_embedding_table_looks_up_each_devices_positions() -> None:
    torch.manual_seed(0)
    net, batch = build("llama2_7b_tiny"), example_batch(LLAMA, 4)
    pin_expert(net, data_parallel=2, model_parallel=4, seq_parallel=True, vocab_emb_dp=True)
    plan = sw.plan(net, batch, devices=8, mode="sharding_propagation")
    assert plan.row("model.embed_tokens").strategy == ((1, 1), (2, 4))
    assert sw.check(net, batch, {}, plan).passes()


def latent_attention() -> transformers.DeepseekV3ForCausalLM:
    ranks = {"q_lora_rank": 8, "kv_lora_rank": 8}
    heads = {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
    config = transformers.DeepseekV3Config(
        **{**ranks, **heads, **experts, "hidden_size": 16, "num_hidden_layers": 2},
        intermediate_size=24,
        moe_intermediate_size=8,
        first_k_dense_replace=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=64,
    )
    return transformers.DeepseekV3ForCausalLM(config)


def test_latent_attention_is_cut_along_batch_sequence_and_heads() -> None:
    torch.manual_seed(0)
    net, ids = latent_attention(), torch.randint(64, (4, 8))
    call = {"input_ids": ids, "labels": ids, "use_cache": False}
    pin_expert(net, data_parallel=2, context_parallel=2, model_parallel=2, expert_parallel=2)
    plan = sw.plan(net, kwargs=call, devices=8, mode="sharding_propagation")
    for layer in range(2):
        row = plan.row(f"model.layers.{layer}.self_attn.kv_b_proj")
        assert row.strategy == ((2, 1, 2, 1), (2, 1))
    assert sw.check(net, (), call, plan).passes()
