"""Numbers of selected rows are sums of masks, or are refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from core.capture.selections import STEPS, Program, Selecting, assert_equal_to_eager, batch
from shardwright.core.capture.capture import capture
from shardwright.errors import CaptureError


def new_constants(net: Selecting, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    h = net.hidden(x)[mask].mean(-1)
    return F.mse_loss(h, h.new_ones(h.shape[0])) + (h * torch.zeros(len(h))).sum()


EQUAL: dict[str, Program] = {
    "the number of rows": lambda net, x, labels, mask: (
        net.hidden(x)[mask].sum() / x[mask].shape[0] + net.hidden(x)[mask].sum() / x[mask].numel()
    ),
    "new constants": new_constants,
}


@pytest.mark.parametrize("count", EQUAL)
def test_a_number_of_rows_equals_the_model(count: str) -> None:
    assert_equal_to_eager(EQUAL[count])


def halved(net: Selecting, x: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    h = net.hidden(x)[mask]
    return h[: h.shape[0] // 2].mean()


REFUSED: dict[str, tuple[Program, str]] = {
    "half of the rows": (halved, "needs the number of selected rows"),
    "a fixed number of rows": (
        lambda net, x, labels, mask: (
            net.hidden(x)[mask] + torch.ones(4 * STEPS, 1, dtype=x.dtype).cumsum(0)
        ).sum(),
        "needs a fixed number of rows",
    ),
}


@pytest.mark.parametrize("count", REFUSED)
def test_a_number_of_rows_is_refused(count: str) -> None:
    program, text = REFUSED[count]
    with pytest.raises(CaptureError, match=text):
        capture(Selecting(program), batch(0.5))
