"""Language models on 8 to 1024 devices

All nine at full size from `configs/*_auto.yaml`: captured with 1024 sequences in bfloat16, and
planned for Ascend 910B without devices. *Search*: by step time, of all operators, without stages,
in a fork of the process that captured the model. *Plan*: the same with everything that follows from
it, including the memory of each device, found by a dry run. CPU time on one core; *memory* is the
peak of the process. Goals: each search under 1 s, everything else under 60 s including capture, in
4 GiB.
"""

from __future__ import annotations

import gc
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.page import ROOT
from benchmarks.size import Size
from benchmarks.table import Table
from benchmarks.timing import cpu_seconds, in_fork, in_fresh_process
from shardwright.core.api import plan
from shardwright.core.capture.capture import capture
from shardwright.core.cost.clusters import load_cluster
from shardwright.core.layout.prime_mesh import prime_mesh
from shardwright.core.search.by_time.search import candidates_by_time
from shardwright.core.search.request import SearchRequest, TimedStep
from shardwright.run.config.run import Run

NAMES = (
    *("llama2_7b", "llama2_13b", "llama2_70b", "baichuan2_7b", "baichuan2_13b"),
    *("qwen_7b", "qwen_14b", "pangualpha_2_6b", "pangualpha_13b"),
)
CLUSTER, BATCH, MEM_COEFF = "ascend910b", 1024, 0.1
MANY = (8, 64, 1024)
SEARCH_GOAL, WHOLE_GOAL, MEMORY_GOAL = 1.0, 60.0, 4.0


@dataclass(frozen=True)
class Scale:
    """What planning one model takes.

    Args:
        capture, searches, plans: seconds of CPU; the last two by number of devices.
        memory: GiB.
    """

    parameters: int
    operators: int
    capture: float
    searches: tuple[float, ...]
    plans: tuple[float, ...]
    memory: float


def run(size: Size = Size.DEFAULT) -> list[Table]:
    return [table(size.of(NAMES[::3], full=NAMES))]


def table(names: Sequence[str]) -> Table:
    """One row for each model."""
    shown = Table(
        "CPU seconds",
        (
            *("model", "parameters", "operators", "capture"),
            *(f"search, {devices}" for devices in MANY),
            *(f"plan, {devices}" for devices in MANY),
            "memory, GiB",
        ),
    )
    for name in names:
        found = in_fresh_process(partial(measured, name))
        shown.add(
            *(name, f"{found.parameters / 1e9:.2f} B", found.operators, f"{found.capture:.1f}"),
            *(f"{each:.2f}" for each in found.searches),
            *(f"{each:.1f}" for each in found.plans),
            f"{found.memory:.2f}",
        )
        shown.missed += [f"{name}: {goal}" for goal in missed(found)]
    return shown


def missed(found: Scale) -> list[str]:
    """The goals that are not met."""
    goals = []
    for devices, search, whole in zip(MANY, found.searches, found.plans, strict=True):
        if search >= SEARCH_GOAL:
            goals.append(f"the search on {devices} devices takes {search:.2f} s")
        if found.capture + whole >= WHOLE_GOAL:
            goals.append(f"capture and plan on {devices} take {found.capture + whole:.0f} s")
    if found.memory >= MEMORY_GOAL:
        goals.append(f"{found.memory:.2f} GiB are needed")
    return goals


def measured(name: str, batch: int = BATCH, many: Sequence[int] = MANY) -> Scale:
    """One model, in a process of its own."""
    run = Run.from_file(ROOT / "configs" / f"{name}_auto.yaml")
    net = run.model_to_plan()
    assert run.config.data.seq_length is not None
    ids = torch.empty((batch, run.config.data.seq_length), dtype=torch.long, device="meta")
    graphs = []

    def captured() -> None:
        graphs.append(capture(net, (ids, ids), compute_dtype=torch.bfloat16))

    seconds = cpu_seconds(captured)
    (graph,) = graphs
    timed_step = TimedStep(load_cluster(CLUSTER))

    def planned(devices: int) -> None:
        options = {"cluster": CLUSTER, "mem_coeff": MEM_COEFF, "memory_limit": "none"}
        found = plan(graph, devices=devices, **options)
        assert found.memory.peak > 0

    gc.collect()
    gc.freeze()
    requests = [
        SearchRequest(graph, prime_mesh(n), timed_step=timed_step, mem_coeff=MEM_COEFF)
        for n in many
    ]
    searches = [partial(candidates_by_time, request) for request in requests]
    plans = [partial(planned, n) for n in many]
    return Scale(
        parameters=sum(value.numel for value in graph.parameters),
        operators=len(graph.ops),
        capture=seconds,
        searches=tuple(in_fork(partial(cpu_seconds, each)) for each in searches),
        plans=tuple(cpu_seconds(each) for each in plans),
        memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    )
