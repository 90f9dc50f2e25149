"""Attention of packed sequences.

PyTorch has its kernels only for CUDA, so they get a form for the CPU here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn, randn
from torch.library import Library, _scoped_library
from torch.nn.attention.varlen import varlen_attn

import shardwright as sw
from core.rules.oracle import check

ENDS = torch.tensor([0, 3, 8], dtype=torch.int32)


def documents(ends: Tensor, *rows: Tensor) -> Iterator[list[Tensor]]:
    """The rows of each document, as `[heads, rows, features]`."""
    for first, last in zip(ends.tolist(), ends.tolist()[1:], strict=False):
        yield [each[first:last].transpose(0, 1) for each in rows]


def joined(documents: Any) -> Tensor:
    return torch.cat(list(documents), 1).transpose(0, 1).contiguous()


def probabilities(query: Tensor, key: Tensor) -> Tensor:
    scores = query @ key.mT / query.shape[-1] ** 0.5
    later = torch.ones_like(scores, dtype=torch.bool).triu(1)
    return scores.masked_fill(later, -torch.inf).softmax(-1)


def forward(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, *args: Any) -> Any:
    """Causal attention of each document by itself."""
    rows, heads, _ = query.shape
    key, value = (each.repeat_interleave(heads // each.shape[1], 1) for each in (key, value))
    result = joined(probabilities(q, k) @ v for q, k, v in documents(ends, query, key, value))
    lse = query.new_zeros(heads, rows, dtype=torch.float)
    return result, lse, torch.zeros(2, dtype=torch.uint64)


def backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any) -> Any:
    (_, heads, size), key_heads = query.shape, key.shape[1]
    key, value = (each.repeat_interleave(heads // key_heads, 1) for each in (key, value))
    queries, keys, values = [], [], []
    # After the result and the log-sum-exp of its scores.
    for g, q, k, v in documents(args[2], gradient, query, key, value):
        chosen, of_chosen = probabilities(q, k), g @ v.mT
        of_scores = chosen * (of_chosen - (chosen * of_chosen).sum(-1, keepdim=True)) / size**0.5
        queries.append(of_scores @ k)
        keys.append(of_scores.mT @ q)
        values.append(chosen.mT @ g)
    of_keys, of_values = (
        joined(each).unflatten(1, (key_heads, -1)).sum(2) for each in (keys, values)
    )
    return joined(queries), of_keys, of_values


@pytest.fixture(autouse=True)
def cpu_form() -> Iterator[None]:
    with _scoped_library("torch_attn", "IMPL") as library:
        assert isinstance(library, Library)
        library.impl("_varlen_attn", forward, "CPU")
        library.impl("_varlen_attn_backward", backward, "CPU")
        yield


@pytest.mark.parametrize("key_heads", [4, 2])
def test_heads_of_packed_sequences_may_be_cut(key_heads) -> None:
    query, key, value = (
        randn(8, heads, 3, dtype=torch.float64) for heads in (4, key_heads, key_heads)
    )
    options = (5, 5, True, None, [-1, 0], key_heads < 4)
    target = torch.ops.torch_attn._varlen_attn.default
    found = check(target, query, key, value, ENDS, ENDS, *options)
    assert found.factors == ("h",)
    assert found.capacity["h"] == key_heads


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).unbind(1)
        y: Tensor = pinned(q, k, v, ends, ends, 5, 5, window_size=(-1, 0))
        return self.out(y.flatten(1)).square().mean()


pinned = sw.shard(varlen_attn, ((1, 4, 1), (1, 4, 1), (1, 4, 1), (1,), (1,)))


def test_a_packed_model_with_sharded_heads_equals_one_device() -> None:
    net, batch = Packed(), (randn(8, 16), ENDS)
    plan = sw.plan(net, batch, devices=4)
    assert plan.strategies["varlen_attn"][0] == (1, 4, 1)
    assert sw.check(net, batch, {}, plan).passes()
