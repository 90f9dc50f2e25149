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


@pytest.mark.parametrize(
    ("target", "parameters"),
    [
        (aten.normal_functional.default, ()),
        (aten.uniform.default, (-1.0, 1.0)),
        (aten.exponential.default, ()),
        (aten.cauchy.default, ()),
        (aten.log_normal.default, ()),
        (aten.geometric.default, (0.5,)),
        (aten.random.to, (3,)),
        (aten.poisson.default, ()),
        (aten._standard_gamma.default, ()),
    ],
)
def test_fills_draw_for_every_shard(target, parameters) -> None:
    # Some of them have no derivative, and are recorded without autograd.
    found = rule_of(op_of(target, rand(6, 4, dtype=torch.float64) + 0.5, *parameters))
    assert found is not None
    assert found.random
    assert found.factors == ("b", "s")


def test_only_rows_of_a_distribution_can_be_sharded() -> None:
    weights = rand(6, 4, dtype=torch.float64)
    assert check(aten.multinomial.default, weights, 2, True).factors == ("b",)
    assert check(aten.multinomial.default, weights[0], 2, True).factors == ()
    concentrations = rule_of(op_of(aten._sample_dirichlet.default, weights))
    assert concentrations is not None and concentrations.factors == ("b",)
