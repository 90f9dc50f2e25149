"""Rules of pointwise operators, cut in every way."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, rand, randn, tensor
from torch.nn import Buffer

from core.rules.oracle import check, op_of
from shardwright.core.rules import rule_of

aten = torch.ops.aten

pytestmark = pytest.mark.usefixtures("float64")


def test_inputs_are_whole_where_they_are_broadcast() -> None:
    found = check(aten.add.Tensor, randn(2, 1, 12), randn(4, 1))
    assert str(found) == "b _ t, s _ -> b s t"
    assert str(check(aten.mul.Tensor, randn(4, 6), tensor(2.0))) == "b s, () -> b s"
    assert str(check(aten.div.Tensor, tensor(2.0), rand(()) + 1)) == "(), () -> ()"


@pytest.mark.parametrize(
    ("target", "arguments"),
    [
        (aten.relu.default, ()),
        (aten.gelu.default, ()),
        (aten.silu.default, ()),
        (aten.pow.Tensor_Scalar, (2,)),
        (aten.clamp.default, (-0.5, 0.5)),
        (aten.to.dtype, (torch.float32,)),
        (aten._to_copy.default, ()),
        (aten.clone.default, ()),
        (aten.contiguous.default, ()),
        (aten.detach.default, ()),
        (aten.log_sigmoid.default, ()),
        (aten.hardswish.default, ()),
        (aten.masked_fill.Scalar, (tensor([True, False] * 6), 0.0)),
        (aten.masked_fill.Tensor, (tensor([True, False] * 6), tensor(1.0))),
        (aten.clamp.Tensor, (randn(4, 1), None)),
        (aten.maximum.default, (randn(12),)),
        (aten.lerp.Tensor, (randn(4, 12), rand(12))),
        (aten.addcmul.default, (randn(12), randn(4, 1))),
        (aten.type_as.default, (randn(3),)),
        (aten.to.other, (randn(3),)),
        (aten.eq.Scalar, (0,)),
        (aten.rsub.Tensor, (randn(12),)),
        (aten.elu_backward.default, (1.0, 1.0, 1.0, False, randn(4, 12))),
        (aten.hardswish_backward.default, (randn(4, 12),)),
        (aten.hardtanh_backward.default, (randn(4, 12), -0.5, 0.5)),
        (aten.leaky_relu_backward.default, (randn(4, 12), 0.2, False)),
        (aten.softplus_backward.default, (randn(4, 12), 1.0, 20.0)),
    ],
)
def test_shards_of_pointwise_operators_are_shards_of_the_result(target, arguments) -> None:
    doubles = [
        a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in arguments
    ]
    found = check(target, randn(4, 12), *doubles)
    assert found.factors == ("b", "s")


def test_a_condition_is_broadcast_too() -> None:
    found = check(aten.where.self, tensor([[True], [False]]), randn(4, 2, 6), randn(6))
    assert str(found) == "s _, b s t, t -> b s t"


def test_the_weight_of_prelu_goes_with_the_channels() -> None:
    assert str(check(aten.prelu.default, randn(2, 4, 6), rand(4))) == "b s t, s -> b s t"
    assert str(check(aten.prelu.default, randn(2, 4, 6), rand(1))) == "b s t, _ -> b s t"


def test_boundaries_stay_whole() -> None:
    found = check(aten.bucketize.Tensor, randn(4, 6), torch.linspace(-1, 1, 4))
    assert str(found) == "b s, _ -> b s"
    found = check(aten.searchsorted.Tensor, torch.linspace(-1, 1, 4), randn(4, 6))
    assert str(found) == "_, b s -> b s"
    found = check(aten.isin.Tensor_Tensor, torch.arange(24).view(4, 6), torch.tensor([2, 5, 7]))
    assert str(found) == "b s, _ -> b s"


def test_rows_of_boundaries_may_be_cut() -> None:
    rows = randn(4, 2, 5).sort(-1).values
    assert str(check(aten.searchsorted.Tensor, rows, randn(4, 2, 6))) == "b s _, b s t -> b s t"


def test_conjugates_may_be_cut() -> None:
    assert str(check(aten._conj.default, randn(4, 6, dtype=torch.complex128))) == "b s -> b s"


def test_what_draws_random_numbers_says_so() -> None:
    drawn = rule_of(op_of(aten.bernoulli.p, rand(4, 6), 0.5))
    assert drawn is not None and drawn.random and drawn.factors == ("b", "s")
    assert not check(aten.sin.default, rand(4)).random


def test_operators_that_write_into_an_input_have_no_rule() -> None:
    assert rule_of(op_of(aten.add_.Tensor, randn(4), randn(4))) is None


def test_rounding_to_quantized_values_is_elementwise_with_parameters_per_channel() -> None:
    x = randn(4, 6, 2, dtype=torch.float32)
    scale = Buffer(rand(6, dtype=torch.float32) + 0.1)
    zero_point = Buffer(torch.ones(6, dtype=torch.int32))
    per_channel = aten.fake_quantize_per_channel_affine.default
    assert str(check(per_channel, x, scale, zero_point, 1, -8, 7)) == "b s t, s, s -> b s t"
    per_tensor = aten.fake_quantize_per_tensor_affine.tensor_qparams
    found = check(per_tensor, x, Buffer(scale[:1]), Buffer(zero_point[:1]), -8, 7)
    assert found.factors == ("b", "s", "t")
