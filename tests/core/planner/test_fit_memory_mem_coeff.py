"""`mem_coeff="auto"`: the smallest that fits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.core.graph.graph import Graph
from shardwright.core.planner.options import MEM_COEFFS
from shardwright.core.search.request import DEFAULT_MEM_COEFF
from shardwright.errors import MemoryLimitError, StrategyError


def captured() -> Graph:
    """Four weights of 256 KiB each; activations are small."""
    with torch.device("meta"):
        layers = (nn.Linear(256, 256, bias=False) for _ in range(4))
        net = nn.Sequential(*layers)
        return sw.capture(net, (torch.empty(8, 256),))


GRAPH = captured()


def plan(**options: Any) -> sw.Plan:
    return sw.plan(GRAPH, **{"devices": 4, "mem_coeff": "auto", **options})


def test_with_enough_memory_it_is_the_smallest() -> None:
    free = plan(memory_limit="1 GB")
    assert free.options["mem_coeff"] == MEM_COEFFS[0]
    assert free.dump() == plan(mem_coeff=MEM_COEFFS[0]).dump()


def test_with_less_it_is_the_smallest_that_fits_and_nothing_else_is_changed() -> None:
    peaks = {each: plan(mem_coeff=each).memory.peak for each in MEM_COEFFS}
    limit = (max(peaks.values()) + min(peaks.values())) // 2
    found = plan(memory_limit=limit)
    assert found.options["mem_coeff"] == next(each for each in MEM_COEFFS if peaks[each] <= limit)
    assert found.options["mem_coeff"] > MEM_COEFFS[0]
    assert found.memory.peak <= limit
    assert found.sharding is None and not found.recompute


def test_on_a_cluster_its_devices_have_a_limit() -> None:
    assert plan(cluster="h100").options["mem_coeff"] == DEFAULT_MEM_COEFF


def test_without_a_limit_the_error_says_what_to_give() -> None:
    with pytest.raises(
        StrategyError, match=r"(?s)mem_coeff='auto'.*set memory_limit.*or name a cluster"
    ):
        plan()


def test_a_mode_that_does_not_weigh_memory_needs_none() -> None:
    assert plan(mode="data_parallel").options == {}


def test_what_fits_in_no_way_is_an_error() -> None:
    with pytest.raises(MemoryLimitError, match="no plan for 4 devices"):
        plan(memory_limit=1000)


def test_another_word_is_an_error() -> None:
    with pytest.raises(StrategyError, match="mem_coeff='least': must be a positive number, or 'au"):
        plan(mem_coeff="least")
