"""Random plans on real models: loss, gradients, updates and bytes against one device."""

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardwright as sw
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
@pytest.mark.parametrize("devices", [2, 4, 6])
def test_a_random_plan_gives_the_loss_and_gradients_of_one_device(name: str, devices: int) -> None:
    (net, args, kwargs), graph = captured(name)
    check_random_plan(net, args, kwargs, graph, random_plan(graph, devices, seed=devices))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "resnet", "llama"])
def test_many_random_plans_give_the_loss_and_gradients_of_one_device(name: str) -> None:
    (net, args, kwargs), graph = captured(name)

    @settings(max_examples=200, deadline=None)
    @given(st.sampled_from([2, 3, 4, 6, 8]), st.integers(0, 10**6))
    def run(devices: int, seed: int) -> None:
        check_random_plan(net, args, kwargs, graph, random_plan(graph, devices, seed))

    run()
