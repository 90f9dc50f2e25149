"""Tensors in place of Python numbers give results of the dtypes of numbers."""

from __future__ import annotations

import operator
from itertools import product

import pytest
import torch
from torch import Tensor

from shardwright.core.capture.number_promotion import NumberPromotion
from shardwright.core.graph.python_call import number_tensor

DTYPES = (torch.bool, torch.int32, torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("function", [torch.mul, torch.div, operator.gt, operator.add])
def test_an_operator_on_a_tensor_and_a_number_is_that_on_the_number(function: object) -> None:
    for dtype, shape, number in product(DTYPES, ((), (3,)), (True, 3, 0.3)):
        tensor = torch.full(shape, 1.7).to(dtype)
        promotion = NumberPromotion([tensor])
        result = promotion.result(function(tensor, promotion.argument(number_tensor(number))))
        wanted = function(tensor, number)
        torch.testing.assert_close(result, wanted, msg=f"{dtype}, {shape}, {number}")


def test_a_number_beside_several_tensors_widens_none() -> None:
    condition, small = torch.tensor(True), torch.tensor(2.0, dtype=torch.bfloat16)

    def chosen(other: Tensor | float, number: float) -> Tensor:
        promotion = NumberPromotion([condition, *([other] if isinstance(other, Tensor) else [])])
        argument = promotion.argument(number_tensor(number))
        return promotion.result(torch.where(condition, argument, other))

    for other in (small, small[None], 0.0):
        torch.testing.assert_close(chosen(other, 0.5), torch.where(condition, 0.5, other))
