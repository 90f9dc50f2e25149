from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.nn.utils.rnn import pack_padded_sequence

from core.capture.test_capture import Function, assert_equal, x
from shardwright.core.capture.capture import capture
from shardwright.errors import CaptureError


def variances_of_rows(net: Function, x: Tensor) -> Tensor:
    y = x @ net.weight
    rows = F.gaussian_nll_loss(y, x, y.sum(-1).square(), full=True, reduction="sum")
    return rows + nn.GaussianNLLLoss(eps=0.1)(y, x, y.square())


def load_of_experts(net: Function, x: Tensor) -> Tensor:
    gates = (x @ net.weight).softmax(-1)
    chosen = gates.argmax(-1)
    load, sums = chosen.bincount(minlength=4), torch.bincount(chosen, gates[:, 0].detach(), 5)
    return (gates.mean(0) * load).sum() + (sums * 2).sum()


def correlations(net: Function, x: Tensor) -> Tensor:
    y = x @ net.weight
    of_rows = torch.cov(y, correction=0).sin() + y[0].cov() * y.corrcoef()
    return (of_rows * torch.cov(y.t() * 2)).sum()


@pytest.mark.parametrize("function", [variances_of_rows, load_of_experts, correlations])
def test_functions_that_look_at_values_are_captured_and_equal(
    function: Callable[[Function, Tensor], Tensor],
) -> None:
    assert_equal(Function(function), (x(),), {})


def packed(net: Function, x: Tensor) -> Tensor:
    lengths = x.argmax(1).clamp(min=1).cpu()
    return pack_padded_sequence(x[..., None], lengths, True, enforce_sorted=False).data.sum()


def test_packed_sequences_are_refused_with_what_to_do() -> None:
    with pytest.raises(CaptureError, match=r"(?s)pack_padded_sequence\(x.*lengths.*by `gather`"):
        capture(Function(packed), (x(),))


def test_a_causal_bias_is_refused_with_the_mask() -> None:
    def attention(net: Function, x: Tensor) -> Tensor:
        q = (x @ net.weight)[None, None]
        return F.scaled_dot_product_attention(q[..., 2:, :], q, q, causal_lower_right(2, 4))

    with pytest.raises(
        CaptureError, match=r"(?s)CausalBias, which cannot.*`torch.ones\(n, m, dtype"
    ):
        capture(Function(attention), (x(),))
