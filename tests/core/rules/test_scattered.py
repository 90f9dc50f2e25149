"""Extremes and products of scattered rows, whose rows are sharded in every way."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, randint

from core.rules.oracle import check

aten = torch.ops.aten

REDUCE = pytest.mark.parametrize("reduce", ["prod", "amax", "amin"])


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def scattered(x: Tensor, source: Tensor, reduce: str) -> str:
    index = randint(0, x.shape[1], source.shape)
    return str(check(aten.scatter_reduce.two, x, 1, index, source, reduce))


@REDUCE
def test_rows_may_be_sharded_with_the_dimension_into_which_they_are_scattered(reduce: str) -> None:
    assert scattered(randn(4, 6), randn(4, 12), reduce) == "b v, b e, b e -> b v"
    integers = randint(-9, 9, (4, 6)), randint(-9, 9, (4, 12))
    assert scattered(*integers, reduce) == "b v, b e, b e -> b v"


@REDUCE
def test_equal_rows_of_several_devices_share_the_gradient(reduce: str) -> None:
    scattered(randn(4, 6).round(), randn(4, 12).round(), reduce)
    masked = randn(4, 12)
    scattered(randn(4, 6), masked.masked_fill(masked > 0, -torch.inf), reduce)


@REDUCE
def test_not_a_number_on_one_device_is_the_result_on_all(reduce: str) -> None:
    x, source = randn(4, 6), randn(4, 12)
    x[0, 1] = source[1, 0] = source[2, 11] = torch.nan
    scattered(x, source, reduce)
    # The product of rows that belong to another shard overflows.
    scattered(randn(2, 6), torch.full((2, 12), 1e200, dtype=torch.float64), reduce)
