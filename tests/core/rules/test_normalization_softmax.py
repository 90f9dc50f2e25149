import pytest
import torch
from torch import randn

from core.rules.oracle import check

aten = torch.ops.aten


@pytest.mark.parametrize("target", [aten.softmax.int, aten.log_softmax.int])
@pytest.mark.parametrize("dim", [-1, 0, 1])
def test_a_softmax_is_cut_along_every_dimension(target, dim) -> None:
    found = check(target, randn(6, 4, 4, dtype=torch.float64), dim)
    assert found.factors == ("b", "s", "t")


@pytest.mark.parametrize("target", [aten._softmax.default, aten._log_softmax.default])
def test_the_forms_without_dtype_are_cut_alike(target) -> None:
    assert check(target, randn(6, 4, dtype=torch.float64), 1, False).factors == ("b", "s")


@pytest.mark.parametrize(
    "target", [aten._softmax_backward_data.default, aten._log_softmax_backward_data.default]
)
def test_their_gradients_are_cut_alike(target) -> None:
    gradient, result = (randn(6, 4, dtype=torch.float64) for _ in range(2))
    assert check(target, gradient, result.softmax(1), 1, torch.float64).factors == ("b",)


def test_a_shard_that_is_masked_in_full_has_no_weight() -> None:
    scores = randn(4, 6, dtype=torch.float64)
    scores[:, 2:] = -torch.inf
    assert check(aten.softmax.int, scores, 1).factors == ("b", "s")


def test_a_softmax_of_rows_without_scores_keeps_its_dimension_whole() -> None:
    found = check(aten._safe_softmax.default, randn(6, 4, 4, dtype=torch.float64), 1)
    assert found.factors == ("b", "t")


def test_a_vector_is_cut() -> None:
    assert check(aten.softmax.int, randn(4, dtype=torch.float64), 0).factors == ("b",)
