"""Rules of operators that make tensors."""

from __future__ import annotations

import torch
from torch import randn

from core.rules.oracle import check, op_of
from shardwright.core.rules import rule_of

aten = torch.ops.aten
DOUBLE = {"dtype": torch.float64}


def test_filled_tensors_are_made_in_parts() -> None:
    found = check(aten.full.default, [4, 6], 3.0)
    assert str(found) == "-> b s"
    assert found.sizes == 0
    check(aten.zeros.default, [12])
    assert check(aten.new_full.default, randn(3, **DOUBLE), [4, 6], 2.0).sizes == 1


def test_a_tensor_that_gives_only_its_dtype_is_not_cut() -> None:
    assert str(check(aten.new_ones.default, randn(4, **DOUBLE), [4, 6])) == "_ -> b s"


def test_likenesses_follow_their_input() -> None:
    assert str(check(aten.zeros_like.default, randn(4, 6, **DOUBLE))) == "b s -> b s"
    assert str(check(aten.full_like.default, randn(4, **DOUBLE), 2)) == "b -> b"


def test_counting_is_done_whole_on_every_device() -> None:
    for op in (
        op_of(aten.arange.start, 2, 10),
        op_of(aten.eye.default, 4),
        op_of(aten.scalar_tensor.default, 1.0),
    ):
        found = rule_of(op)
        assert found is not None and found.factors == ()


def test_random_tensors_are_seeded_by_the_plan() -> None:
    assert check(aten.rand.default, [4, 6]).random
    assert check(aten.randint.low, 2, 5, [4, 6]).sizes == 2
    assert check(aten.randn_like.default, randn(4, **DOUBLE)).random
    permutation = rule_of(op_of(aten.randperm.default, 4))
    assert permutation is not None and permutation.random and not permutation.factors
    assert not check(aten.ones.default, [4, 6]).random
