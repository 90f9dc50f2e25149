"""Graph networks, with their edges sharded too: as one device, in values, gradients and bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import shardwright as sw
from features.graph_models import graph_model, plan_of_edges


@pytest.mark.parametrize("name", ["GCN", "SAGE", "GAT", "SchNet"])
@pytest.mark.parametrize(
    "options",
    [{"mode": "data_parallel"}, {"mode": "recursive_programming"}, {"cluster": "h100"}],
    ids=["data_parallel", "search", "by time"],
)
def test_graph_networks_equal_one_device(name: str, options: dict[str, Any]) -> None:
    net, args = graph_model(name)
    result = sw.check(net, args, {}, sw.plan(net, args, devices=4, **options))
    assert result.passes(1e-9), str(result)
    assert result.counted_bytes == result.planned_bytes


@pytest.mark.parametrize("name", ["GCN", "SAGE", "GAT", "SchNet"])
def test_messages_of_sharded_edges_are_summed(name: str) -> None:
    net, args = graph_model(name)
    plan = plan_of_edges(net, args, devices=4)
    result = sw.check(net, args, {}, plan)
    assert result.passes(1e-9), str(result)
    assert result.counted_bytes == result.planned_bytes


@pytest.mark.parametrize("name", ["GCN", "GAT", "SchNet"])
def test_a_search_shards_the_edges_of_a_large_graph(name: str) -> None:
    with torch.device("meta"):
        net, args = graph_model(name, nodes=200_000, edges=10_000_000)
    seconds, options = {}, {"devices": 8, "cluster": "h100", "memory_limit": "none"}
    for mode in ("recursive_programming", "data_parallel", "stand_alone"):
        plan = sw.plan(net, args, **options, mode=mode)
        assert plan.step is not None
        seconds[mode] = plan.step.seconds
        if mode == "recursive_programming":
            assert any("e" in factors for factors in plan.cuts.values())
    fastest = seconds.pop("recursive_programming")
    assert 3 * fastest < min(seconds.values())
