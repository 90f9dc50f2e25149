"""The search alone

Graphs captured from LLaMA 2 of `transformers` at full size, on the meta device, sequence 4096 and
batch 1024, so that 1024 devices have something to shard. CPU time on one core. Goal: the first
search of the 70B model on 1024 devices in under 1 s.

*First*: in a process that captured the graph and nothing else, so that every cache of the search is
empty (each run is a fork of such a process, in which the garbage collector is done with the remains
of capture). *Again*: the same search, repeated in one process. *Whole plan*: the first `sw.plan` of
the captured graph in such a process: search, redistributions between operators, and their bytes.
Medians of 7 processes (*again*: of 3 repetitions), with minimum and maximum. *Collector*: one full
pass of Python's garbage collector over all objects of that process, which may happen during any
call of a real program and is not included in the other numbers. *Capture*: once for each graph,
after a small model was captured, which loads `torch.export`.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from functools import partial

import shardwright as sw
from benchmarks.models import LLAMA_2, llama_2
from benchmarks.size import Size
from benchmarks.table import Table
from benchmarks.timing import Sample, cpu_seconds, in_fork
from shardwright.core.graph.graph import Graph
from shardwright.core.layout.prime_mesh import prime_mesh
from shardwright.core.search.recursive.search import search_recursively
from shardwright.core.search.request import SearchRequest

BATCH, SEQUENCE = 1024, 4096
DEVICES = (8, 64, 1024)
LAYERS = (10, 20, 40, 80)
PROCESSES, REPEATED = 7, 3
GROWN = "70B"
GOAL = 1.0
"""Seconds for the first search of the largest model on the most devices."""


@dataclass(frozen=True)
class Searched:
    """CPU seconds for one graph and one number of devices."""

    first: Sample
    again: Sample
    whole_plan: Sample


@dataclass(frozen=True)
class Measured:
    """One graph: its operators, CPU seconds, and the searches for each number of devices."""

    operators: int
    capture: float
    collector: float
    searches: dict[int, Searched]


def run(size: Size = Size.DEFAULT) -> list[Table]:
    _capture("7B", 1)
    models = Table(
        "Search of LLaMA 2 in ms, median (smallest–largest)",
        (
            *("model", "layers", "operators", "capture, s", "devices"),
            *("first, ms", "again, ms", "whole plan, ms", "collector, ms"),
        ),
    )
    growth = Table(
        f"Growth with layers and devices: first search of LLaMA-2-{GROWN} with fewer layers, in ms",
        (
            *("layers", "operators", "capture, s", *(f"{n} devices" for n in DEVICES)),
            f"{DEVICES[-1]}: relative to {LAYERS[0]} layers",
        ),
    )
    full = LLAMA_2[GROWN]["num_hidden_layers"]
    _add_model(models, "7B", _measured("7B", None))
    start = None
    for layers in size.of(LAYERS[::3], full=LAYERS):
        found = _measured(GROWN, layers)
        largest = found.searches[DEVICES[-1]].first
        start = start or largest.median
        growth.add(
            layers,
            found.operators,
            f"{found.capture:.1f}",
            *(found.searches[n].first.milliseconds() for n in DEVICES),
            f"{largest.median / start:.1f}",
        )
        if layers == full:
            _add_model(models, GROWN, found)
            if largest.median >= GOAL:
                models.missed.append(
                    f"{GROWN} on {DEVICES[-1]} devices: {largest.median:.2f} s, not under {GOAL} s"
                )
    return [models, growth]


def searched(graph: Graph, devices: int) -> Searched:
    """Searches `graph` in forks of this process, which must not have searched it itself."""
    mesh = prime_mesh(devices)

    def searches() -> list[float]:
        if not search_recursively(SearchRequest(graph, mesh)):
            raise RuntimeError(f"the search cut nothing on {devices} devices")
        return [
            cpu_seconds(partial(search_recursively, SearchRequest(graph, mesh)))
            for _ in range(REPEATED)
        ]

    def first() -> float:
        return cpu_seconds(lambda: search_recursively(SearchRequest(graph, mesh)))

    def whole_plan() -> float:
        return cpu_seconds(lambda: sw.plan(graph, devices=devices))

    return Searched(
        first=Sample(tuple(in_fork(first) for _ in range(PROCESSES))),
        again=Sample(tuple(in_fork(searches))),
        whole_plan=Sample(tuple(in_fork(whole_plan) for _ in range(PROCESSES))),
    )


def _capture(name: str, layers: int | None) -> Graph:
    return sw.capture(*llama_2(name, BATCH, SEQUENCE, layers))


def _measured(name: str, layers: int | None) -> Measured:
    graphs: list[Graph] = []
    capture = cpu_seconds(lambda: graphs.append(_capture(name, layers)))
    gc.collect()
    collector = cpu_seconds(gc.collect)
    # A fork that collects garbage would walk over, and so copy, all that capture left.
    gc.freeze()
    searches = {devices: searched(graphs[0], devices) for devices in DEVICES}
    gc.unfreeze()
    return Measured(len(graphs[0].ops), capture, collector, searches)


def _add_model(table: Table, name: str, found: Measured) -> None:
    for devices, times in found.searches.items():
        table.add(
            name,
            LLAMA_2[name]["num_hidden_layers"],
            found.operators,
            f"{found.capture:.1f}",
            devices,
            times.first.milliseconds(),
            times.again.milliseconds(),
            times.whole_plan.milliseconds(),
            f"{1e3 * found.collector:.0f}",
        )
