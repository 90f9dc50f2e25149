from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from capture.test_capture import Function, assert_equal, x


def variances_of_rows(net: Function, x: Tensor) -> Tensor:
    y = x @ net.weight
    rows = F.gaussian_nll_loss(y, x, y.sum(-1).square(), full=True, reduction="sum")
    return rows + nn.GaussianNLLLoss(eps=0.1)(y, x, y.square())


def load_of_experts(net: Function, x: Tensor) -> Tensor:
    gates = (x @ net.weight).softmax(-1)
    chosen = gates.argmax(-1)
    load, sums = chosen.bincount(minlength=4), torch.bincount(chosen, gates[:, 0].detach(), 5)
    return (gates.mean(0) * load).sum() + (sums * 2).sum()


@pytest.mark.parametrize("function", [variances_of_rows, load_of_experts])
def test_functions_that_look_at_values_are_captured_and_equal(
    function: Callable[[Function, Tensor], Tensor],
) -> None:
    assert_equal(Function(function), (x(),), {})
