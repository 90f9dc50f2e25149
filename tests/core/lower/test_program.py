"""Random plans on real models: loss, gradients, updates and bytes against one device."""

from functools import cache
from typing import Any

import pytest

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
