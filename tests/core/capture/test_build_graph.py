"""Which output is the loss, and into what gradients flow."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast

import shardwright as sw
from shardwright.core.parallel.train_step import loss_of
from shardwright.errors import PlanError

Named = namedtuple("Named", ["metric", "loss"])


class Net(nn.Module):
    def __init__(self, outputs: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.outputs = outputs

    def forward(self, x: Tensor) -> Any:
        return self.outputs(self.one(x).sin().mean(), self.two(x).cos().sum())


def captured(outputs: Callable[[Tensor, Tensor], Any]) -> sw.Graph:
    return sw.capture(Net(outputs), (torch.randn(2, 4),))


@pytest.mark.parametrize(
    ("outputs", "loss"),
    [
        (lambda a, b: a, "mean"),
        (lambda a, b: {"b": b, "loss": a}, "mean"),
        (lambda a, b: {"loss": b, "a": a}, "sum"),
        (lambda a, b: Named(a, b), "sum"),
        (lambda a, b: CausalLMOutputWithPast(loss=b, logits=a), "sum"),
        (lambda a, b: (a + b, a, b), "add"),
        (lambda a, b: (a, a.exp()), "mean"),
        (lambda a, b: (a.detach(), b), "sum"),
        (lambda a, b: (b, b), "sum"),
    ],
)
def test_the_loss_is_the_one_of_that_name_or_else_the_first(outputs: Any, loss: str) -> None:
    graph = captured(outputs)
    assert loss_of(graph).name == loss


@pytest.mark.parametrize(
    "outputs", [lambda a, b: (a, b), lambda a, b: {"a": a, "sum": a + b}, lambda a, b: [b, a.exp()]]
)
def test_of_several_losses_a_training_step_trains_none(outputs: Any) -> None:
    graph = captured(outputs)
    assert len(graph.trained) == 2
    assert {v.name for v in graph.parameters if v.requires_grad} == {
        v.name for v in graph.parameters
    }
    with pytest.raises(PlanError, match=r"returns 2 scalars.*test_build_graph.py:\d+"):
        loss_of(graph)


def test_without_a_loss_there_is_none() -> None:
    with pytest.raises(PlanError, match="returns no loss"):
        loss_of(captured(lambda a, b: (a.reshape(1), b.detach())))


def test_what_only_other_outputs_need_is_differentiable_but_not_counted() -> None:
    graph = captured(lambda a, b: {"other": b.reshape(1), "loss": a})
    named = {value.name: value for value in graph.parameters}
    assert named["one.weight"].requires_grad and not named["one.weight"].requires_other_grad
    assert named["two.weight"].requires_other_grad and not named["two.weight"].requires_grad
    assert all(value.differentiable for value in graph.parameters)
