"""Group normalization, cut in every way."""

from __future__ import annotations

import pytest
import torch
from torch import rand, randn

from core.rules.oracle import check

aten = torch.ops.aten
F64 = torch.float64


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_channels_are_cut_between_groups_and_space_anywhere(groups) -> None:
    weight, bias = rand(8, dtype=F64), rand(8, dtype=F64)
    found = check(aten.group_norm.default, randn(4, 8, 6, dtype=F64), groups, weight, bias)
    assert found.factors == ("b", "c", "s")


def test_a_plane_without_weights_is_cut_along_both_of_its_dimensions() -> None:
    found = check(aten.group_norm.default, randn(2, 4, 4, 2, dtype=F64), 2)
    assert found.factors == ("b", "c", "s", "t")


def test_groups_of_channels_may_be_cut_with_their_statistics() -> None:
    x, weight, bias = randn(4, 6, 5, dtype=F64), rand(6, dtype=F64), rand(6, dtype=F64)
    found = check(aten.native_group_norm.default, x, weight, bias, 4, 6, 5, 3, 1e-5)
    assert found.outputs == (("b", "c", None), ("b", "c"), ("b", "c"))
    assert found.capacity["c"] == 3
