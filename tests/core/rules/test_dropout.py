import pytest
import torch
from torch import ones, rand, randn

from core.rules.oracle import check, op_of
from shardwright.core.rules import rule_of

aten = torch.ops.aten


@pytest.mark.parametrize(
    "target", [aten.dropout.default, aten.native_dropout.default, aten.alpha_dropout.default]
)
def test_dropout_draws_for_every_shard(target) -> None:
    found = check(target, ones(6, 4, 2, dtype=torch.float64), 0.5, True)
    assert found.random
    assert len(found.factors) == 3


@pytest.mark.parametrize("p, train", [(0.5, False), (0.0, True)])
def test_dropout_that_drops_nothing_draws_nothing(p, train) -> None:
    found = check(aten.dropout.default, randn(6, 4, dtype=torch.float64), p, train)
    assert not found.random
    assert len(found.factors) == 2


def test_dropout_of_channels_leaves_space_whole() -> None:
    x = ones(4, 6, 2, 2, dtype=torch.float64)
    for target in (aten.feature_dropout.default, aten.feature_alpha_dropout.default):
        found = check(target, x, 0.5, True)
        assert found.random
        assert found.outputs[0][2:] == (None, None)
        assert len(found.factors) == 2


def test_bernoulli_draws() -> None:
    for found in (
        check(aten.bernoulli.default, rand(6, 4, dtype=torch.float64)),
        check(aten.bernoulli.p, ones(6, 4, dtype=torch.int64), 0.5),
    ):
        assert found.random
        assert len(found.factors) == 2


def test_a_tensor_of_probabilities_is_cut_alike() -> None:
    x = rand(6, 4, dtype=torch.float64)
    found = rule_of(op_of(aten.bernoulli.Tensor, x, x.clone()))
    assert found is not None
    assert found.random
    assert found.inputs[0] == found.inputs[1] == found.outputs[0]


def test_tensors_like_another_draw() -> None:
    for target in (aten.rand_like.default, aten.randn_like.default):
        assert check(target, randn(6, 4, dtype=torch.float64)).random
    assert check(aten.randint_like.default, ones(6, 4, dtype=torch.int64), 5).random


def test_normal_numbers_are_drawn_for_every_shard() -> None:
    means, deviations = randn(6, 4, dtype=torch.float64), rand(4, dtype=torch.float64)
    assert check(aten.normal.Tensor_Tensor, means, deviations).random
    assert check(aten.normal.float_float, 0.0, 1.0, [6, 4]).factors == ("b", "s")
