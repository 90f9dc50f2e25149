"""Causal attention, whole and in sliding windows, that is cut along the sequence: found by
searches, pinned, and equal to eager."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright as sw
from random_plans import random_plan
from shardwright.graph.custom_ops import windowed_attention
from shardwright.planner.options import bytes_of
from torchrun import torchrun

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
        return x + self.out(self.attend(q, k, v).transpose(1, 2).reshape(x.shape))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class WindowedAttention(Attention):
    """The same in a sliding window, with a mask as a user writes it."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = torch.arange(q.shape[-2])
        mask = (places <= places[:, None]) & (places > places[:, None] - self.window)
        return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)


def blocks() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(Attention(), Attention()), torch.randn(1, 24, 16)


@pytest.mark.parametrize(("devices", "seed"), [(2, 1), (3, 2), (4, 3), (6, 4), (8, 5)])
def test_random_plans_of_causal_attention_equal_one_device(devices: int, seed: int) -> None:
    net, x = blocks()
    result = sw.check(net, (x,), {}, random_plan(sw.capture(net, (x,)), devices, seed))
    assert result.passes(1e-9), result


@pytest.mark.parametrize(("devices", "window"), [(2, 1), (3, 5), (4, 7), (6, 3), (8, 16), (8, 23)])
def test_random_plans_of_sliding_windows_equal_one_device(devices: int, window: int) -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(WindowedAttention(window), WindowedAttention(window)), blocks()[1]
    graph = sw.capture(net, (x,))
    assert sum(op.target is windowed_attention for op in graph.ops) == 2
    result = sw.check(net, (x,), {}, random_plan(graph, devices, window))
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


@pytest.fixture(scope="module")
def output() -> str:
    return torchrun(Path(__file__).with_name("long_sequences_ranks.py"), 4)


@pytest.mark.distributed
@pytest.mark.parametrize("check", ["windows", "compiled_windows"])
def test_processes_that_share_a_sequence_compute_what_one_does(check: str, output: str) -> None:
    assert f"passed check_{check}" in output, output


def test_a_window_of_131072_tokens_takes_no_mask_and_little_from_a_neighbor() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MistralConfig(num_hidden_layers=2, sliding_window=4096)
    peaks = []
    for length in (65536, 131072):
        with torch.device("meta"):
            net = transformers.MistralForCausalLM(config).bfloat16()
            tokens = torch.zeros(1, length, dtype=torch.long)
        kwargs = {"input_ids": tokens, "labels": tokens}
        plan = sw.plan(net, (), kwargs, devices=16, cluster="h100")
        peaks.append(plan.memory.peak)
    graph = plan.partitioned.graph
    assert max(value.numel for op in graph.ops for value in op.outputs) == length * 32000
    for op in graph.ops:
        if op.target is windowed_attention:
            assert plan.mesh.size(plan.cuts[op.name]["s"]) > 1
            (sent,) = plan.partitioned.chunks[0].communication.reductions[op.name]
            assert sent.reduction.shape[-2] == 4095
    assert peaks[1] < 2 * peaks[0]
