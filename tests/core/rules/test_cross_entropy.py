from typing import Any

import pytest
import torch
from torch import Tensor, randint, randn
from torch.nn import Buffer

from core.rules.oracle import check, op_of
from shardwright.core.graph.custom_ops import cross_entropy
from shardwright.core.rules import rule_of
from shardwright.core.rules.rule import LocalSharding, Reduce

aten = torch.ops.aten
F64 = torch.float64


def r(*shape: int) -> Tensor:
    return randn(*shape, dtype=F64)


def uneven() -> Tensor:
    """Targets of 6 classes whose valid ones are unevenly spread over rows."""
    target = randint(6, (4, 6))
    target[0, :5] = -100
    target[1, 2:] = -100
    target[3] = -100
    return target


WEIGHT = Buffer(torch.arange(6, dtype=F64) + 0.5)
REDUCTIONS = pytest.mark.parametrize("reduction", [0, 1, 2])
SMOOTHING = pytest.mark.parametrize("smoothing", [0.0, 0.1])


@REDUCTIONS
@SMOOTHING
def test_rows_and_classes_may_be_cut(reduction, smoothing) -> None:
    options = {"reduction": reduction, "label_smoothing": smoothing}
    found = check(cross_entropy, r(4, 6, 6), uneven(), **options)
    assert set(found.factors) == {"b", "s", "v"}
    assert found.complete == {"v"}
    assert found.reduced == (set() if reduction == 0 else {"b", "s"})
    found = check(cross_entropy, r(12, 6), randint(6, (12,)), **options)
    assert set(found.factors) == {"b", "v"}


@REDUCTIONS
@SMOOTHING
def test_class_weights_are_cut_with_the_classes(reduction, smoothing) -> None:
    found = check(
        cross_entropy,
        *(r(4, 6, 6), uneven(), WEIGHT),
        reduction=reduction,
        label_smoothing=smoothing,
    )
    assert found.inputs[2] == ("v",)


@REDUCTIONS
@SMOOTHING
@pytest.mark.parametrize("weighted", [False, True])
def test_targets_may_be_probabilities(reduction, smoothing, weighted) -> None:
    options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing}
    args = (r(6, 2, 6), r(6, 2, 6).softmax(-1))
    found = check(cross_entropy, *args, WEIGHT.clone() if weighted else None, **options)
    assert found.inputs[1] == ("b", "s", "v")


@REDUCTIONS
def test_a_class_to_ignore_may_be_a_valid_one(reduction) -> None:
    target = uneven().clamp(min=0)
    for smoothing in (0.0, 0.2):
        check(
            cross_entropy,
            *(r(4, 6, 6), target),
            reduction=reduction,
            ignore_index=0,
            label_smoothing=smoothing,
        )


def test_scores_of_one_row() -> None:
    assert check(cross_entropy, r(6), torch.tensor(4)).factors == ("v",)


def test_large_scores_do_not_overflow() -> None:
    check(cross_entropy, r(4, 6) * 1e4, randint(6, (4,)))


def test_a_masked_class_costs_nothing() -> None:
    logits = r(4, 6)
    logits[:, 3:] = -torch.inf
    check(cross_entropy, logits, randint(3, (4,)))


def test_a_batch_without_a_valid_target_has_no_mean() -> None:
    found = rule_of(op_of(cross_entropy, r(4, 6), torch.full((4,), -100)))
    assert found is not None
    assert "b" in found.factors


def test_classes_pay_two_all_reduces_and_a_mean_over_rows_one_more() -> None:
    op = op_of(cross_entropy, r(4, 6, 6), uneven())
    found = rule_of(op)
    assert found is not None
    assert found.reductions(op, {"b": 1, "s": 1, "v": 1}) == ()
    largest, sums, count = found.reductions(op, {"b": 2, "s": 3, "v": 2})
    assert (largest.operation, largest.shape, largest.differentiable) == ("max", (2, 2), False)
    assert (sums.operation, sums.shape, sums.differentiable) == ("sum", (2, 2, 2), True)
    assert (count.factors, count.shape, count.differentiable) == (("b", "s"), (), False)
    assert not any(r.varying for r in (largest, sums, count))


