"""Containers among the arguments of a call that `forward` fills are filled for its caller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw


class Net(nn.Module):
    def __init__(self, change: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(4, 4), change

    def forward(self, x: Tensor, state: Any) -> Tensor:
        y = self.linear(x)
        self.change(state, y)
        return y.sum()


def count(state: Any, y: Tensor) -> None:
    state["n"] += 1


X = torch.ones(8, 4)


@pytest.mark.parametrize(
    ("change", "make"),
    [
        (lambda state, y: state.append(y.mean()), list),
        (lambda state, y: state.append(y.mean()), lambda: [X]),
        (count, lambda: {"n": 1}),
        (lambda state, y: state[1]["x"].append(1), lambda: (X, {"x": [X]})),
    ],
)
def test_a_list_or_a_number_that_forward_changes_is_changed_for_the_caller(
    change: Callable[[Any, Tensor], Any], make: Callable[[], Any]
) -> None:
    net = Net(change)
    given, eager = make(), make()
    net(X, eager)
    planned = sw.parallelize(net, sw.plan(net, (X,), {"state": given}, devices=1))
    torch.testing.assert_close(given, make())
    planned(X, state=given)
    torch.testing.assert_close(given, eager)


def test_a_batch_may_be_prepared_in_place() -> None:
    def prepare(batch: Any, y: Tensor) -> None:
        batch.pop("unused")
        batch["x"] = batch["x"] * 2
        y += batch["x"]

    graph = sw.capture(Net(prepare), (X,), {"state": {"x": X, "unused": [X]}})
    assert len(graph.ops) > 2
