"""Causal attention along the sequence

Three ways to cut it: its heads (between two all-to-alls), its queries with all keys and values
gathered, and its queries while keys and values go round a ring.

**Predicted**: four layers of Llama 3 8B, one sequence of 1,048,576 tokens, 64 H100, parameters
sharded and as much computed again as the limit requires: what the search plans, and what it would
without rings. Goal: never slower with them, faster at some limit.

**Measured**: a layer of attention with 4 heads of 64 between an embedding and the loss on 4 local
processes, one thread each: the median of some steps, and by how much the peak of a process's memory
grows in them. Goals: the ring takes less memory than gathering, and the losses are equal.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

import shardwright as sw
from benchmarks.full_size import language, llama_3
from benchmarks.rings_ranks import strategies
from benchmarks.size import Size
from benchmarks.table import Table
from benchmarks.timing import Sample
from benchmarks.torchrun import torchrun
from shardwright.core.capture.capture import capture
from shardwright.core.cost.memory import bytes_text
from shardwright.core.graph.graph import Graph
from shardwright.core.planner import candidate
from shardwright.errors import MemoryLimitError

LIMITS = ("60GiB", "50GiB", "40GiB", "35GiB")
RANKS, TOKENS = 4, (4096, 8192)


def run(size: Size = Size.DEFAULT) -> list[Table]:
    limits, tokens, rounds = size.of((LIMITS[2:3], TOKENS[:1], 3), full=(LIMITS, TOKENS, 5))
    return [_predicted(limits), _measured(tokens, rounds)]


def _predicted(limits: Sequence[str]) -> Table:
    table = Table("Plans", ("limit", "step, s", "memory", "cuts of attention", "without rings, s"))
    net, kwargs = language(lambda: llama_3("8B", num_hidden_layers=4), 1, 2**20)
    graph = capture(net, (), kwargs, compute_dtype=torch.bfloat16)
    gains = []
    for limit in limits:
        plan, without = _plan(graph, limit), None
        with _without_rings():
            without = _plan(graph, limit)
        assert plan is not None and plan.step_time is not None and plan.memory is not None
        before = float("inf") if without is None else without.step_time or 0.0
        gains.append(before / plan.step_time)
        (name, *_) = (name for name in plan.cuts if name.endswith("_attention"))
        cuts = {factor: plan.mesh.size(axes) for factor, axes in plan.cuts[name].items()}
        table.add(
            limit,
            f"{plan.step_time:.2f}",
            bytes_text(plan.memory.peak),
            ", ".join(f"{factor}/{count}" for factor, count in cuts.items()),
            "–" if without is None else f"{before:.2f}",
        )
    if min(gains) < 1:
        table.missed.append("a plan is slower with rings")
    if max(gains) < 1.01:
        table.missed.append("rings make no plan faster")
    return table


def _plan(graph: Graph, limit: str) -> sw.Plan | None:
    options = {"hsdp": True, "recompute": "auto", "memory_limit": limit}
    try:
        return sw.plan(graph, devices=64, cluster="h100", **options)
    except MemoryLimitError:
        return None


@contextmanager
def _without_rings() -> Iterator[None]:
    with patch.object(candidate, "ring_cuts", lambda *_: None):
        yield


def _measured(lengths: Sequence[int], rounds: int) -> Table:
    columns = ("tokens", "attention", "ms", "peak grows by", "bytes sent")
    table = Table(f"On {RANKS} processes, {rounds} steps, median (smallest–largest)", columns)
    for tokens in lengths:
        found = {way: _of_ranks(way, tokens, rounds) for way in strategies(RANKS)}
        for way, facts in found.items():
            seconds = Sample(tuple(facts["seconds"])).milliseconds()
            table.add(f"{tokens:,}", way, seconds, bytes_text(facts["peak"]), f"{facts['bytes']:,}")
        losses = torch.tensor([facts["loss"] for facts in found.values()])
        if not torch.allclose(losses, losses[:1], rtol=1e-6):
            table.missed.append(f"{tokens} tokens: losses {losses.tolist()}")
        if found["ring"]["peak"] >= found["keys gathered"]["peak"]:
            table.missed.append(f"{tokens} tokens: the ring takes as much memory as gathered keys")
    return table


def _of_ranks(way: str, tokens: int, rounds: int) -> Mapping[str, Any]:
    """What rank 0 printed.

    Raises:
        RuntimeError: if the processes fail.
    """
    arguments = "--way", way, "--tokens", str(tokens), "--rounds", str(rounds)
    output = torchrun("rings_ranks", RANKS, *arguments)
    facts: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return facts