def test_probabilities_are_not_counted() -> None:
    op = op_of(cross_entropy, r(4, 6), r(4, 6).softmax(-1))
    found = rule_of(op)
    assert found is not None
    assert found.reductions(op, {"b": 2}) == ()


def test_a_mean_of_half_precision_does_not_overflow_as_its_sum_would() -> None:
    logits = torch.full((6, 6), 2.0e4, dtype=torch.float16)
    logits[:, 0] = -2.0e4
    op = op_of(cross_entropy, logits, torch.zeros(6, dtype=torch.int64))
    found = rule_of(op)
    assert found is not None
    assert found.kernel is not None
    twice = Reduce(lambda count: count * 2, lambda count: count * 2, lambda count: count)
    local = LocalSharding({"b": 2, "v": 1}, lambda factor: 0, ((),), (twice,))
    term = found.kernel(op, local)(logits[:3], torch.zeros(3, dtype=torch.int64))
    assert term.dtype == torch.float16
    assert term.item() == 2.0e4


def test_half_precision_is_summed_in_single_precision() -> None:
    op = op_of(cross_entropy, r(4, 6).to(torch.bfloat16), randint(6, (4,)))
    found = rule_of(op)
    assert found is not None
    assert {r.dtype for r in found.reductions(op, {"b": 2, "v": 2})} == {torch.float32}


UNEVEN = torch.tensor([[0, 1], [-100, 3], [-100, -100], [2, 2], [0, -100], [-100, -100]])
"""Targets of 6 rows, valid ones unevenly spread."""


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("weighted", [False, True])
def test_log_probabilities_of_classes(reduction, weighted) -> None:
    weight = (Buffer(torch.arange(4, dtype=F64) + 1),) if weighted else (None,)
    found = check(aten.nll_loss_nd.default, r(6, 4, 2), UNEVEN, *weight, reduction)
    assert set(found.factors) == {"b", "v", "s"}
    assert check(aten.nll_loss_nd.default, r(6, 4), UNEVEN[:, 0], *weight, reduction).factors
    assert check(aten.nll_loss.default, r(6, 4), UNEVEN[:, 1], *weight, reduction).factors
    image = r(6, 4, 2, 1), UNEVEN.unsqueeze(-1)
    assert check(aten.nll_loss2d.default, *image, *weight, reduction).factors


@pytest.mark.parametrize("ignored", [0, 3])
def test_log_probabilities_of_a_class_may_be_ignored(ignored: int) -> None:
    check(aten.nll_loss_nd.default, r(6, 4), randint(4, (6,)), None, 1, ignored)


def test_valid_targets_are_counted_only_for_a_mean() -> None:
    for reduction, expected in ((0, 0), (1, 1), (2, 0)):
        op = op_of(aten.nll_loss_nd.default, r(6, 4), UNEVEN[:, 0], None, reduction)
        found = rule_of(op)
        assert found is not None
        assert len(found.reductions(op, {"b": 2})) == expected
        assert found.reductions(op, {"b": 1}) == ()


@pytest.mark.parametrize("factor", ["s", "v"])
def test_scores_that_an_exchange_has_permuted_have_a_gradient(factor: str) -> None:
    scores, target = r(2, 4, 3, 4), randint(2, (2, 3, 4))
    op = op_of(aten.nll_loss_nd.default, scores, target, None, 2)
    found = rule_of(op)
    assert found is not None and found.kernel is not None
    counts = {name: 2 if name == factor else 1 for name in found.factors}
    kernel = found.kernel(op, LocalSharding(counts, lambda _: 0, ((),)))
    permuted = scores.transpose(1, 3).contiguous().transpose(1, 3).requires_grad_()
    kernel(permuted, target, None, 2).backward()
    assert permuted.grad is not None
