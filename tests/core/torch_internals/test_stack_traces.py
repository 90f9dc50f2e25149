"""Errors and plans name the line of a function that the model calls."""

from __future__ import annotations

from torch import Tensor, nn, randn

import shardwright as sw


def spread(output: Tensor) -> Tensor:
    return output.std(0)


def loss(output: Tensor, target: Tensor) -> Tensor:
    return (spread(output) - target).square().mean()


def test_operators_of_a_loss_function_have_its_lines() -> None:
    graph = sw.capture(sw.WithLoss(nn.Linear(4, 4), loss), (randn(8, 4), randn(4)))
    lines = {op.name: op.source for op in graph.ops}
    first = spread.__code__.co_firstlineno
    assert lines["std"] == f"test_stack_traces.py:{first + 1}"
    last = loss.__code__.co_firstlineno
    assert lines["mean"] == f"test_stack_traces.py:{last + 1}"


def test_operators_of_modules_of_pytorch_have_no_line_of_the_script() -> None:
    graph = sw.capture(nn.Sequential(nn.Linear(4, 4)), (randn(8, 4),))
    assert {op.source for op in graph.ops} == {""}
