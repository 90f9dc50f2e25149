"""Experts and tables on local processes

Two small models on 8 local processes with gloo and one thread each: a Qwen3-MoE of `transformers`
with 4 layers of 16 experts (width 128, 16 × 64 tokens), and a DLRM of 4 tables (2 M rows of 64
numbers, 512 samples). Forward, backward and SGD update, float32, of three ways that take turns,
round after round: the module itself in one process while the others wait, data parallel, and the
plan of the automatic search for this machine. A step takes as long as its slowest process. *Bytes*:
that one process sends in a step, as planned, for balanced experts, and as counted while the program
of rank 0 runs on a fake process group. Goals: the automatic plan is faster than data parallel, that
of the recommender also than one device, and bytes are as planned.
"""

from __future__ import annotations

import json
from typing import Any

import torch

import shardwright as sw
from benchmarks.size import Size
from benchmarks.structures_ranks import ALONE, MODELS
from benchmarks.table import Table
from benchmarks.timing import Sample
from benchmarks.torchrun import torchrun

RANKS = 8
DATA_PARALLEL, AUTOMATIC = "data parallel", "automatic"


def run(size: Size = Size.DEFAULT) -> list[Table]:
    rounds = size.of(3, full=10)
    table = Table(
        f"A training step on {RANKS} processes, {rounds} rounds, median (smallest–largest)",
        ("model", "way", "device mesh", "ms", "bytes planned", "counted"),
    )
    for name in MODELS:
        found = measured(name, rounds)
        for way, facts in found.items():
            seconds = Sample(tuple(facts["seconds"]))
            table.add(name, way, facts.get("mesh", "–"), seconds.milliseconds(), *_bytes(facts))
        add_misses(table, name, found)
    return [table]


def add_misses(table: Table, name: str, found: dict[str, dict[str, Any]]) -> None:
    """What the automatic plan of a model does not reach."""
    medians = {way: Sample(tuple(facts["seconds"])).median for way, facts in found.items()}
    for way in (DATA_PARALLEL, ALONE)[: 2 if name == "recommender" else 1]:
        if medians[AUTOMATIC] >= medians[way]:
            ratio = medians[AUTOMATIC] / medians[way]
            table.missed.append(f"{name}: {ratio:.2f} of the time of {way}")
    for way, facts in found.items():
        if facts.get("counted") != facts.get("planned"):
            table.missed.append(f"{name}, {way}: other bytes than planned")


def measured(name: str, rounds: int, ranks: int = RANKS) -> dict[str, dict[str, Any]]:
    """For each way the seconds of its steps, and of plans the mesh and bytes.

    Raises:
        RuntimeError: if the processes fail.
    """
    output = torchrun("structures_ranks", ranks, "--only", name, "--rounds", str(rounds))
    found: dict[str, dict[str, Any]] = json.loads(output.strip().splitlines()[-1])
    for facts in found.values():
        if "plan" in facts:
            torch.manual_seed(0)
            net, kwargs = MODELS[name]()
            plan = sw.Plan.from_json(facts.pop("plan"))
            (rank,) = sw.rehearse(net, (), kwargs, plan, ranks=[0], device="cpu").ranks
            facts["counted"] = max(rank.sent_bytes)
    return found


def _bytes(facts: dict[str, Any]) -> list[str]:
    return [f"{facts[each]:,}" if each in facts else "–" for each in ("planned", "counted")]
