"""The search by step time against the joint optimum

Two layers of LLaMA 2 7B of `transformers`, bfloat16, sequence 4096, on four devices. *Bound*: a
lower bound for every plan (`search/by_time/exact.py`: elimination over all axes together, where
each consumer of a value is charged a share of its redistribution). The others are relative to it:
the plan of `mode="exact"`, of the recursive search by step time (`cost_model="time"`), of the
published symbolic costs, and data parallel if the batch is divisible. Seconds are the step time
plus the stored bytes, weighted with `mem_coeff=0.1`. Goal: the recursive search within 3% of the
bound.

Then the search alone on all layers, CPU time on one core, in a fork of a process that captured the
graph and nothing else. Goal: under 1 s.
"""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import partial

import torch

from benchmarks.models import llama_2
from benchmarks.size import Size
from benchmarks.table import Table
from benchmarks.timing import Sample, cpu_seconds, in_fork
from shardwright.core.capture.capture import capture
from shardwright.core.cost.clusters import load_cluster
from shardwright.core.cost.time_model import TimeModel
from shardwright.core.graph.graph import Graph
from shardwright.core.layout.layout import Layout
from shardwright.core.layout.prime_mesh import prime_mesh
from shardwright.core.search.baselines import data_parallel
from shardwright.core.search.by_time.exact import search_exactly
from shardwright.core.search.by_time.objective import Objective
from shardwright.core.search.by_time.problem import search_problem
from shardwright.core.search.by_time.search import candidates_by_time
from shardwright.core.search.recursive.search import search_recursively
from shardwright.core.search.request import CutsOfGraph, SearchRequest, TimedStep

SEQUENCE, DEVICES, MEM_COEFF = 4096, 4, 0.1
CLUSTERS = ("h100", "ascend910b")
BATCHES = (1, 8)
NEAR = 1.03
"""The recursion's plan may take so many times the bound."""

MODELS = (("7B", 256), ("70B", 1024))
MANY = (8, 64, 1024)
PROCESSES = 3
GOAL = 1.0
"""Seconds for one search."""


def run(size: Size = Size.DEFAULT) -> list[Table]:
    near = Table(
        "Plans relative to the lower bound, two layers of LLaMA 2 7B on 4 devices",
        ("cluster", "batch", "bound, ms", "exact", "by step time", "symbolic", "data parallel"),
    )
    batches, clusters = size.of((BATCHES[1:], CLUSTERS[:1]), full=(BATCHES, CLUSTERS))
    for batch in batches:
        graph = _captured("7B", batch, 2)
        for cluster in clusters:
            _compare(near, graph, batch, cluster)
    fast = Table(
        "The search by step time alone, in ms, median (smallest–largest)",
        ("model", "operators", "batch", *(f"{n} devices" for n in MANY)),
    )
    for name, batch in size.of(MODELS[:1], full=MODELS):
        _time(fast, name, batch)
    return [near, fast]


def _compare(table: Table, graph: Graph, batch: int, cluster: str) -> None:
    mesh = prime_mesh(DEVICES)
    timed_step = TimedStep(load_cluster(cluster))
    request = SearchRequest(graph, mesh, timed_step=timed_step, mem_coeff=MEM_COEFF)
    exact = search_exactly(request)
    plans = {
        "seconds": candidates_by_time(request)[0],
        "symbolic": search_recursively(replace(request, timed_step=None)),
    }
    if batch % DEVICES == 0:
        plans["data parallel"] = data_parallel(graph, mesh)
    share = {
        name: total(graph, mesh, timed_step, cuts) / exact.bound for name, cuts in plans.items()
    }
    parallel = f"{share['data parallel']:.3f}" if "data parallel" in share else "–"
    table.add(
        *(cluster, batch, f"{1e3 * exact.bound:.2f}", f"{1 + exact.gap:.3f}"),
        *(f"{share['seconds']:.3f}", f"{share['symbolic']:.3f}", parallel),
    )
    if share["seconds"] > NEAR:
        table.missed.append(
            f"{cluster}, batch {batch}: {share['seconds']:.3f} of the bound, above {NEAR}"
        )


def total(graph: Graph, mesh: Layout, timed_step: TimedStep, cuts: CutsOfGraph) -> float:
    """What the search by seconds counts for these cuts."""
    every = search_problem(graph, {}, fold=False)
    objective = Objective(every, TimeModel(timed_step.cluster, mesh))
    cost = objective.cost([cuts.get(node.op.name, {}) for node in every.variables])
    return cost.total(timed_step.micro_batches, timed_step.seconds_per_parameter_byte(MEM_COEFF))


def _time(table: Table, name: str, batch: int) -> None:
    graph = _captured(name, batch, None)
    timed_step = TimedStep(load_cluster("h100"))
    gc.collect()
    gc.freeze()
    samples = {}
    for devices in MANY:
        request = SearchRequest(
            graph, prime_mesh(devices), timed_step=timed_step, mem_coeff=MEM_COEFF
        )
        one = partial(candidates_by_time, request)
        samples[devices] = Sample(
            tuple(in_fork(partial(cpu_seconds, one)) for _ in range(PROCESSES))
        )
    gc.unfreeze()
    table.add(name, len(graph.ops), batch, *(s.milliseconds() for s in samples.values()))
    table.missed += [
        f"{name} on {devices} devices: {sample.median:.2f} s, not under {GOAL} s"
        for devices, sample in samples.items()
        if sample.median >= GOAL
    ]


def _captured(name: str, batch: int, layers: int | None) -> Graph:
    net, args, kwargs = llama_2(name, batch, SEQUENCE, layers)
    return capture(net.to(torch.bfloat16), args, kwargs)
