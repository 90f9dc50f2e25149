"""Causal attention, whole and in sliding windows, that is cut along the sequence: found by
searches, pinned, and equal to eager."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright as sw
from random_cases import random_cases
from random_plans import random_plan
from shardwright.core.capture import causal_masks
from shardwright.core.graph import blockwise_attention
from shardwright.core.graph.custom_ops import masked_attention, windowed_attention
from shardwright.core.layout.layout import Layout
from shardwright.core.partition.decisions import Decisions, adapt_decisions
from shardwright.core.planner import candidate
from shardwright.core.planner.options import parse_bytes
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
        return self.attended(x, None)

    def attended(self, x: Tensor, mask: Tensor | None) -> Tensor:
        batch, positions, _ = x.shape
        q = self.q(x).view(batch, positions, 4, 4).transpose(1, 2)
        k, v = self.kv(x).view(batch, positions, 4, 4).transpose(1, 2).chunk(2, 1)
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True)
        return x + self.out(y.transpose(1, 2).reshape(x.shape))


class WindowedAttention(Attention):
    """The same in a sliding window, with a mask as a user writes it."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        causal = places <= places[:, None]
        return self.attended(x, causal & (places > places[:, None] - self.window))


def blocks() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(Attention(), Attention()), torch.randn(1, 24, 16)


@random_cases(5)
def test_random_plans_of_causal_attention_equal_one_device(seed: int) -> None:
    net, x = blocks()
    plan = random_plan(sw.capture(net, (x,)), (2, 3, 4, 6, 8)[seed % 5], seed)
    result = sw.check(net, (x,), {}, plan)
    assert result.passes(1e-9), result


@pytest.mark.parametrize(("devices", "window"), [(2, 1), (3, 5), (4, 7), (6, 3), (8, 16), (8, 23)])
def test_random_plans_of_sliding_windows_equal_one_device(devices: int, window: int) -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(WindowedAttention(window), WindowedAttention(window)), blocks()[1]
    graph = sw.capture(net, (x,))
    assert sum(op.target is windowed_attention for op in graph.ops) == 2
    result = sw.check(net, (x,), {}, random_plan(graph, devices, window))
    assert result.passes(1e-9), result


class Packed(Attention):
    """The same, of documents in one row, each of which is for itself."""

    def forward(self, x: Tensor, document: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        same = document[:, :, None] == document[:, None, :]
        return self.attended(x, (same & (places <= places[:, None])).unsqueeze(1))


@pytest.fixture
def all_masks_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causal_masks, "LARGE", 0)
    monkeypatch.setattr(blockwise_attention, "MIN_ROWS", 5)


@pytest.mark.usefixtures("all_masks_are_large")
@random_cases(4)
def test_random_plans_of_packed_documents_equal_one_device(seed: int) -> None:
    torch.manual_seed(0)
    net, x = Packed(), torch.randn(2, 24, 16)
    document = torch.tensor([[0] * 7 + [1] * 9 + [2] * 8, [3] * 24])
    graph = sw.capture(net, (x, document))
    (op,) = (op for op in graph.ops if op.target is masked_attention)
    assert op.args[4:6] == ("eq 0 1", True)
    plan = random_plan(graph, (2, 3, 4, 8)[seed % 4], seed)
    result = sw.check(net, (x, document), {}, plan)
    assert result.passes(1e-9), result


def language_model(name: str, **options: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 32, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**sizes, **heads, **options)
    return getattr(transformers, f"{name}ForCausalLM")(config)


PADDED = torch.arange(24) < torch.tensor([[24], [17]])
POSITIONS = torch.cat([torch.arange(n) for n in (7, 9, 8)]).expand(2, -1)


@pytest.mark.usefixtures("all_masks_are_large")
@pytest.mark.parametrize(
    ("name", "kwargs", "causal", "terms"),
    [
        ("Llama", {"position_ids": POSITIONS}, False, "eq 0 1, le 2 3"),
        ("Llama", {"attention_mask": PADDED.long()}, True, "all 0"),
        ("Mistral", {"position_ids": POSITIONS}, False, "eq 0 1, gt 2 3, le 2 4"),
        ("Mistral", {"attention_mask": PADDED.long()}, True, "all 0"),
    ],
)
def test_packed_and_padded_rows_of_a_transformer_equal_one_device(
    name: str, kwargs: dict[str, Tensor], causal: bool, terms: str
) -> None:
    net = language_model(name, **({"sliding_window": 6} if name == "Mistral" else {}))
    ids = torch.randint(64, (2, 24))
    labels = ids.masked_fill(~PADDED, -100)
    # With a cache `transformers` takes no notice of positions that restart.
    kwargs = {"input_ids": ids, "labels": labels, "use_cache": False, **kwargs}
    graph = sw.capture(net, (), kwargs)
    found = [op for op in graph.ops if op.target is masked_attention]
    assert [(op.args[4], op.args[5]) for op in found] == [(terms, causal)] * 2
    assert max(value.numel for op in graph.ops for value in op.outputs) < 2 * 4 * 24 * 24
    result = sw.check(net, (), kwargs, random_plan(graph, 4, 1))
    assert result.passes(1e-9), result


