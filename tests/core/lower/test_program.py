"""Random plans on real models: loss, gradients, updates and bytes against one device."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright as sw
from random_cases import random_cases
from random_plans import check_random_plan, random_plan
from sample_models import Model, bert, encoder, gpt2, llama, mlp, resnet
from shardwright.core.graph.graph import Graph

MODELS: dict[str, Any] = {
    "mlp": lambda: mlp(),
    "resnet": lambda: resnet(blocks=(1, 1)),
    "llama": lambda: llama(),
    "gpt2": lambda: gpt2(layers=1),
    "bert": lambda: bert(layers=1),
    "encoder": lambda: encoder(),
}


@cache
def captured(name: str) -> tuple[Model, Graph]:
    net, args, kwargs = MODELS[name]()
    return (net, args, kwargs), sw.capture(net, args, kwargs)


@pytest.mark.parametrize("name", MODELS)
@random_cases(3, slow=4)
def test_a_random_plan_gives_the_loss_and_gradients_of_one_device(name: str, seed: int) -> None:
    (net, args, kwargs), graph = captured(name)
    devices = (2, 4, 6, 3, 8)[seed % 5]
    check_random_plan(net, args, kwargs, graph, random_plan(graph, devices, seed))


def test_a_product_that_updates_a_buffer_is_computed_apart_from_its_bias() -> None:
    class Recording(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.weight, self.bias = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))
            self.last = nn.Buffer(torch.zeros(8, 4))

        def forward(self, x: Tensor) -> Tensor:
            y = F.linear(x, self.weight)
            with torch.no_grad():
                self.last.copy_(y)
            return (y + self.bias).square().mean()

    net, batch = Recording(), (torch.randn(8, 4),)
    graph = sw.capture(net, batch)
    for seed, devices in enumerate((1, 4)):
        check_random_plan(net, batch, {}, graph, random_plan(graph, devices, seed))
