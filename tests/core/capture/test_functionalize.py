"""Operators in place are replaced by those that return new tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import shardwright as sw
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


def test_arguments_of_operators_in_another_order_are_passed_in_that_order() -> None:
    def changed(net: Function, x: Tensor) -> Tensor:
        return x.exp().polygamma_(1) @ net.weight

    assert_equal(Function(changed), (x(),), {})


def test_operators_that_resize_their_argument_are_refused() -> None:
    net = Function(lambda net, x: x.clone().resize_(2, 2) @ net.weight[:2])
    with pytest.raises(sw.CaptureError, match=r"aten.resize_.default.*works in place"):
        sw.capture(net, (x(),))
