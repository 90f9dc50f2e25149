"""Calls of other sizes: one trace gives the graphs that captures by themselves give."""

import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from sample_models import llama
from shardwright.core.capture.build_graph import CapturedCall
from shardwright.core.capture.capture import capture
from shardwright.core.capture.shapes import Captures
from shardwright.core.graph.graph import Graph
from shardwright.errors import CaptureError


class Longer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin() if x.shape[1] > 16 else x.cos()


class Even(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sin() if x.shape[1] % 2 == 0 else functional.pad(x, (0, 1)).cos()


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ x if x.shape[0] == x.shape[1] else x @ x.T


class ByType(nn.Module):
    """Takes another branch for symbols, which no guard says."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sin() if isinstance(x.shape[1], int) else x.cos()


class Table(nn.Module):
    """Looks a size up."""

    def forward(self, x: Tensor) -> Tensor:
        return x * {16: 2.0, 24: 3.0}.get(x.shape[1], 4.0)


class Loop(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        state, states = x[:, 0], []
        for position in range(x.shape[1]):
            state = (state + x[:, position]).tanh()
            states.append(state)
        return torch.stack(states, 1)


class Numbers(nn.Module):
    """Computes with sizes, and returns them."""

    def forward(self, x: Tensor) -> tuple[Tensor, int, float]:
        batch, length = x.shape
        weights = torch.ones(length).cumsum(0) + torch.arange(length) / max(length // 2, batch)
        return x / length * weights.flip(0), batch * length, length / 2


class Mask(nn.Module):
    """Slices a buffer of the longest length."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(64, 64).tril().bool())

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        scores = x.unsqueeze(2) - x.unsqueeze(1)
        return scores.masked_fill(~self.mask[:length, :length], -1e9).softmax(-1)


class Constant(nn.Module):
    """Makes a tensor of a size."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.tensor([0.5, 1.0 / x.shape[1]]).sum() + torch.tensor(x.shape[1])


class Root(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / math.sqrt(x.shape[1])


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros(x.shape[0], x.shape[1] + 1)
        y[:, 1:] = x
        y[:, :1].add_(1.0)
        z = y.cumsum(1)
        z.unsqueeze_(0).mul_(2)
        return z.transpose_(1, 2).sum(-1) / x.shape[0]


class Chunks(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        first, *rest = x.chunk(3, dim=1)
        return sum((each.sum(1) for each in rest), first.prod(1))


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.std() * x.shape[0]
        with torch.autocast("cpu", torch.bfloat16):
            y = self.norm(self.linear(x.unsqueeze(-1).expand(*x.shape, 8)))
        return functional.dropout(y, 0.5) * scale


class Tied(nn.Module):
    """Two names of one parameter, and buffers that are updated."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.head.weight = self.body.weight
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x.unsqueeze(-1).expand(*x.shape, 8))
        return self.head(self.norm(y.mT).mT).mean()


SIZES = [(4, 16), (6, 20), (8, 24), (4, 17), (3, 8), (16, 16), (1, 12), (2, 33)]
ALONE = {
    **dict.fromkeys((Numbers, Mask, InPlace, Chunks, Autocast, Tied), 2),
    **dict.fromkeys((ByType, Table, Loop, Root, Constant), 7),
    Longer: 2,
    Even: 3,
    Square: 3,
}
"""How many of the sizes after the first are captured by themselves: the second, those of 1, and
where a trace does not stand for them."""


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> list[CapturedCall]:
    """The calls that are captured by themselves."""
    calls: list[CapturedCall] = []

    def counted(module: nn.Module, *call: Any, **options: Any) -> Graph:
        calls.append(CapturedCall(module, *call[:2]))
        return capture(module, *call, **options)

    monkeypatch.setattr(sys.modules[Captures.__module__], "capture", counted)
    return calls


@pytest.mark.parametrize("kind", ALONE, ids=lambda kind: kind.__name__)
def test_graphs_are_those_of_captures_by_themselves(
    kind: type[nn.Module], alone: list[CapturedCall]
) -> None:
    model = kind()
    captures = Captures(capture(model, (torch.ones(SIZES[0]),)), None)
    for sizes in SIZES[1:]:
        call = CapturedCall(model, (torch.ones(sizes),), {})
        graph = captures.graph(call, None, None)
        by_itself = capture(model, call.args)
        assert graph.fingerprint == by_itself.fingerprint, sizes
        assert graph.tied == by_itself.tied
        constants = zip(graph.constants.values(), by_itself.constants.values(), strict=True)
        assert all(torch.equal(*pair) for pair in constants)
        assert [op.source for op in graph.ops] == [op.source for op in by_itself.ops]
    assert len(alone) == ALONE[kind]


def test_a_language_model_is_captured_once_for_all_lengths(alone: list[CapturedCall]) -> None:
    model, *_ = llama(layers=1)

    def call(batch: int, length: int) -> CapturedCall:
        ids = torch.ones(batch, length, dtype=torch.int64)
        return CapturedCall(model, (), {"input_ids": ids, "labels": ids})

    captures = Captures(capture(model, (), call(4, 64).kwargs), None)
    for sizes in ((4, 16), (4, 24), (4, 129)):
        graph = captures.graph(call(*sizes), None, None)
        assert graph.fingerprint == capture(model, (), call(*sizes).kwargs).fingerprint, sizes
        attention = [op for op in graph.ops if "scaled_dot_product" in op.name]
        assert all(op.kwargs["is_causal"] for op in attention) and attention
    assert len(alone) == 1


def test_another_state_is_another_capture(alone: list[CapturedCall]) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
    captures = Captures(capture(model, (torch.ones(4, 8),)), "training")
    graphs = [
        captures.graph(CapturedCall(model.train(mode), (torch.ones(size, 8),), {}), None, state)
        for mode, state in ((True, "training"), (False, "evaluation"))
        for size in (2, 3, 5)
    ]
    assert [len(graph.ops) for graph in graphs] == [3, 3, 3, 2, 2, 2]
    assert len(alone) == 3


def test_what_cannot_be_captured_says_so_at_each_size() -> None:
    class ByValue(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin() if len(x) < 5 or x.sum() > 0 else x.cos()

    model = ByValue()
    captures = Captures(capture(model, (torch.ones(2, 3),)), None)
    for size in (3, 4):
        captures.graph(CapturedCall(model, (torch.ones(size, 3),), {}), None, None)
    for size in (6, 7):
        with pytest.raises(CaptureError, match="value of a tensor"):
            captures.graph(CapturedCall(model, (torch.ones(size, 3),), {}), None, None)
