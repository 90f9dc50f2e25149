from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor, rand, randn
from torch.nn import Buffer

from core.rules.oracle import Case, check, cuts_of, op_of
from shardwright.core.graph.custom_ops import batch_norm_train, instance_norm_train
from shardwright.core.rules import rule_of

aten = torch.ops.aten
F64 = torch.float64


def vectors(channels: int, count: int) -> list[Tensor]:
    return [rand(channels, dtype=F64) + 0.5 for _ in range(count)]


def test_layer_norm_is_cut_along_the_normalized_dimensions() -> None:
    w, b = vectors(8, 2)
    found = check(aten.layer_norm.default, randn(6, 4, 8, dtype=F64), [8], w, b)
    assert str(found) == "b s t, t, t -> b s t"
    w, b = rand(4, 8, dtype=F64), rand(4, 8, dtype=F64)
    found = check(aten.layer_norm.default, randn(6, 4, 8, dtype=F64), [4, 8], w, b)
    assert str(found) == "b s t, s t, s t -> b s t"


def test_layer_norm_that_returns_its_statistics_keeps_the_normalized_dimension_whole() -> None:
    x, (w, b) = randn(6, 4, 8, dtype=F64), vectors(8, 2)
    assert len(check(aten.layer_norm.default, x, [8]).factors) == 3
    assert len(check(aten.native_layer_norm.default, x, [8], w, b, 1e-5).factors) == 2


@pytest.mark.parametrize(("dim", "factors"), [(0, ("b",)), (2, ("t",)), (-1, ())])
def test_weight_norm_is_cut_between_slices_of_their_own_norms(dim, factors) -> None:
    v = randn(6, 4, 8, dtype=F64)
    g = torch.ones((), dtype=F64) if dim < 0 else torch.norm_except_dim(v, 2, dim)
    assert check(aten._weight_norm.default, v, g, dim).factors == factors


def test_layer_norm_by_keyword() -> None:
    w, b = vectors(8, 2)
    found = check(aten.layer_norm.default, randn(6, 8, dtype=F64), [8], bias=b, weight=w)
    assert found.inputs == (("b", "s"), ("s",), ("s",))


def test_rms_norm() -> None:
    x, (w,) = randn(6, 4, 8, dtype=F64), vectors(8, 1)
    assert len(check(aten.rms_norm.default, x, [8], w, 1e-6).factors) == 3
    assert len(check(aten.rms_norm.default, x, [4, 8]).factors) == 3
    assert len(check(aten._fused_rms_norm.default, x, [8], w, 1e-6).factors) == 2


def test_batch_norm_of_evaluation_is_cut_everywhere() -> None:
    w, b, *stats = vectors(4, 4)
    mean, var = map(Buffer, stats)
    rest = (False, 0.1, 1e-5, False)
    found = check(aten.batch_norm.default, randn(6, 4, 2, 4, dtype=F64), w, b, mean, var, *rest)
    assert found.factors == ("b", "c", "s", "t")
    x = randn(6, 4, dtype=F64)
    assert check(aten.batch_norm.default, x, None, None, mean, var, *rest).factors == ("b", "c")


def test_batch_norm_that_would_write_its_statistics_has_no_rule() -> None:
    x, stats = randn(6, 4, dtype=F64), vectors(4, 2)
    op = op_of(aten.batch_norm.default, x, None, None, *stats, True, 0.1, 1e-5, False)
    assert rule_of(op) is None


@pytest.mark.parametrize("shape", [(6, 4), (6, 4, 6), (4, 2, 4, 2), (2, 2, 2, 2, 2)])
def test_statistics_of_the_batch_are_those_of_one_device(shape) -> None:
    w, b, mean, var = vectors(shape[1], 4)
    x = randn(*shape, dtype=F64) * 3 + 100
    found = check(batch_norm_train, x, w, b, mean, var, 0.1, 1e-5)
    assert found.factors == ("b", "c", "s", "t", "u")[: len(shape)]
    assert "c" not in found.complete


def test_running_statistics_agree_to_rounding() -> None:
    w, b, mean, var = vectors(4, 4)
    args = (randn(6, 4, 4, dtype=F64) + 100, w, b, mean, var, 0.1, 1e-5)
    op = op_of(batch_norm_train, *args)
    found = rule_of(op)
    assert found is not None
    case = Case(op, list(args[:5]), found, tolerance=1e-12)
    for mesh, cuts in cuts_of(found):
        case.compare(mesh, cuts)


def test_running_statistics_may_be_missing() -> None:
    x = randn(6, 4, 2, dtype=F64)
    assert check(batch_norm_train, x, None, None, None, None, 0.1, 1e-5).outputs == (
        ("b", "c", "s"),
    )
    w, b = vectors(4, 2)
    assert check(batch_norm_train, x, w, b, None, None, 0.1, 1e-5).factors == ("b", "c", "s")


def test_channels_are_normalized_without_talking() -> None:
    w, b, mean, var = vectors(4, 4)
    op = op_of(batch_norm_train, randn(6, 4, dtype=F64), w, b, mean, var, 0.1, 1e-5)
    found = rule_of(op)
    assert found is not None
    assert found.reductions(op, {"b": 1, "c": 4}) == ()
    pooled = found.reductions(op, {"b": 2, "c": 4})
    assert [(r.shape, r.factors, r.varying) for r in pooled] == [((1,), ("b",), True)] * 2


def test_half_precision_is_summed_in_single_precision() -> None:
    x = randn(6, 4, dtype=torch.bfloat16)
    op = op_of(batch_norm_train, x, None, None, None, None, 0.1, 1e-5)
    found = rule_of(op)
    assert found is not None
    assert {r.dtype for r in found.reductions(op, {"b": 2})} == {torch.float32}


def test_instance_norm() -> None:
    w, b, *stats = vectors(4, 4)
    mean, var = map(Buffer, stats)
    x = randn(6, 4, 2, 4, dtype=F64)
    rest = (0.1, 1e-5, False)
    own = check(aten.instance_norm.default, x, w, b, None, None, True, *rest)
    assert own.factors == ("b", "c", "s", "t")
    running = check(aten.instance_norm.default, x, w, b, mean, var, False, *rest)
    assert running.factors == ("b", "c", "s", "t")
    op = op_of(aten.instance_norm.default, x, w, b, mean, var, True, *rest)
    assert rule_of(op) is None


def test_running_statistics_of_instances_are_means_over_all_devices() -> None:
    w, b, mean, var = vectors(4, 4)
    x = randn(6, 4, 2, 3, dtype=F64)
    found = check(instance_norm_train, x, w, b, mean, var, 0.1, 1e-5)
    assert found.factors == ("b", "c", "s", "t")
    without_weights = check(instance_norm_train, x, None, None, mean, var, 0.1, 1e-5)
    assert without_weights.factors == found.factors


def test_statistics_have_a_gradient_if_any_output_has_one_of_the_input() -> None:
    w, b, mean, var = vectors(4, 4)
    op = op_of(batch_norm_train, Buffer(randn(6, 4, dtype=F64)), w, b, mean, var, 0.1, 1e-5)
    for requires_grad, requires_other_grad in product((False, True), repeat=2):
        x = replace(
            op.inputs[0], requires_grad=requires_grad, requires_other_grad=requires_other_grad
        )
        given = replace(op, args=(x, *op.args[1:]))
        found = rule_of(given)
        assert found is not None and found.reductions is not None
        (reduction, *_) = found.reductions(given, {"b": 2})
        assert reduction.differentiable == (requires_grad or requires_other_grad)
