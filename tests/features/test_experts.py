"""Mixtures of experts of `transformers`, unmodified, are one operator each; any plan is exact."""

from __future__ import annotations

import time
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from random_cases import random_cases
from random_plans import check_random_plan, random_plan
from shardwright.core.graph.custom_ops import experts
from shardwright.core.graph.graph import Graph
from shardwright.core.graph.serialize import dumps, loads
from shardwright.core.search.assign_stages import operator_work
from torchrun import torchrun

transformers = pytest.importorskip("transformers", "5.0")

TINY = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4}
ROUTED = {"num_experts_per_tok": 2, "output_router_logits": True}


def mixtral(**options: Any) -> nn.Module:
    sizes = {"num_key_value_heads": 2, "intermediate_size": 24, "num_local_experts": 6}
    config = transformers.MixtralConfig(**{**TINY, **ROUTED, **sizes, **options})
    return transformers.MixtralForCausalLM(config)


def qwen3_moe() -> nn.Module:
    sizes = {"num_key_value_heads": 2, "head_dim": 4, "moe_intermediate_size": 12}
    config = transformers.Qwen3MoeConfig(**TINY, **ROUTED, **sizes, num_experts=8)
    return transformers.Qwen3MoeForCausalLM(config)


def olmoe_with_five_experts() -> nn.Module:
    config = transformers.OlmoeConfig(
        **TINY, **ROUTED, intermediate_size=12, num_experts=5, eos_token_id=1, pad_token_id=0
    )
    return transformers.OlmoeForCausalLM(config)


def deepseek_v3() -> nn.Module:
    heads = {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
    ranks = {"q_lora_rank": 8, "kv_lora_rank": 8, "intermediate_size": 24}
    groups = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 0}
    config = transformers.DeepseekV3Config(
        **{**TINY, **ROUTED, **heads, **ranks, **groups}, moe_intermediate_size=12
    )
    return transformers.DeepseekV3ForCausalLM(config)


def gpt_oss_with_unused_experts() -> nn.Module:
    config = transformers.GptOssConfig(
        **TINY,
        **ROUTED,
        num_key_value_heads=2,
        head_dim=4,
        intermediate_size=12,
        num_local_experts=6,
        attn_implementation="eager",
    )
    net = transformers.GptOssForCausalLM(config)
    for layer in net.model.layers:
        router = layer.mlp.router
        nn.init.normal_(router.weight)
        router.bias.data = -100.0 * torch.tensor([0.0, 1.0, 0.5, 0.0, 1.0, 1.0])
        nn.init.normal_(layer.mlp.experts.gate_up_proj_bias)
        nn.init.normal_(layer.mlp.experts.down_proj_bias)
    return net


MODELS = (mixtral, qwen3_moe, olmoe_with_five_experts, deepseek_v3, gpt_oss_with_unused_experts)


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(64, (4, 8))
    return {"input_ids": ids, "labels": ids}


def dispatches(graph: Graph) -> list[str]:
    return [op.name for op in graph.ops if op.target is experts]


