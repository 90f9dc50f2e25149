"""Operators in place are replaced by those that return new tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from core.capture.test_capture import Function, assert_equal, x


def test_python_operators_in_place_have_the_ones_that_return_a_tensor() -> None:
    def shifted(net: Function, x: Tensor, counts: Tensor) -> Tensor:
        bits = counts.clone()
        bits <<= 3
        bits >>= 1
        bits &= 14
        bits |= 1
        bits ^= counts
        return (x @ net.weight).sum(-1) * bits

    assert_equal(Function(shifted), (x(), torch.arange(4)), {})
