"""Bounded deques, growing lists and the order of an `OrderedDict`, which TorchDynamo replays like
Python."""

from __future__ import annotations

import operator
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwright.core.torch_internals.dynamo import DynamoCapture


class Changing:
    def __init__(self, state: Any, change: Callable[[Any], None]) -> None:
        self.state, self.change = state, change

    def forward(self, x: Tensor) -> Tensor:
        self.change(self.state)
        return x + sum(self.state)


def bounded() -> deque[int]:
    return deque([1, 2, 3], maxlen=3)


def ordered() -> OrderedDict[int, int]:
    return OrderedDict({1: 1, 2: 2, 3: 3})


def remove_and_insert(state: OrderedDict[int, int]) -> None:
    state[1] = state.pop(1)


CHANGES: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (bounded, lambda state: state.append(4)),
    (bounded, lambda state: state.appendleft(4)),
    (bounded, lambda state: state.extend([4, 5, 6, 7])),
    (bounded, lambda state: state.pop()),
    (ordered, lambda state: state.move_to_end(1)),
    (ordered, lambda state: state.move_to_end(3, last=False)),
    (ordered, lambda state: state.popitem(last=False)),
    (ordered, remove_and_insert),
]


@pytest.mark.parametrize(("make", "change"), CHANGES)
def test_containers_end_as_in_python(make: Callable[[], Any], change: Callable[[Any], Any]) -> None:
    eager, traced, x = Changing(make(), change), Changing(make(), change), torch.zeros(2)
    capture = DynamoCapture.of(traced.forward, (x,), {})
    graph = capture.graph_module
    assert graph is not None
    assert torch.equal(capture.around(graph)(traced, x), eager.forward(x))
    assert traced.state == eager.state
    assert getattr(traced.state, "maxlen", None) == getattr(eager.state, "maxlen", None)


def test_a_deque_of_another_bound_needs_another_capture() -> None:
    owner, x = Changing(bounded(), lambda state: state.append(4)), torch.zeros(2)
    capture = DynamoCapture.of(owner.forward, (x,), {})
    guards = capture.guards(owner, (x,), {}, frozenset(), frozenset([id(x)]))
    assert guards.hold(owner, (x,), {})
    owner.state = deque(owner.state, maxlen=4)
    assert not guards.hold(owner, (x,), {})


ADDITIONS: list[Callable[[Any], Any]] = [
    lambda state: state.append(4),
    lambda state: state.extend([4, state]),
    lambda state: operator.iadd(state, (4, 5)),
]
READS: list[Callable[[Any], Any]] = [
    lambda state: state.append(len(state)),
    lambda state: state.extend(2 * each for each in [*state]),
    lambda state: state.append(state[-1]),
    lambda state: state.extend(state),
]


class Logging:
    def __init__(self, add: Callable[[list[Any]], Any]) -> None:
        self.state: list[Any] = [1, 2]
        self.add = add

    def forward(self, x: Tensor) -> Tensor:
        self.add(self.state)
        return x + 1


@pytest.mark.parametrize("add", ADDITIONS)
def test_a_list_that_only_grows_has_one_capture(add: Callable[[Any], Any]) -> None:
    eager, traced, x = Logging(add), Logging(add), torch.zeros(2)
    capture = DynamoCapture.of(traced.forward, (x,), {})
    guards = capture.guards(traced, (x,), {}, frozenset(), frozenset([id(x)]))
    graph = capture.graph_module
    assert graph is not None
    for _ in range(3):
        assert guards.hold(traced, (x,), {})
        capture.around(graph)(traced, x)
        eager.forward(x)
    # As text, since a list may contain itself.
    assert repr(traced.state) == repr(eager.state)


@pytest.mark.parametrize("add", READS)
def test_a_list_that_is_read_needs_a_capture_for_each_length(add: Callable[[Any], Any]) -> None:
    eager, traced, x = Logging(add), Logging(add), torch.zeros(2)
    capture = DynamoCapture.of(traced.forward, (x,), {})
    guards = capture.guards(traced, (x,), {}, frozenset(), frozenset([id(x)]))
    graph = capture.graph_module
    assert graph is not None
    capture.around(graph)(traced, x)
    eager.forward(x)
    assert traced.state == eager.state
    assert not guards.hold(traced, (x,), {})
