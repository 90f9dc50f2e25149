"""Operators along sharded dimensions, whose shards are combined by their statistics."""

from __future__ import annotations

import pytest
import torch
from torch import rand, tensor

from core.rules.oracle import check

aten = torch.ops.aten

TIES = tensor(
    [[1.0, 3, 3, 2, 0, 3], [3, 3, 1, 1, 3, 0], [0, 0, 0, 0, 0, 0], [5, 1, 5, 5, 1, 2]],
    dtype=torch.float64,
)
"""Equal elements in one shard and in several, and a row of zeros."""


@pytest.mark.parametrize(
    ("target", "arguments", "text"),
    [
        (aten.amax.default, ([1],), "b s -> b"),
        (aten.amin.default, ([0], True), "b s -> _ s"),
        (aten.amax.default, ([0, 1],), "b s -> ()"),
        (aten.max.default, (), "b s -> ()"),
        (aten.max.dim, (1,), "b s -> b, b"),
        (aten.min.dim, (0, True), "b s -> _ s, _ s"),
        (aten.argmax.default, (-1,), "b s -> b"),
        (aten.argmin.default, (), "b s -> ()"),
        (aten.prod.dim_int, (1,), "b s -> b"),
        (aten.prod.default, (), "b s -> ()"),
        (aten.var.correction, ([1],), "b s -> b"),
        (aten.var.dim, ([0], False), "b s -> s"),
        (aten.std.correction, ([1],), "b s -> b"),
        (aten.var_mean.correction, ([0, 1],), "b s -> (), ()"),
        (aten.std_mean.correction, ([1],), "b s -> b, b"),
        (aten.linalg_vector_norm.default, (2, [1], True), "b s -> b _"),
        (aten.linalg_vector_norm.default, (3,), "b s -> ()"),
        (aten.norm.ScalarOpt_dim, (1, [0]), "b s -> s"),
        (aten.logsumexp.default, ([1],), "b s -> b"),
        (aten.cumsum.default, (1,), "b s -> b s"),
        (aten.cumprod.default, (0,), "b s -> b s"),
        (aten.logcumsumexp.default, (1,), "b s -> b s"),
        (aten.cummax.default, (1,), "b s -> b s, b s"),
        (aten.cummin.default, (0,), "b s -> b s, b s"),
        (aten.linalg_vector_norm.default, (float("inf"), [1]), "b s -> b"),
        (aten.linalg_vector_norm.default, (float("-inf"), [0], True), "b s -> _ s"),
    ],
)
def test_shards_of_the_dimension_are_combined(target, arguments, text) -> None:
    assert str(check(target, rand(4, 6, dtype=torch.float64), *arguments)) == text
    assert str(check(target, TIES, *arguments)) == text


@pytest.mark.parametrize(
    "target", [aten.amax.default, aten.argmax.default, aten.cumsum.default, aten.cummax.default]
)
def test_shards_of_integers_are_combined(target) -> None:
    dim = [1] if target is aten.amax.default else 1
    assert len(check(target, TIES.long(), dim).factors) == 2


def test_any_and_all() -> None:
    mask = rand(4, 6) > 0.5
    assert str(check(aten.any.dim, mask, 1)) == "b s -> b"
    assert str(check(aten.any.dims, mask, [0, 1])) == "b s -> ()"
    assert str(check(aten.all.default, mask)) == "b s -> ()"
    assert str(check(aten.all.dim, TIES, 1)) == "b s -> b"


def test_a_nan_is_the_maximum_whichever_shard_has_it() -> None:
    x = TIES.clone()
    x[1, 4] = torch.nan
    for target in (aten.amax.default, aten.max.default, aten.argmax.default):
        check(target, x)


def test_half_precision_is_combined_in_single_precision() -> None:
    x = (rand(2, 4096) + 1).bfloat16().requires_grad_(False)
    check(aten.logsumexp.default, torch.nn.Buffer(x), [1])


def test_no_element_replaces_a_nan_or_an_earlier_infinity() -> None:
    inf, nan = float("inf"), float("nan")
    rows = [[-inf, -inf, -inf, -inf, 1, -inf], [0, nan, 1, 2, nan, 3], [inf, -inf, inf, 0, 0, inf]]
    for target in (aten.cummax.default, aten.cummin.default):
        check(target, torch.nn.Buffer(tensor(rows, dtype=torch.float64)), 1)
