"""Gradients between outputs of a planned model: exact, or refused."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from core.misuse.between_outputs_ranks import APART, BETWEEN, CHECKS, Net, batch, compare, hidden
from random_plans import random_plan
from shardwright.core.misuse.between_outputs import is_on_path
from torchrun import checks_on_ranks

test_between_outputs_on_real_ranks = checks_on_ranks(CHECKS, 2)


def on_one_device() -> tuple[nn.Module, nn.Module]:
    net, eager = Net().double(), Net().double()
    return sw.parallelize(net, sw.plan(net, (batch(),), devices=1), copy=True), eager


@pytest.mark.parametrize("name", BETWEEN)
def test_on_one_device_gradients_between_outputs_are_those_of_eager(name: str) -> None:
    compare(BETWEEN[name][1], *on_one_device())


@pytest.fixture(scope="module")
def compiled() -> tuple[Any, nn.Module]:
    parallel, eager = on_one_device()
    parallel.compile(backend="aot_eager")
    return parallel, eager


@pytest.mark.parametrize("name", [name for name in BETWEEN if name != "node"])
def test_of_a_compiled_program_they_are_refused(compiled: tuple[Any, nn.Module], name: str) -> None:
    call, use = BETWEEN[name]
    with pytest.raises(sw.PlanError) as refused:
        use(compiled[0](batch()))
    assert call in str(refused.value)


@pytest.mark.parametrize("name", APART)
def test_outputs_of_a_compiled_program_that_are_apart_have_gradients_of_eager(
    compiled: tuple[Any, nn.Module], name: str
) -> None:
    results = [APART[name](module(batch())) for module in compiled]
    torch.testing.assert_close(*results)


def test_what_watches_outputs_keeps_none_of_them(compiled: tuple[Any, nn.Module]) -> None:
    outputs = compiled[0](batch())
    kept, loss = weakref.ref(hidden(outputs)), outputs["loss"]
    del outputs
    gc.collect()
    assert kept() is None
    freed = weakref.ref(loss)
    del loss
    assert freed() is None


def test_outputs_in_parts_are_on_no_path() -> None:
    net = Net()
    graph = sw.capture(net, (batch().float(),))
    plans = [random_plan(graph, 4, seed).partition(graph) for seed in range(8)]
    found = {
        is_on_path(graph, chunk.communication, value)
        for plan in plans
        for chunk in plan.chunks
        for value in graph.output_values
        if chunk.communication.returned_layout(value).sharded
    }
    assert found == {False}


def test_outputs_on_the_path_of_others_are_not_watched() -> None:
    loss = on_one_device()[0](batch())["loss"]
    assert not loss._backward_hooks
