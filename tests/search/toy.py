"""A small cluster, and the search by time on it, for tests."""

from __future__ import annotations

from typing import Any

import torch

from shardwright.capture.capture import capture
from shardwright.cost.cluster import Cluster, Device, LinkLevel
from shardwright.graph.graph import Graph
from shardwright.layout.layout import Layout
from shardwright.search.by_time.search import TimedSearch, timed_search
from shardwright.search.request import Pricing, SearchRequest

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
    return timed_search(SearchRequest(graph, mesh, pricing=Pricing(cluster)), fold)
