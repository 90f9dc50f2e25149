"""Kernels of two halves: the first is started before any parameter is needed."""

import torch
from torch import Tensor, nn

import shardwright as sw
from sample_models import llama
from shardwright.core.api.save_graphs import program_text


class Guided(nn.Module):
    """A loss whose targets depend on a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 6)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        moved = target + self.layer.bias.sum().long() * 0
        return nn.functional.cross_entropy(self.layer(x), moved)


def first(text: str, *words: str) -> int:
    return min(text.find(word) for word in words if word in text)


def test_targets_are_counted_before_the_first_parameter_is_used() -> None:
    net, args, kwargs = llama()
    text = program_text(sw.plan(net, args, kwargs, devices=4, mode="data_parallel"))
    assert first(text, "start_cross_entropy(") < first(text, "aten.linear", "aten.embedding")
    assert "_ahead, " in text.split("local_cross_entropy(")[1].splitlines()[0]


def test_targets_that_depend_on_parameters_are_counted_where_the_loss_is() -> None:
    inputs = torch.randn(8, 8), torch.randint(6, (8,))
    plan = sw.plan(Guided(), inputs, devices=4, mode="data_parallel")
    assert "start_" not in program_text(plan).split("aten.linear")[0]
    assert sw.check(Guided(), inputs, {}, plan).passes(1e-9)