@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
@random_cases(1, slow=3)
def test_a_random_plan_changes_no_result(build: Any, seed: int) -> None:
    torch.manual_seed(0)
    net, kwargs = build(), batch()
    graph = sw.capture(net, (), kwargs)
    assert len(dispatches(graph)) == 1
    check_random_plan(net, (), kwargs, graph, random_plan(graph, (2, 4, 6)[seed % 3], seed))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"stages": 2},
        {"hsdp": {"level": "level3", "threshold": 0}},
        {"mode": "sharding_propagation"},
    ],
    ids=str,
)
def test_experts_that_are_pinned_change_no_result(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net, kwargs = mixtral(num_hidden_layers=2), batch()
    for layer in net.model.layers:
        sw.shard(layer.mlp.experts, (None, None, None, (2, 1, 1, 1), (2, 1, 1)))
    if "hsdp" in options:
        sw.recompute(net.model.layers)
    # The loss of the routers is no mean over samples.
    planned = sw.Pipeline(net, 2, loss_reduction="sum") if "stages" in options else net
    plan = sw.plan(planned, (), kwargs, devices=4, **options)
    assert plan.strategies["model.layers.1.mlp.experts"][3] == (2, 1, 1, 1)
    assert sw.check(planned, (), kwargs, plan).passes()


@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
def test_batch_and_sequence_stay_apart_from_router_to_experts(build: Any) -> None:
    graph = sw.capture(build(), (), batch())
    dispatch = graph.by_name["model.layers.0.mlp.experts"]
    assert dispatch.target is experts
    assert [value.shape[:2] for value in dispatch.inputs[:3]] == [(4, 8)] * 3
    producers = {graph.producer[value].target for value in dispatch.inputs[:3]}
    assert torch.ops.aten.reshape.default not in producers


@pytest.mark.parametrize("build", [mixtral, gpt_oss_with_unused_experts], ids=lambda b: b.__name__)
def test_a_graph_with_experts_can_be_written_and_read(build: Any) -> None:
    graph = sw.capture(build(), (), batch())
    assert loads(dumps(graph)).fingerprint == graph.fingerprint


def test_the_axis_that_cuts_experts_is_called_so() -> None:
    net, kwargs = mixtral(), batch()
    sw.shard(net.model.layers[0].mlp.experts, (None, None, None, (2, 1, 1, 1), (2, 1, 1)))
    assert sw.plan(net, (), kwargs, devices=2).mesh.sizes == "ep 2"


def test_the_work_of_a_stage_counts_the_experts_that_each_token_meets() -> None:
    graph = sw.capture(mixtral(), (), batch())
    op = graph.by_name["model.layers.0.mlp.experts"]
    down = op.inputs[4].numel
    assert operator_work(graph)[graph.ops.index(op)] == 32 * 2 * (3 * 16 * 24) + down


def test_capture_leaves_the_implementation_of_the_model_alone() -> None:
    net = mixtral()
    forward = type(net.model.layers[0].mlp.experts).forward
    sw.capture(net, (), batch())
    assert net.config._experts_implementation == "grouped_mm"
    assert "forward" not in vars(net.model.layers[0].mlp.experts)
    assert type(net.model.layers[0].mlp.experts).forward is forward


@pytest.mark.parametrize("name", ["eager", "batched_mm"])
def test_other_implementations_of_the_same_are_one_operator_too(name: str) -> None:
    net = mixtral(experts_implementation=name)
    assert net.config._experts_implementation == name
    assert len(dispatches(sw.capture(net, (), batch()))) == 1


def test_an_implementation_of_the_user_is_captured_as_it_is() -> None:
    interface = transformers.integrations.moe.ALL_EXPERTS_FUNCTIONS

    def halved(module: nn.Module, *args: Any) -> torch.Tensor:
        return interface["batched_mm"](module, *args) / 2

    interface["halved"] = halved
    try:
        net = mixtral(experts_implementation="halved")
        assert dispatches(sw.capture(net, (), batch())) == []
    finally:
        del interface["halved"]


def test_a_gate_that_mixes_columns_is_captured_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    net = mixtral()
    kind = type(net.model.layers[0].mlp.experts)
    gate = kind._apply_gate
    monkeypatch.setattr(kind, "_apply_gate", lambda self, x: gate(self, x).softmax(-1))
    assert dispatches(sw.capture(net, (), batch())) == []


def mixtral_8x7b() -> nn.Module:
    return mixtral(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_local_experts=8,
    )


def qwen3_30b_a3b() -> nn.Module:
    config = transformers.Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=2048,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
    )
    return transformers.Qwen3MoeForCausalLM(config)


@pytest.mark.slow
@pytest.mark.parametrize("build", [mixtral_8x7b, qwen3_30b_a3b], ids=lambda build: build.__name__)
def test_plans_of_full_size_cut_experts_and_tokens_over_all_devices(build: Any) -> None:
    with torch.device("meta"):
        net, ids = build().to(torch.bfloat16), torch.empty(64, 4096, dtype=torch.int64)
    begun = time.perf_counter()
    plan = sw.plan(net, (), {"input_ids": ids, "labels": ids}, devices=64, cluster="h100")
    print(f"{build.__name__}: {time.perf_counter() - begun:.1f} s")
    assert plan.graph is not None
    names = dispatches(plan.graph)
    assert len(names) == net.config.num_hidden_layers
    for name in names:
        tokens, *_, gate_up, _ = plan.strategies[name]
        # Eight large experts are cut inside or dealt out, which takes about as long; many small
        # ones are dealt out.
        cuts = prod(gate_up) if net.config.num_local_experts == 8 else gate_up[0]
        assert cuts > 1, f"{name}\n{plan}"
        assert prod(tokens) * prod(gate_up) == 64, f"{name}\n{plan}"


@pytest.fixture(scope="module")
def output() -> str:
    return torchrun(Path(__file__).with_name("experts_ranks.py"), 2)


@pytest.mark.distributed
@pytest.mark.parametrize("check", ["uneven_routing", "unused_experts", "compiled"])
def test_processes_that_share_the_experts_train_as_one_device(check: str, output: str) -> None:
    assert f"passed check_{check}" in output, output