def test_packed_rows_of_a_transformer_that_makes_a_cache_are_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    net, ids = language_model("Llama"), torch.randint(64, (2, 24))
    kwargs = {"input_ids": ids, "labels": ids, "position_ids": POSITIONS}
    sw.capture(net, (), {**kwargs, "use_cache": False})
    sw.capture(net, (), {**kwargs, "position_ids": torch.arange(24).expand(2, -1)})
    assert "packed documents" not in caplog.text
    sw.capture(net, (), kwargs)
    assert "packed documents (`position_ids` that restart) do not attend" in caplog.text


def test_one_long_sequence_is_divided_among_all_devices() -> None:
    net, _ = blocks()
    x = torch.zeros(1, 1 << 17, 16, device="meta")
    plan = sw.plan(net.to("meta"), (x,), devices=16, cluster="h100")
    for op in plan.partitioned.graph.ops:
        if op.target is ATTENTION:
            cuts = plan.cuts[op.name]
            assert plan.mesh.size([*cuts["s"], *cuts.get("h", ())]) == 16


def test_keys_go_round_a_ring_where_all_of_them_do_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    with torch.device("meta"):
        config = transformers.LlamaConfig(**sizes, **heads, vocab_size=1024)
        net = transformers.LlamaForCausalLM(config).bfloat16()
        tokens = torch.zeros(1, 1 << 18, dtype=torch.long)
    graph = sw.capture(net, (), {"input_ids": tokens, "labels": tokens})
    free = sw.plan(graph, devices=16, cluster="h100")
    limit = 7 * free.memory.peak // 10
    limited = sw.plan(graph, devices=16, cluster="h100", memory_limit=limit)
    for op in graph.ops:
        if op.target is ATTENTION:
            assert "s" in free.cuts[op.name]
            assert "ring" in limited.cuts[op.name]
    monkeypatch.setattr(candidate, "ring_cuts", lambda *_: None)
    assert limited.step_time is not None
    try:
        gathered = sw.plan(graph, devices=16, cluster="h100", memory_limit=limit)
    except sw.MemoryLimitError:
        return
    assert gathered.step_time is not None and gathered.step_time > limited.step_time


@pytest.mark.parametrize(
    ("queries", "keys", "cuts"),
    [
        ((1, 1, 8, 1), (1, 1, 8, 1), {"ring": 8}),
        ((1, 1, 8, 1), (1, 1, 1, 1), {"s": 8}),
        ((1, 1, 8, 1), (1, 1, 4, 1), {"s": 2, "ring": 4}),
        ((1, 2, 4, 1), (1, 2, 2, 1), {"h": 2, "s": 2, "ring": 2}),
    ],
)
def test_a_strategy_says_how_far_keys_go_round(
    queries: tuple[int, ...], keys: tuple[int, ...], cuts: dict[str, int]
) -> None:
    attention = sw.shard(F.scaled_dot_product_attention, (queries, keys, keys))

    class Pinned(Attention):
        def attended(self, x: Tensor, mask: Tensor | None) -> Tensor:
            q, k = (layer(x).unflatten(-1, (4, 4)).transpose(1, 2) for layer in (self.q, self.kv))
            y = attention(q, k[:, :2], k[:, 2:], is_causal=True, enable_gqa=True)
            return x + self.out(y.transpose(1, 2).flatten(2))

    net, x = Pinned(), torch.randn(1, 32, 16)
    plan = sw.plan(net, (x,), devices=8, cluster="h100")
    (op,) = (op for op in sw.capture(net, (x,)).ops if op.target is ATTENTION)
    assert {f: plan.mesh.size(axes) for f, axes in plan.cuts[op.name].items()} == cuts
    assert plan.strategies[op.name][:2] == (queries, keys)
    result = sw.check(net, (x,), {}, plan)
    assert result.passes(1e-9), result


def test_a_ring_of_another_sequence_goes_on_as_far_as_that_is_divided() -> None:
    net, x = Attention(), torch.randn(1, 24, 16)
    graph = sw.capture(net, (x,))
    (op,) = (op for op in graph.ops if op.target is ATTENTION)
    mesh = Layout((2, 2, 2), ("a", "b", "c"))
    decisions = Decisions({op.name: {"ring": (0, 1), "s": (2,)}}, {})
    for length, kept in (
        (24, {"ring": (0, 1), "s": (2,)}),
        (12, {"ring": (0, 1)}),
        (6, {"ring": (0,)}),
    ):
        other = sw.capture(net, (x[:, :length],))
        found = adapt_decisions(decisions, other, mesh).cuts[op.name]
        assert {factor: axes for factor, axes in found.items() if axes} == kept


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
    assert plan.memory.peak < parse_bytes("80GB")


@pytest.fixture(scope="module")
def output() -> str:
    return torchrun(Path(__file__).with_name("long_sequences_ranks.py"), 4)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "check",
    [
        "windows",
        "documents",
        "compiled_documents",
        "rings",
        "compiled_windows_and_rings",
    ],
)
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
