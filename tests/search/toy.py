"""A small cluster, and the search by time on it, for tests."""

from __future__ import annotations

from typing import Any

import torch

from shardwright.capture.capture import capture
from shardwright.cost.cluster import Cluster, Device, LinkLevel
from shardwright.cost.step_time import TimeModel
from shardwright.graph.graph import Graph
from shardwright.layout.layout import Layout
from shardwright.search.by_time.problem import search_problem
from shardwright.search.by_time.search import Pricing, TimedSearch

TOY = Cluster(
    "toy",
    Device(1, {"float32": 1e9}, memory_bandwidth=1e9),
    (LinkLevel("node", 1e8, 1e-5, devices=4), LinkLevel("network", 1e7, 5e-5)),
)


def captured(model: Any, **sizes: Any) -> Graph:
    with torch.device("meta"):
        net, args, kwargs = model(**sizes)
    return capture(net, args, kwargs)


def searcher(graph: Graph, mesh: Layout, cluster: Cluster, fold: bool = True) -> TimedSearch:
    found = search_problem(graph, {}, fold=fold)
    return TimedSearch(found, TimeModel(cluster, mesh), Pricing(cluster, 0.1))
