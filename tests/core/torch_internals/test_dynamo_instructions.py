"""Branches on tensors and assignments to `requires_grad` while TorchDynamo traces a function."""

from __future__ import annotations

import dis
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException

from shardwright.core.torch_internals.dynamo import DynamoCapture


class Traced:
    """Object whose `forward` is traced."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def by_sum(x: Tensor) -> Tensor:
    return x + 1 if x.sum() > 0 else x - 1


def by_item(x: Tensor) -> Tensor:
    return x + 1 if x.sum().item() > 0 else x - 1


def by_two(x: Tensor) -> Tensor:
    return x + 1 if x.sum() > 0 and not x.max() < 0 else x - 1


@pytest.mark.parametrize("function", [by_sum, by_item])
@pytest.mark.parametrize("value", [True, False])
def test_a_branch_takes_the_side_that_the_caller_decides(
    function: Callable[[Tensor], Tensor], value: bool
) -> None:
    places: list[tuple[str, dis.Positions]] = []

    def decide(file: str, position: dis.Positions) -> bool:
        places.append((file, position))
        return value

    traced, x = Traced(function), torch.zeros(2)
    capture = DynamoCapture.of(traced.forward, (x,), {}, decide_branch=decide)
    assert capture.graph_module is not None
    torch.testing.assert_close(capture.around(capture.graph_module)(traced, x), x + 2 * value - 1)
    ((file, position),) = places
    assert file == __file__
    assert position.lineno == function.__code__.co_firstlineno + 1
    line = Path(file).read_text().splitlines()[position.lineno - 1]
    assert line[position.col_offset : position.end_col_offset].startswith("x.sum()")


def test_each_operand_of_a_condition_is_decided() -> None:
    traced, x = Traced(by_two), torch.zeros(2)
    # The second operand follows `not`.
    decisions = iter((True, False))
    capture = DynamoCapture.of(
        traced.forward, (x,), {}, decide_branch=lambda file, position: next(decisions)
    )
    assert capture.graph_module is not None
    torch.testing.assert_close(capture.around(capture.graph_module)(traced, x), x + 1)


def test_a_branch_that_is_not_decided_is_refused() -> None:
    with pytest.raises(TorchDynamoException, match="branching"):
        DynamoCapture.of(Traced(by_sum).forward, (torch.zeros(2),), {})


def test_a_tensor_that_forward_makes_may_require_a_gradient() -> None:
    def scaled(x: Tensor) -> Tensor:
        first = x[:, None]
        first.requires_grad = True
        assert first.requires_grad
        return first * 2

    traced, x = Traced(scaled), torch.ones(2)
    capture = DynamoCapture.of(traced.forward, (x,), {})
    assert capture.graph_module is not None
    result = capture.around(capture.graph_module)(traced, x)
    assert result.requires_grad
    torch.testing.assert_close(result.detach(), 2 * x[:, None])
