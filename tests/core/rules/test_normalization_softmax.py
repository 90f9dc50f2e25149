import pytest
import torch
from torch import randn

from core.rules.oracle import check

aten = torch.ops.aten


@pytest.mark.parametrize("target", [aten.softmax.int, aten.log_softmax.int, aten._safe_softmax])
@pytest.mark.parametrize("dim", [-1, 0, 1])
def test_all_but_the_normalized_dimension_may_be_cut(target, dim) -> None:
    target = target if isinstance(target, torch._ops.OpOverload) else target.default
    found = check(target, randn(6, 4, 4, dtype=torch.float64), dim)
    assert len(found.factors) == 2
    assert found.outputs[0][dim] is None


@pytest.mark.parametrize("target", [aten._softmax.default, aten._log_softmax.default])
def test_the_forms_without_dtype_are_cut_alike(target) -> None:
    assert check(target, randn(6, 4, dtype=torch.float64), 1, False).factors == ("b",)


@pytest.mark.parametrize(
    "target", [aten._softmax_backward_data.default, aten._log_softmax_backward_data.default]
)
def test_their_gradients_are_cut_alike(target) -> None:
    gradient, result = (randn(6, 4, dtype=torch.float64) for _ in range(2))
    assert check(target, gradient, result.softmax(1), 1, torch.float64).factors == ("b",)


def test_a_vector_is_not_cut() -> None:
    assert check(aten.softmax.int, randn(4, dtype=torch.float64), 0).factors == ()
