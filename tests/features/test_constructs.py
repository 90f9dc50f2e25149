"""Constructs of PyTorch and Python: each trains as in the eager module, or is refused by name."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint_sequential

import shardwright as sw
from shardwright.errors import CaptureError

Forward = Callable[["Net", Tensor], Tensor]


class Net(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.lstm, self.cell = nn.LSTM(8, 8, batch_first=True), nn.LSTMCell(8, 8)
        self.both = nn.LSTM(8, 4, batch_first=True, bidirectional=True)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.state: tuple[Tensor, Tensor] | None = None
        self.called = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.called(self, x).square().mean()


compiled = torch.compile(lambda x: x.sin() * 2, backend="eager")


@torch.compiler.disable
def disabled(x: Tensor) -> Tensor:
    return x.sin()


def of_compiled_submodule(net: Net, x: Tensor) -> Tensor:
    net.a.compile(backend="eager")
    return net.b(net.a(x))


def checkpointed(reentrant: bool) -> Forward:
    return lambda net, x: checkpoint_sequential(net.layers, 2, net.a(x), use_reentrant=reentrant)


def of_steps(net: Net, x: Tensor) -> Tensor:
    h = c = torch.zeros(len(x), 8)
    for step in x.unbind(1):
        h, c = net.cell(step, (h, c))
    return h


def of_earlier_state(net: Net, x: Tensor) -> Tensor:
    y, (h, c) = net.lstm(x, net.state)
    net.state = h.detach(), c.detach()
    return y


def retained(net: Net, x: Tensor) -> Tensor:
    y = net.a(x)
    y.retain_grad()
    return net.b(y)


def caught(net: Net, x: Tensor) -> Tensor:
    try:
        return net.a(x).view(999)
    except RuntimeError:
        return net.b(net.a(x))


def in_inference_mode(net: Net, x: Tensor) -> Tensor:
    with torch.inference_mode():
        scale = x.mean()
    return net.a(x) * scale.clone()


EQUAL: dict[str, Forward] = {
    "a function that is compiled": lambda net, x: net.b(compiled(net.a(x))),
    "a function that compilation leaves out": lambda net, x: net.b(disabled(net.a(x))),
    "a submodule that is compiled": of_compiled_submodule,
    "checkpoint_sequential": checkpointed(False),
    "reentrant checkpoint_sequential": checkpointed(True),
    "an LSTM": lambda net, x: net.lstm(x)[0],
    "an LSTM of both directions": lambda net, x: net.both(x)[0],
    "an LSTM cell in a loop": of_steps,
    "the state of the last call": of_earlier_state,
    "retain_grad": retained,
    "an error that is caught": caught,
    "a region of inference mode": in_inference_mode,
}


@pytest.mark.parametrize("construct", EQUAL)
def test_a_construct_trains_as_the_eager_module(construct: str) -> None:
    eager, x = Net(EQUAL[construct]), torch.randn(4, 3, 8)
    planned = copy.deepcopy(eager)
    sw.parallelize(planned, sw.plan(planned, (x,), devices=1))
    for _ in range(2):
        losses = planned(x), eager(x)
        torch.testing.assert_close(*losses)
        for loss in losses:
            loss.backward()
    for own, other in zip(planned.parameters(), eager.parameters(), strict=True):
        wanted = torch.zeros_like(other) if other.grad is None else other.grad
        torch.testing.assert_close(torch.zeros_like(own) if own.grad is None else own.grad, wanted)


def packed(net: Net, x: Tensor) -> Tensor:
    sequences = pack_padded_sequence(x, torch.tensor([3, 3, 2, 1]), batch_first=True)
    return pad_packed_sequence(net.lstm(sequences)[0], batch_first=True)[0]


def hooked(net: Net, x: Tensor) -> Tensor:
    y = net.a(x)
    y.register_hook(lambda gradient: 2 * gradient)
    return net.b(y)


REFUSED: dict[str, tuple[Forward, str]] = {
    "packed sequences": (packed, "pass the padded sequences"),
    "a hook of a tensor": (hooked, "registers a hook on a tensor that it computes"),
    "a branch on a value": (
        lambda net, x: net.a(x) if net.a(x).sum() > 0 else net.b(x),
        "this depends on the value of a tensor",
    ),
    "a number of a tensor": (
        lambda net, x: net.a(x) * net.a(x).max().item(),
        "this converts the value of a tensor to a Python number",
    ),
    "an order of selected rows": (
        lambda net, x: net.a(x)[x > 0].sort()[0],
        "`sort` combines rows that a mask selects",
    ),
    "Python's random numbers": (lambda net, x: net.a(x) * random.random(), "draws from `random`"),
}


@pytest.mark.parametrize("construct", REFUSED)
def test_a_construct_is_refused_with_a_way_out(construct: str) -> None:
    forward, text = REFUSED[construct]
    with pytest.raises(CaptureError) as raised:
        sw.plan(Net(forward), (torch.randn(4, 3, 8),), devices=1)
    assert text in str(raised.value) and "sw.local_map(" in str(raised.value)
