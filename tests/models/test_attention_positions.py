"""Rotary positions and ALiBi."""

from __future__ import annotations

import pytest
import torch

from shardwright.models.attention import (
    alibi_features,
    alibi_slopes,
    apply_rotary,
    causal_attention,
    rotary,
)


@pytest.mark.parametrize(
    ("heads", "slopes"),
    [
        (8, [2**-1, 2**-2, 2**-3, 2**-4, 2**-5, 2**-6, 2**-7, 2**-8]),
        (4, [2**-2, 2**-4, 2**-6, 2**-8]),
        (6, [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]),
    ],
)
def test_slopes_are_those_of_the_paper(heads: int, slopes: list[float]) -> None:
    assert alibi_slopes(heads) == slopes


@pytest.mark.parametrize("positions", [16, 200])
def test_features_of_queries_and_keys_act_as_the_bias_of_alibi(positions: int) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 8, positions, 6, dtype=torch.float64)
    slopes = torch.tensor(alibi_slopes(8), dtype=torch.float64)
    place = torch.arange(positions)
    distance = place - place.unsqueeze(-1)
    bias = slopes.reshape(8, 1, 1) * distance
    scores = query @ key.transpose(-1, -2) * 0.3 + bias
    wanted = scores.masked_fill(distance > 0, -torch.inf).softmax(-1) @ value
    longer, keys = alibi_features(query, key, slopes, scale=0.3)
    assert longer.shape[-1] == keys.shape[-1] == 8
    got = causal_attention("fused", longer, keys, value, scale=0.3)
    torch.testing.assert_close(got, wanted)


def test_features_of_positions_are_exact_in_half_precision() -> None:
    zero = torch.zeros(1, 1, 4096, 8, dtype=torch.bfloat16)
    _, keys = alibi_features(zero, zero, torch.ones(1), scale=1.0)
    assert (64 * keys[0, 0, :, 8].int() + keys[0, 0, :, 9].int()).tolist() == list(range(4096))


def test_rotated_queries_and_keys_depend_on_the_distance_only() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 8, dtype=torch.float64)
    angles = rotary(10, 8, 10000.0, like=query)
    every = [apply_rotary(x.expand(1, 1, 10, 8), *angles)[0, 0] for x in (query, key)]
    products = every[0] @ every[1].T
    torch.testing.assert_close(products[7, 5], products[4, 2], rtol=1e-6, atol=1e-6)
    assert (products[7, 5] - products[7, 4]).abs() > 1e-3
