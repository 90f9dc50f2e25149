"""Memory limits from all that fits to less than anything

LLaMA 2 70B of `configs/llama2_70b_auto.yaml` in 128 micro-batches on 64 H100, with every number of
stages from 1 to 64 open (*auto*), and with the eight of the file, where the search also says
whether another number would be faster. *Step*: what is predicted for the fastest plan that fits;
of the last limit nothing fits, and *memory* is the smallest limit that would do. *Planning*: CPU
time on one core from the captured graph to the plan and the memory of each device, in a fork of the
process that captured it. Goals: each under 60 s, and no faster step with less memory.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.page import ROOT
from benchmarks.size import Size
from benchmarks.table import Table
from benchmarks.timing import cpu_seconds, in_fork
from shardwright.core.cost.memory import bytes_text
from shardwright.core.partition.pipeline_spec import AUTO
from shardwright.core.plan import Plan
from shardwright.errors import MemoryLimitError
from shardwright.run.config.run import Run

CONFIG, CLUSTER, DEVICES = "llama2_70b_auto.yaml", "h100", 64
LIMITS = (80, 60, 45, 35, 25, 15, 10, 9, 6)
WAYS: dict[str, dict[str, Any]] = {
    "auto": {"stages": AUTO, "max_stages": DEVICES},
    "8": {},
}
GOAL = 60.0

Found = tuple[float, str, float, int]
"""CPU seconds; the plan in words; seconds of its step; bytes that a device needs."""


def run(size: Size = Size.DEFAULT) -> list[Table]:
    table = Table("By limit, GiB", ("stages", "limit", "plan", "step, s", "memory", "planning, s"))
    run = Run.from_file(ROOT / "configs" / CONFIG).for_devices(DEVICES)
    model, graph = run.capture()
    gc.collect()
    gc.freeze()
    ways, limits = size.of((("8",), LIMITS[::4]), full=(tuple(WAYS), LIMITS))
    for stages in ways:
        fastest = 0.0
        for limit in limits:
            options = {"cluster": CLUSTER, "memory_limit": f"{limit}GiB", **WAYS[stages]}
            planned = partial(run.plan_graph, model, graph, DEVICES, **options)
            seconds, plan, step, needed = in_fork(partial(_measured, planned))
            shown = f"{step:.2f}" if plan else "–"
            row = plan or "none fits", shown, bytes_text(needed), f"{seconds:.0f}"
            table.add(stages, limit, *row)
            if seconds >= GOAL:
                table.missed.append(f"stages {stages}, {limit} GiB: {seconds:.0f} s of planning")
            if plan and step < fastest:
                table.missed.append(f"stages {stages}, {limit} GiB: faster than with more memory")
            fastest = max(fastest, step)
    return [table]


def _measured(planned: Callable[[], Plan]) -> Found:
    found: list[Found] = []

    def measure() -> None:
        try:
            plan = planned()
        except MemoryLimitError as error:
            found.append((0.0, "", 0.0, error.needed))
            return
        level = "" if plan.sharding is None else f", {plan.sharding.level}"
        again = ", recomputes" if plan.recompute else ""
        words = f"{plan.pipeline.stages} stages{level}{again}"
        found.append((0.0, words, plan.step_time or 0.0, plan.memory.peak))

    seconds = cpu_seconds(measure)
    return (seconds, *found[0][1:])
