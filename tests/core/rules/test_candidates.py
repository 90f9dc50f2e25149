"""Largest and smallest elements along sharded dimensions, selected among those of all shards."""

from __future__ import annotations

from math import nan

import pytest
import torch
from torch import rand, tensor

from core.rules.oracle import check, op_of
from shardwright.core.rules import rule_of

aten = torch.ops.aten


@pytest.mark.parametrize("k", [1, 2, 5, 8])
@pytest.mark.parametrize("largest", [True, False])
def test_the_first_elements_are_those_of_all_shards(k: int, largest: bool) -> None:
    x = rand(4, 8, dtype=torch.float64)
    assert str(check(aten.topk.default, x, k, 1, largest)) == "b s -> b _, b _"
    assert str(check(aten.topk.default, x, min(k, 4), 0, largest)) == "b s -> _ s, _ s"
    assert str(check(aten.topk.default, torch.randperm(8), k, -1, largest)) == "b -> _, _"


@pytest.mark.parametrize("k", [1, 3, 5, 8])
def test_the_kth_element_is_that_of_all_shards(k: int) -> None:
    x = rand(4, 8, dtype=torch.float64)
    assert str(check(aten.kthvalue.default, x, k)) == "b s -> b, b"
    assert str(check(aten.kthvalue.default, x, min(k, 4), 0, True)) == "b s -> _ s, _ s"


def test_nans_are_the_largest_elements() -> None:
    x = tensor([[1.0, nan, 3, 2], [4, 5, 6, nan]], dtype=torch.float64)
    for largest in (True, False):
        check(aten.topk.default, x, 2, 1, largest)
    for k in (1, 2, 3, 4):
        check(aten.kthvalue.default, x, k)


def test_a_device_sends_as_many_elements_as_are_selected() -> None:
    op = op_of(aten.kthvalue.default, rand(4, 64), 62)
    rule = rule_of(op)
    assert rule is not None
    # The 62nd smallest of 64 elements is the third largest.
    assert [r.shape for r in rule.reductions(op, {"s": 2})] == [(2, 1, 4, 3)] * 2


def test_scalars_are_their_own_first_element() -> None:
    assert str(check(aten.topk.default, tensor(3.0), 1)) == "() -> (), ()"
    assert str(check(aten.kthvalue.default, tensor(3.0), 1)) == "() -> (), ()"
