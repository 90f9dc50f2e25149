"""Masks of attention that say no more than how far back queries look."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright as sw
from shardwright.core.capture import causal_masks
from shardwright.core.graph.custom_ops import masked_attention, windowed_attention
from shardwright.core.graph.interpreter import interpret

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
Mask = Callable[[Tensor], Tensor]


class Masked(nn.Module):
    """Attention of `x` to itself, with the mask that a function makes for it."""

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, self.mask(x))


def folded(mask: Mask) -> bool | int | str | None:
    """Whether captured attention is causal, its window, or the terms of its mask; None if it reads
    the mask. Its result is that of the module."""
    net, x = Masked(mask), torch.randn(2, 3, 6, 4, dtype=torch.float64)
    graph = sw.capture(net, (x,))
    attention = (ATTENTION, windowed_attention, masked_attention)
    (op,) = (op for op in graph.ops if op.target in attention)
    output, _ = interpret(graph, {}, {}, (x,))
    torch.testing.assert_close(output, net(x))
    if op.target is windowed_attention:
        return op.args[3]
    if op.target is masked_attention:
        return op.args[4]
    return op.kwargs["is_causal"] if len(op.inputs) == 3 else None


def places(x: Tensor) -> Tensor:
    return torch.arange(x.shape[-2])


CAUSAL: list[Mask] = [
    lambda x: places(x) <= places(x)[:, None],
    lambda x: places(x)[:, None] >= places(x),
    lambda x: ~(places(x) > places(x)[:, None]),
    lambda x: torch.logical_not(places(x)[:, None] < places(x)),
    lambda x: places(x) < places(x)[:, None] + 1,
    lambda x: (places(x) <= places(x)[:, None])[None, None].expand(2, 3, -1, -1),
    lambda x: (places(x) <= places(x)[:, None]) & (places(x)[:, None] >= 0),
    lambda x: (7.0 - places(x)) >= (7 - places(x))[:, None],
    lambda x: torch.ones(6, 6, dtype=torch.bool).tril(),
]
ALL: list[Mask] = [
    lambda x: torch.ones(6, 6, dtype=torch.bool),
    lambda x: places(x) < places(x)[:, None] + 6,
    lambda x: x.new_ones((), dtype=torch.bool) & (places(x) * 0 == places(x)[:, None] * 0),
]
WINDOWS: list[tuple[int, Mask]] = [
    (3, lambda x: (places(x) <= places(x)[:, None]) & (places(x) > places(x)[:, None] - 3)),
    (3, lambda x: (places(x)[:, None] - 2 <= places(x)) & (places(x)[:, None] >= places(x))),
    (1, lambda x: (places(x) <= places(x)[:, None]) & (places(x) >= places(x)[:, None])),
    (5, lambda x: torch.ones(6, 6, dtype=torch.bool).tril().triu(-4)),
    (5, lambda x: torch.ones(6, 6, dtype=torch.bool).triu(-4) & (places(x) <= places(x)[:, None])),
    (
        2,
        lambda x: (
            (places(x) > places(x)[:, None] - 2)
            & (places(x) > places(x)[:, None] - 4)
            & (places(x) <= places(x)[:, None]).expand(2, 3, -1, -1)
        ),
    ),
    (2, lambda x: ~(places(x) > places(x)[:, None]) & ~(places(x) + 2 <= places(x)[:, None])),
]
OTHER: list[Mask] = [
    lambda x: places(x) <= places(x)[:, None] + 1,
    lambda x: places(x) > places(x)[:, None] - 3,
    lambda x: (places(x) <= places(x)[:, None] + 1) & (places(x) > places(x)[:, None] - 3),
    lambda x: (places(x) <= places(x)[:, None]) & (places(x) > places(x)[:, None] // 2),
    lambda x: torch.ones(6, 6, dtype=torch.bool).tril().triu(1).logical_or(places(x) < 1),
    lambda x: torch.ones(6, 6, dtype=torch.bool).tril().triu(-2) & (x[:, :1, :1, :1] < 9),
    lambda x: (places(x) <= places(x)[:, None]) & (places(x) // 3 == places(x)[:, None] // 3),
    lambda x: places(x)[:, None] <= places(x),
    lambda x: (places(x) <= places(x)[:, None]) & (x[:, :1, :1, :1] < 9),
    lambda x: torch.ones(6, 6, dtype=torch.bool).tril(1),
    lambda x: places(x)[:1, None] >= places(x),
    lambda x: (places(x)[:1, None] >= places(x)) & torch.ones(6, 6, dtype=torch.bool),
    lambda x: (places(x) <= places(x)[:, None]).to(x.dtype),
]


@pytest.mark.parametrize("mask", CAUSAL)
def test_a_mask_of_earlier_positions_is_causal(mask: Mask) -> None:
    assert folded(mask) is True


@pytest.mark.parametrize("mask", ALL)
def test_a_mask_that_allows_every_pair_is_none(mask: Mask) -> None:
    assert folded(mask) is False


@pytest.mark.parametrize(("window", "mask"), WINDOWS)
def test_a_causal_mask_of_a_sliding_window_is_its_size(window: int, mask: Mask) -> None:
    found = folded(mask)
    assert found == window
    assert not isinstance(found, bool)


@pytest.mark.parametrize("mask", OTHER)
def test_any_other_mask_is_kept(mask: Mask) -> None:
    assert folded(mask) is None


def some(x: Tensor) -> Tensor:
    """Which of six positions are no padding."""
    return x[0, 0, :, 0] > -1


def document(x: Tensor) -> Tensor:
    """For each of two rows the documents of six positions."""
    return (x[:, 0, :, 0] > 0).cumsum(-1)


def same(x: Tensor) -> Tensor:
    return document(x)[:, :, None] == document(x)[:, None]


TERMS: list[tuple[str, Mask]] = [
    ("all 0", lambda x: (places(x) <= places(x)[:, None]) & some(x)[None]),
    ("all 0", lambda x: some(x)[:, None] & (places(x) <= places(x)[:, None])),
    ("eq 0 1", lambda x: same(x)[:, None]),
    ("eq 0 1", lambda x: same(x)[:, None].expand(2, 3, -1, -1) & (places(x) <= places(x)[:, None])),
    ("eq 0 1, all 2", lambda x: (same(x) & some(x)[None])[:, None]),
    ("le 0 1, gt 0 2", lambda x: positions(x)),
]
UNTOLD: list[Mask] = [
    lambda x: same(x)[:, None] | (places(x) <= places(x)[:, None]),
    lambda x: (same(x) & (places(x) <= places(x)[:, None] + 1))[:, None],
    lambda x: same(x).repeat_interleave(3, 0).view(2, 3, 6, 6),
    lambda x: some(x).expand(6, 6) & torch.ones(6, 6, dtype=torch.bool),
    lambda x: (places(x) <= places(x)[:, None]) & (x[:1, :1, :, :1] * x[:1, :1, :, 0] < 9),
    lambda x: same(x)[:, None].to(x.dtype),
]


def positions(x: Tensor) -> Tensor:
    """A window of positions that are numbers of the input."""
    number = document(x)[:, None]
    key, query = number[:, :, None], number[..., None]
    return (key <= query) & (key > query - 2)


@pytest.mark.parametrize(("terms", "mask"), TERMS)
def test_a_large_mask_that_compares_numbers_of_tokens_is_made_of_them(
    terms: str, mask: Mask, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert folded(mask) is None
    monkeypatch.setattr(causal_masks, "LARGE", 0)
    assert folded(mask) == terms


@pytest.mark.parametrize("mask", UNTOLD)
def test_a_large_mask_that_says_more_is_kept(mask: Mask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causal_masks, "LARGE", 0)
    assert folded(mask) is None


@pytest.mark.parametrize("mask", OTHER)
def test_a_large_mask_is_exact_held_or_not(mask: Mask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causal_masks, "LARGE", 0)
    assert folded(mask) in (None, "all 0")


def test_no_mask_of_a_transformer_is_held() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32, "vocab_size": 64}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    with torch.device("meta"):
        net, tokens = transformers.LlamaForCausalLM(config), torch.zeros(2, 1 << 20).long()
    graph = sw.capture(net, (tokens,))
    assert max(value.numel for op in graph.ops for value in op.outputs) == 2 * (1 << 20) * 64
    assert next(op for op in graph.ops if op.target is ATTENTION).kwargs["is_causal"]


@pytest.mark.parametrize("name", ["Mistral", "Qwen2", "Gemma3"])
def test_no_mask_of_a_transformer_with_sliding_windows_is_held(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 32, "vocab_size": 64}
    types = ["sliding_attention", "full_attention"] if name != "Mistral" else None
    options = {} if types is None else {"layer_types": types, "use_sliding_window": True}
    config = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")(
        **sizes,
        **options,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=512,
        head_dim=8,
    )
    with torch.device("meta"):
        net = getattr(transformers, f"{name}ForCausalLM")(config)
        tokens = torch.zeros(2, 1 << 20).long()
    graph = sw.capture(net, (tokens,))
    assert max(value.numel for op in graph.ops for value in op.outputs) == 2 * (1 << 20) * 64
    windows = [op.args[3] for op in graph.ops if op.target is windowed_attention]
    assert windows == [512] * (1 if types else 2)
    assert all(op.inputs[1].shape[1] == 2 for op in graph.ops if op.target is windowed_attention)
    causal = [op for op in graph.ops if op.target is ATTENTION]
    assert [op.kwargs["is_causal"] for op in causal] == [True] * (2 - len(windows))


def test_keys_that_are_repeated_for_groups_of_queries_are_read_once() -> None:
    class Grouped(nn.Module):
        def forward(self, x: Tensor, keys: Tensor) -> Tensor:
            mask = (places(x) <= places(x)[:, None]) & (places(x) > places(x)[:, None] - 3)
            keys = keys[:, :, None].expand(2, 2, 3, 7, 4).reshape(2, 6, 7, 4)
            return F.scaled_dot_product_attention(x, keys, keys, mask)

    x, keys = torch.randn(2, 6, 7, 4), torch.randn(2, 2, 7, 4)
    graph = sw.capture(Grouped(), (x, keys))
    assert [op.target for op in graph.ops] == [windowed_attention]
    torch.testing.assert_close(interpret(graph, {}, {}, (x, keys))[0], Grouped()(x, keys))


def test_a_mask_of_a_window_is_kept_where_attention_drops_weights() -> None:
    class Dropping(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            mask = torch.ones(6, 6, dtype=torch.bool).tril().triu(-2)
            return F.scaled_dot_product_attention(x, x, x, mask, 0.5)

    graph = sw.capture(Dropping(), (torch.randn(2, 3, 6, 4),))
    (op,) = (op for op in graph.ops if op.target is ATTENTION)
    assert len(op.inputs) == 4
