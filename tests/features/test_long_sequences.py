"""Causal attention that is cut along its queries: found by searches, pinned, and equal to eager."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright as sw
from random_plans import random_plan
from shardwright.planner.options import bytes_of

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


class Attention(nn.Module):
    """Causal attention with four heads of queries and two of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(16, 16)
        self.kv = nn.Linear(16, 16)
        self.out = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        batch, positions, _ = x.shape
        q = self.q(x).view(batch, positions, 4, 4).transpose(1, 2)
        k, v = self.kv(x).view(batch, positions, 4, 4).transpose(1, 2).chunk(2, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.out(y.transpose(1, 2).reshape(x.shape))


def blocks() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(Attention(), Attention()), torch.randn(1, 24, 16)


@pytest.mark.parametrize(("devices", "seed"), [(2, 1), (3, 2), (4, 3), (6, 4), (8, 5)])
def test_random_plans_of_causal_attention_equal_one_device(devices: int, seed: int) -> None:
    net, x = blocks()
    result = sw.check(net, (x,), {}, random_plan(sw.capture(net, (x,)), devices, seed))
    assert result.passes(1e-9), result


def test_one_long_sequence_is_divided_among_all_devices() -> None:
    net, _ = blocks()
    x = torch.zeros(1, 1 << 14, 16, device="meta")
    plan = sw.plan(net.to("meta"), (x,), devices=16, cluster="h100")
    for op in plan.partitioned.graph.ops:
        if op.target is ATTENTION:
            cuts = plan.cuts[op.name]
            assert plan.mesh.size(cuts["s"]) * plan.mesh.size(cuts.get("h", ())) == 16


@pytest.mark.slow
def test_a_million_tokens_of_a_llama_fit_into_64_devices() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=1,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    with torch.device("meta"):
        net = transformers.LlamaForCausalLM(config).bfloat16()
        tokens = torch.zeros(1, 1 << 20, dtype=torch.long)
    plan = sw.plan(net, (), {"input_ids": tokens, "labels": tokens}, devices=64, cluster="h100")
    assert plan.memory.peak < bytes_of("80GB")
