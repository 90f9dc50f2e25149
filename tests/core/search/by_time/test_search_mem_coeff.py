"""`mem_coeff` in a search by seconds: its effect on every model, and the costs that are logged."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import shardwright as sw
from core.search.toy import TOY
from sample_models import bert, captured, gpt2, llama
from shardwright.core.cost.clusters import load_cluster
from shardwright.core.graph.graph import Graph
from shardwright.core.layout.layout import TensorLayout
from shardwright.core.layout.prime_mesh import prime_mesh
from shardwright.core.partition.communication import default_storage
from shardwright.core.search.by_time.search import candidates_by_time
from shardwright.core.search.indexed_graph import index_graph
from shardwright.core.search.request import CutsOfGraph, SearchRequest, TimedStep

MODELS = {
    "llama": (llama, {"batch": 8, "width": 512, "vocabulary": 2048, "sequence": 256}),
    "gpt2": (gpt2, {"batch": 8, "width": 512, "vocabulary": 2048, "sequence": 256}),
    "bert": (bert, {"batch": 8, "width": 512, "vocabulary": 2048, "sequence": 256}),
}


def kept_elements(graph: Graph, cuts: CutsOfGraph) -> int:
    """Of all parameters, by one of four devices."""
    mesh = prime_mesh(4)
    layouts = default_storage(graph, mesh, cuts)
    shards = (TensorLayout(mesh, layouts[v.name]).shard_shape(v.shape) for v in graph.parameters)
    return sum(torch.Size(shape).numel() for shape in shards)


@pytest.mark.parametrize("cluster", ["h100", "toy"])
@pytest.mark.parametrize("name", MODELS)
def test_a_small_mem_coeff_gives_data_and_a_large_one_model_parallelism(
    name: str, cluster: str
) -> None:
    model, sizes = MODELS[name]
    graph = captured(model, **sizes)
    timed_step = TimedStep(TOY if cluster == "toy" else load_cluster(cluster))
    small, large = (
        candidates_by_time(
            SearchRequest(graph, prime_mesh(4), timed_step=timed_step, mem_coeff=mem_coeff)
        )[0]
        for mem_coeff in (1e-6, 1e4)
    )
    every = sum(v.numel for v in graph.parameters)
    assert kept_elements(graph, small) > 0.95 * every
    assert kept_elements(graph, large) < 0.35 * every
    indexed = index_graph(graph)
    for op in (op for op in indexed.main if not indexed.op_types[op].is_lookup):
        assert len(small[indexed.names[op]]) == 1, indexed.names[op]
    batch = {tuple(axes) for each in small.values() for axes in each.values()}
    assert (0, 1) in batch


def plan(**options: Any) -> sw.Plan:
    net = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    return sw.plan(net, (torch.empty(8, 64),), devices=4, cluster="h100", **options)


def test_costs_are_logged_in_the_documents_words_with_seconds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="shardwright.search"):
        plan(log_costs=True)
    lines = [record.message for record in caplog.records]
    assert any(line.startswith("0, level 1 (2 devices along the axis)") for line in lines)
    costs = [line for line in lines if line.startswith("If the ")]
    assert costs and all(" s, and the total cost is " in line for line in costs)
    assert any(line.startswith("The costs of cutting the ") for line in lines)


def test_a_mode_without_costs_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="shardwright.search"):
        plan(log_costs=True, mode="data_parallel")
    assert [r.message for r in caplog.records] == [
        "mode='data_parallel' does not compare costs, so that log_costs=True logs none"
    ]
