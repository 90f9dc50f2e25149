"""The hash of a tensor's contents tells tensors apart by any element and by its place."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from shardwright.core.agreement.content_hash import (
    COLUMNS,
    SAMPLE,
    WORD,
    content_hash,
    host_sample_hash,
    sample_of,
)

DTYPES = (torch.bool, torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex128)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 5, 16, COLUMNS + 3, 3 * COLUMNS * 8 + 5])
def test_every_element_counts(dtype: torch.dtype, count: int) -> None:
    torch.manual_seed(0)
    tensor = torch.randint(2, (count,)).to(dtype)
    for place in {0, count // 2, count - 1}:
        other = tensor.clone()
        other[place] = other[place] == 0
        assert content_hash(tensor) != content_hash(other)
    assert content_hash(tensor) == content_hash(tensor.clone())


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8])
def test_small_numbers_in_any_order_have_hashes_of_their_own(dtype: torch.dtype) -> None:
    every = [torch.tensor(bits, dtype=dtype) for bits in product(range(2), repeat=10)]
    assert len({content_hash(tensor).item() for tensor in every}) == len(every)


def test_rows_and_columns_that_change_places_change_the_hash() -> None:
    tensor = torch.arange(4 * COLUMNS).view(4, COLUMNS)
    changed = [tensor.flip(0), tensor.flip(1), tensor.roll(1, 0), tensor.roll(1, 1)]
    assert len({content_hash(each).item() for each in (tensor, *changed)}) == 5


def test_views_have_the_hash_of_their_elements() -> None:
    tensor = torch.randn(6, 7, dtype=torch.complex64)
    for view in (
        tensor.t(),
        tensor[1:, 3],
        tensor.conj(),
        tensor[0].expand(3, 7),
        tensor[:0],
        tensor[0, 0].expand(3)[:1],
    ):
        assert content_hash(view) == content_hash(view.clone().resolve_conj())
    assert content_hash(torch.tensor(3)) != content_hash(torch.tensor(4))


def sampled(*tensors: torch.Tensor) -> int:
    return host_sample_hash(tensors)


def test_a_sample_tells_other_rows_apart_and_is_of_all_elements_of_a_small_tensor() -> None:
    large = torch.randn(64, 64, 64)
    assert len(sample_of(large)) <= 2 * SAMPLE * WORD
    assert sampled(large) == sampled(large.clone())
    for other in (large.flip(0), large.roll(1, 0), large + 1):
        assert sampled(large) != sampled(other)
    small = torch.randn(2 * SAMPLE)
    other = small.clone()
    other[17] += 1
    assert len({sampled(small), sampled(other), sampled(small, other), sampled(other, small)}) == 4
    halves = torch.ones(3, dtype=torch.bfloat16)
    assert sampled(halves[1:]) == sampled(halves[:2])
    turned = torch.randn(4, 3, dtype=torch.complex64)
    assert sampled(turned.t().conj()) == sampled(turned.t().conj().clone().resolve_conj())
    assert sampled(small[:0]) == 0 and sampled(torch.tensor(3)) == sampled(torch.tensor([3]))
