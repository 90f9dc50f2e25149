"""Masks of attention that say no more than `is_causal` does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright as sw
from shardwright.graph.interpreter import interpret

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
Mask = Callable[[Tensor], Tensor]


class Masked(nn.Module):
    """Attention of `x` to itself, with the mask that a function makes for it."""

    def __init__(self, mask: Mask) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, self.mask(x))


def folded(mask: Mask) -> bool | None:
    """Whether captured attention is causal; None if it reads the mask. Its result is that of the
    module."""
    net, x = Masked(mask), torch.randn(2, 3, 6, 4, dtype=torch.float64)
    graph = sw.capture(net, (x,))
    (op,) = (op for op in graph.ops if op.target is ATTENTION)
    output, _ = interpret(graph, {}, {}, (x,))
    torch.testing.assert_close(output, net(x))
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
OTHER: list[Mask] = [
    lambda x: places(x) <= places(x)[:, None] + 1,
    lambda x: (places(x) <= places(x)[:, None]) & (places(x) > places(x)[:, None] - 3),
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


@pytest.mark.parametrize("mask", OTHER)
def test_any_other_mask_is_kept(mask: Mask) -> None:
    assert folded(mask) is None


def test_no_mask_of_a_transformer_is_held() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32, "vocab_size": 64}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    with torch.device("meta"):
        net, tokens = transformers.LlamaForCausalLM(config), torch.zeros(2, 1 << 20).long()
    graph = sw.capture(net, (tokens,))
    assert max(value.numel for op in graph.ops for value in op.outputs) == 2 * (1 << 20) * 64
    assert next(op for op in graph.ops if op.target is ATTENTION).kwargs["is_causal"]
