"""LLaMA 2 and Qwen compute what `transformers` computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwright.models import MODELS, build, example_batch


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


def test_no_mask_is_made_and_each_norm_is_one_operator() -> None:
    import shardwright as sw

    graph = sw.capture(build("llama2_7b_tiny"), example_batch(MODELS["llama2_7b_tiny"], 8, 16))
    largest = max(v.numel for v in graph.values() if not v.requires_grad)
    assert largest <= 8 * 16
    assert sum(op.target is torch.ops.aten.rms_norm.default for op in graph.ops) == 5
