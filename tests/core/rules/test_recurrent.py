"""Rules of recurrent layers, cut over the batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn, randn

from core.rules.oracle import check

aten = torch.ops.aten


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("batch_first", [True, False])
def test_the_batch_may_be_cut(layer, batch_first) -> None:
    net = layer(3, 2, batch_first=batch_first, dtype=torch.float64)
    weights = [parameter.detach() for parameter in net.parameters()]
    states = [randn(1, 4, 2, dtype=torch.float64) for _ in range(2)]
    target = {nn.LSTM: aten.lstm, nn.GRU: aten.gru, nn.RNN: aten.rnn_tanh}[layer].input
    x = randn(4, 5, 3, dtype=torch.float64) if batch_first else randn(5, 4, 3, dtype=torch.float64)
    state = states if layer is nn.LSTM else states[0]
    found = check(target, x, state, weights, True, 1, 0.0, True, False, batch_first)
    assert found.factors == ("b",)
    assert str(found).startswith("b _ _, _ b _" if batch_first else "_ b _, _ b _")
    assert not found.random
