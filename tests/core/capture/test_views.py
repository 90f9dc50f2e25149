"""Writes through views change the elements that the view shows."""

from __future__ import annotations

from torch import Tensor

from core.capture.test_capture import Function, assert_equal, x


def test_a_narrow_that_starts_from_the_end_shows_the_last_elements() -> None:
    def last_rows(net: Function, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x @ net.weight
        z = y * 2
        z.narrow(0, -2, 2).mul_(3)
        return z, y.narrow(1, -2, 2)

    assert_equal(Function(last_rows), (x(),), {})
