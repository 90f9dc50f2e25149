"""The decoders compute what `transformers` computes, and plans of them what one device does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import shardwright as sw
from random_plans import check_random_plan, random_plan
from shardwright.errors import ConfigError
from shardwright.models import MODELS, Dimensions, build, build_hf, example_batch
from shardwright.models.expert_sharding import pin_expert


@pytest.mark.parametrize("name", ["llama2_7b_tiny", "llama2_70b_tiny", "qwen_7b_tiny"])
def test_the_loss_is_that_of_transformers(name: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    sizes = MODELS[name]
    net = build(name).double()
    options: dict[str, Any] = {
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "rms_norm_eps": sizes.norm_eps,
        "attn_implementation": "eager",
    }
    plain = (
        LlamaForCausalLM(LlamaConfig(**options))
        if sizes.family == "llama"
        else Qwen2ForCausalLM(Qwen2Config(**options))
    ).double()
    plain.load_state_dict(net.state_dict())
    ids, _ = example_batch(sizes, 2, 16)
    labels = ids.clone()
    labels[0, 3:6] = -100
    wanted = plain(input_ids=ids, labels=labels).loss.item()
    # transformers computes loss and norms in single precision.
    assert net(ids, labels).item() == pytest.approx(wanted, rel=1e-6)


def sizes_of(family: Any, **changes: Any) -> Dimensions:
    few: dict[str, Any] = {"hidden_size": 32, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2}
    others = {"intermediate_size": 48, "vocab_size": 64, "seq_length": 16, "norm_eps": 1e-5}
    return Dimensions(family=family, **{**few, **others, **changes})


LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_shared_experts": 2,
    "moe_intermediate_size": 12,
    "topk_method": "group_limited_greedy",
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 16.0,
    "first_k_dense_replace": 1,
}
ROUTED = {"num_experts": 4, "experts_per_token": 2}
FAMILIES = {
    "glm": sizes_of("glm", hf={"attention_bias": True}),
    "mixtral": sizes_of("mixtral", **ROUTED),
    "qwen_moe": sizes_of("qwen_moe", **ROUTED, hf={"shared_expert_intermediate_size": 24}),
    "deepseek_v2": sizes_of("deepseek_v2", **ROUTED, num_kv_heads=4, num_layers=2, hf=LATENT),
    "internlm": sizes_of("llama", hf={"attention_bias": True}),
    "tied": sizes_of("qwen", hf={"tie_word_embeddings": True}),
    "linear": sizes_of("llama", hf={"rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
}


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_each_family_computes_the_loss_of_its_configuration(name: str) -> None:
    sizes = FAMILIES[name]
    torch.manual_seed(0)
    net = build(sizes)
    plain = build_hf({**net.model.config.to_dict(), "attn_implementation": "eager"})
    plain.net.load_state_dict(net.state_dict())
    ids, labels = example_batch(sizes, 2, 16)
    assert net(ids, labels).item() == pytest.approx(plain(ids, labels).item(), rel=1e-5)


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_random_plans_of_each_family_equal_one_device(name: str) -> None:
    sizes = FAMILIES[name]
    torch.manual_seed(0)
    net, batch = build(sizes).eval(), example_batch(sizes, 4)
    graph = sw.capture(net, batch)
    check_random_plan(net, batch, {}, graph, random_plan(graph, 4, 1))


@pytest.mark.parametrize(
    ("name", "ep"), [("glm", 1), ("mixtral", 2), ("qwen_moe", 2), ("deepseek_v2", 2)]
)
def test_each_family_is_cut_as_an_expert_would(name: str, ep: int) -> None:
    sizes = FAMILIES[name]
    torch.manual_seed(0)
    net, batch = build(sizes).eval(), example_batch(sizes, 4)
    pin_expert(net, data_parallel=4, model_parallel=2, expert_parallel=ep)
    plan = sw.plan(net, batch, devices=8, mode="sharding_propagation")
    if ep > 1:
        last = sizes.num_layers - 1
        assert plan.strategies[f"model.layers.{last}.mlp.experts"][3:] == ((2, 1, 2, 1), (2, 1, 2))
    assert sw.check(net, batch, {}, plan).passes()


def test_telechat_is_llama_with_biases_of_what_is_added_to_the_residual_stream() -> None:
    sizes = sizes_of("telechat")
    torch.manual_seed(0)
    net, plain, batch = build(sizes), build(sizes_of("llama")), example_batch(sizes, 4)
    biases = [name for name, _ in net.named_parameters() if name.endswith("bias")]
    layers = ("self_attn.o_proj", "mlp.down_proj")
    assert biases == [f"model.layers.0.{layer}.bias" for layer in layers]
    plain.load_state_dict({n: v for n, v in net.state_dict().items() if n not in biases})
    assert net(*batch).item() == plain(*batch).item()
    for name in biases:
        torch.nn.init.normal_(net.get_parameter(name))
    assert net(*batch).item() != pytest.approx(plain(*batch).item(), rel=1e-3)
    pin_expert(net, data_parallel=2, model_parallel=2, seq_parallel=True)
    plan = sw.plan(net, batch, devices=4, mode="sharding_propagation")
    assert sw.check(net, batch, {}, plan).passes()


def test_dropout_is_that_of_embedding_attention_and_what_is_added_to_the_residual_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = sizes_of("telechat", dropout=0.25, hf={"tie_word_embeddings": True})
    torch.manual_seed(0)
    net, plain = build(sizes, attention="explicit"), build(replace(sizes, dropout=0.0))
    plain.load_state_dict(net.state_dict())
    assert net.lm_head.weight is net.model.embed_tokens.weight
    batch = example_batch(sizes, 4)
    wanted = plain(*batch).item()
    assert net(*batch).item() != pytest.approx(wanted, rel=1e-5)
    assert net.eval()(*batch).item() == pytest.approx(wanted, rel=1e-5)
    dropped: list[tuple[torch.Size, float]] = []

    def record(x: torch.Tensor, p: float = 0.5, training: bool = True) -> torch.Tensor:
        dropped.append((x.shape, p))
        return x

    monkeypatch.setattr(torch.nn.functional, "dropout", record)
    net.train()(*batch)
    residual, scores = torch.Size([4, 16, 32]), torch.Size([4, 2, 2, 16, 16])
    assert dropped == [(shape, 0.25) for shape in (residual, scores, residual, residual)]


def test_a_plan_of_a_model_with_dropout_is_exact_in_evaluation() -> None:
    sizes = sizes_of("telechat", dropout=0.25)
    torch.manual_seed(0)
    net, batch = build(sizes).eval(), example_batch(sizes, 4)
    pin_expert(net, data_parallel=2, model_parallel=2, seq_parallel=True)
    plan = sw.plan(net, batch, devices=4, mode="sharding_propagation")
    assert sw.check(net, batch, {}, plan).passes()


def test_experts_have_no_dropout() -> None:
    with pytest.raises(ConfigError, match=r"dropout=0.1: mixtral has no dropout\nset it to 0.0"):
        build(sizes_of("mixtral", **ROUTED, dropout=0.1))


def test_logits_are_scaled() -> None:
    sizes = sizes_of("llama", logit_scale=0.5)
    torch.manual_seed(0)
    net, plain, batch = build(sizes), build(sizes_of("llama")), example_batch(sizes, 4)
    plain.load_state_dict(net.state_dict())
    assert net(*batch).item() != plain(*batch).item()
    with torch.no_grad():
        plain.lm_head.weight.mul_(0.5)
    assert net(*batch).item() == plain(*batch).item()


def test_an_argument_that_the_configuration_does_not_have_is_an_error() -> None:
    with pytest.raises(ConfigError, match="llama has no argument attention_bais"):
        build(sizes_of("llama", hf={"attention_bais": True}))


def test_no_mask_is_made_and_each_norm_is_one_operator() -> None:
    graph = sw.capture(build("llama2_7b_tiny"), example_batch(MODELS["llama2_7b_tiny"], 8, 16))
    largest = max(v.numel for v in graph.values() if not v.requires_grad)
    assert largest <= 8 * 16
    assert sum(op.target is torch.ops.aten.rms_norm.default for op in graph.ops) == 5


def test_glm_with_explicit_attention_is_exact_with_and_without_a_split() -> None:
    """As in MindFormers' files with `use_flash_attention: False`."""
    fused, explicit = (build(FAMILIES["glm"], attention=kind) for kind in ("fused", "explicit"))
    explicit.load_state_dict(fused.state_dict())
    ids = torch.randint(0, FAMILIES["glm"].vocab_size, (8, 16))
    torch.testing.assert_close(explicit(ids, ids), fused(ids, ids))
    plan = sw.plan(explicit, (ids, ids), devices=8, mem_coeff=16)
    assert any("matmul" in name for name in plan.cuts)
    assert sw.check(explicit, (ids, ids), {}, plan).passes(1e-9)
