"""A small cluster, and the search by time on it, for tests."""

from __future__ import annotations

import random
from dataclasses import replace

from shardwright.core.cost.cluster import GLOO, RINGS, Cluster, Device, LinkLevel
from shardwright.core.graph.graph import Graph
from shardwright.core.layout.layout import Layout, TensorLayout
from shardwright.core.search.by_time.search import TimedSearch, timed_search
from shardwright.core.search.request import SearchRequest, TimedStep

TOY = Cluster(
    "toy",
    Device(1, {"float32": 1e9}, memory_bandwidth=1e9),
    (LinkLevel("node", 1e8, 1e-5, devices=4), LinkLevel("network", 1e7, 5e-5)),
)


def on_links(collectives: str) -> Cluster:
    return replace(TOY, levels=tuple(replace(x, collectives=collectives) for x in TOY.levels))


CLUSTERS = (TOY, on_links(RINGS), on_links(GLOO))
"""Whose collectives are trees, rings and gloo's."""


def searcher(graph: Graph, mesh: Layout, cluster: Cluster, fold: bool = True) -> TimedSearch:
    return timed_search(SearchRequest(graph, mesh, timed_step=TimedStep(cluster)), fold)


def random_layout(mesh: Layout, draw: random.Random, left: bool) -> TensorLayout:
    """Of a tensor of three dimensions, as it is left or as it is read."""
    places: list[list[int]] = [[], [], [], [], []]
    for axis in draw.sample(range(len(mesh.device_matrix)), len(mesh.device_matrix)):
        draw.choice(places).append(axis)
    terms = frozenset(places[3])
    axes = tuple(map(tuple, places[:3]))
    return TensorLayout(mesh, axes, terms if left else frozenset(), frozenset() if left else terms)
