"""Attention in a sliding window, block by block, against one mask of all pairs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import grad
from torch.nn import functional as F
from torch.testing import assert_close

from shardwright.core.graph import blockwise_attention
from shardwright.core.graph.custom_ops import masked_attention, windowed_attention


def tensors(heads: int, queries: int, keys: int, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Four heads of queries, and so many of keys and values."""
    torch.manual_seed(0)
    options = {"dtype": torch.float64, **options}
    shapes = ((2, 4, queries, 8), (2, heads, keys, 8), (2, heads, keys, 8))
    query, key, value = (torch.randn(shape, **options).requires_grad_() for shape in shapes)
    return query, key, value


def masked(query: Tensor, key: Tensor, value: Tensor, window: int, scale: float | None) -> Tensor:
    rows, columns = query.shape[-2], key.shape[-2]
    mask = torch.ones(rows, columns, dtype=torch.bool, device=query.device)
    mask = mask.tril(columns - rows).triu(columns - rows - window + 1)
    key, value = (each.repeat_interleave(4 // key.shape[1], 1) for each in (key, value))
    return F.scaled_dot_product_attention(query, key, value, mask, scale=scale)


def assert_same(
    found: Tensor, expected: Tensor, inputs: tuple[Tensor, ...], **at_most: Any
) -> None:
    gradient = torch.randn_like(expected)
    assert_close(found, expected, **at_most)
    pairs = zip(grad(found, inputs, gradient), grad(expected, inputs, gradient), strict=True)
    for one, other in pairs:
        assert_close(one, other, **at_most)


@pytest.mark.parametrize(
    ("heads", "queries", "keys", "window"),
    [
        (2, 10, 10, 3),
        (4, 13, 13, 30),
        (1, 13, 13, 1),
        (2, 17, 20, 4),
        (2, 40, 47, 20),
        (2, 5, 25, 21),
    ],
)
def test_blocks_compute_what_one_mask_does(
    monkeypatch: pytest.MonkeyPatch, heads: int, queries: int, keys: int, window: int
) -> None:
    monkeypatch.setattr(blockwise_attention, "MIN_ROWS", 4)
    read = tensors(heads, queries, keys)
    found = windowed_attention(*read, window, 0.3, start=keys - queries)
    assert_same(found, masked(*read, window, 0.3), read)


def test_keys_before_the_first_position_are_not_read() -> None:
    query, key, value = tensors(2, 4, 8)
    found = windowed_attention(query, key, value, 4, start=1)
    expected = masked(query, key[..., 3:, :], value[..., 3:, :], 4, None)
    assert_same(found, expected, (query, key, value))
    assert not grad(windowed_attention(query, key, value, 4, start=1).sum(), key)[0][
        ..., :3, :
    ].any()


def test_a_block_reads_the_keys_of_its_window_only() -> None:
    query, key = torch.empty(1, 1, 2048, 2), torch.empty(1, 1, 2560, 2)
    mask = blockwise_attention._BlockMask((query, key, key), (), "", True, 1024, 512)
    read = [(rows, keys) for (rows, keys, _), _ in mask.blocks()]
    assert [(s.start, s.stop) for s, _ in read] == [(n, n + 256) for n in range(0, 2048, 256)]
    assert [keys.stop - rows.stop for rows, keys in read] == [512] * 8
    assert max(keys.stop - keys.start for _, keys in read) == 1024 + 255


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 9])
def test_numbers_of_queries_and_keys_hide_keys(
    monkeypatch: pytest.MonkeyPatch, causal: bool, window: int | None
) -> None:
    monkeypatch.setattr(blockwise_attention, "MIN_ROWS", 4)
    query, key, value = read = tensors(2, 30, 30)
    document = torch.arange(30).expand(2, -1) // torch.tensor([[7], [11]])
    padding = torch.arange(30).expand(2, -1) < torch.tensor([[30], [26]])
    vectors = document[:, None, :, None], document[:, None, None], padding[:, None, None]
    mask = (vectors[0] == vectors[1]) & vectors[2]
    places = torch.arange(30)
    if causal:
        mask = mask & (places <= places[:, None])
    if window is not None:
        mask = mask & (places > places[:, None] - window)
    found = masked_attention(*read, vectors, "eq 0 1, all 2", causal, window)
    key, value = (each.repeat_interleave(2, 1) for each in (key, value))
    assert_same(found, F.scaled_dot_product_attention(query, key, value, mask), read)


def test_a_block_reads_the_keys_of_its_documents_only() -> None:
    query = torch.empty(1, 1, 1024, 2)
    document = torch.arange(1024) // 300
    vectors = document[:, None], document[None]
    mask = blockwise_attention._BlockMask((query, query), vectors, "eq 0 1", False, None, 0)
    read = [(keys.start, keys.stop) for (_, keys, _), _ in mask.blocks()]
    assert read == [(0, 300), (0, 600), (300, 900), (600, 1024)]


def test_it_is_an_operator_as_pytorch_checks_them() -> None:
    options = ((), "", True, 3, None, 3, 0)
    operator = blockwise_attention.blockwise_attention
    torch.library.opcheck(operator, (*tensors(2, 6, 9), *options))
    document = torch.arange(6) // 4
    vectors = (document[:, None], document[None])
    options = (vectors, "eq 0 1", False, None, None, 0, 0)
    torch.library.opcheck(operator, (*tensors(2, 6, 6), *options))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("window", [1, 70, 256, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_of_a_gpu_compute_the_same(window: int, dtype: torch.dtype) -> None:
    query, key, value = tensors(2, 600, 700, dtype=dtype, device="cuda")
    found = windowed_attention(query, key, value, window, start=100)
    expected = masked(query, key, value, window, None)
    assert_same(found, expected, (query, key, value), rtol=0.05, atol=0.02)


def test_results_of_flash_kernels_have_the_declared_strides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def kernel(query: Tensor, *_: Any, **options: Any) -> tuple[Tensor, Tensor]:
        out = torch.zeros_like(query, memory_format=torch.contiguous_format)
        return out, torch.zeros(query.shape[0], query.shape[2], query.shape[1])

    monkeypatch.setattr(blockwise_attention, "has_flash", lambda query, value: True)
    monkeypatch.setattr(
        blockwise_attention, "aten", SimpleNamespace(_flash_attention_forward=kernel)
    )
    read = [tensor.detach() for tensor in tensors(4, 6, 6)]
    declared = windowed_attention(*(tensor.to("meta") for tensor in read), 3, None)
    assert windowed_attention(*read, 3, None).stride() == declared.stride()
