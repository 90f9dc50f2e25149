"""One rank of 8 to 4,096 devices starts

A LLaMA of two layers is planned for N devices, and the rank in the middle is rehearsed on a
fake process group, with real tensors on the CPU: process groups, three steps with AdamW and
PyTorch's own `clip_grad_norm_`, and a checkpoint, by the code that `train` runs. Plans are data
parallel with one sequence for each device, HSDP over 8 of them, and what a search finds on H100 for
one sequence for every 8 devices. CPU time on one core, of each phase the least of three processes,
since other work on the machine only adds to it; *start* is the model, process groups and
parameters, *step 2* the shorter of the steps after the first, *mesh* that of the parameters, and
*memory* the peak of the process. Goals: the first step on 4,096 devices under 10 s, every second
step at most 1.3 times that on 8, at most 1.2 process groups a device.

LLaMA 2 70B is planned for 1,024 H100 with 128 sequences of 4,096 tokens, and the rank in the middle
rehearsed on the meta device. Goal: capture, plan, start and the first step under 120 s.
"""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from benchmarks.models import llama_2, small
from benchmarks.size import Size
from benchmarks.table import Table
from benchmarks.timing import cpu_seconds, in_fresh_process
from shardwright.core.api import plan, rehearse
from shardwright.core.api.rehearsal import RankRehearsal
from shardwright.core.plan import Plan

MANY = (8, 64, 256, 1024, 4096)
PLANS: Mapping[str, tuple[int, dict[str, Any]]] = {
    "data parallel": (1, {"mode": "data_parallel"}),
    "HSDP": (1, {"mode": "data_parallel", "hsdp": {"shard_size": 8, "threshold": 0}}),
    "searched": (8, {"cluster": "h100", "memory_limit": "none"}),
}
"""For each the devices for every sequence, and the options of `plan`."""

REPEATS = 3
"""Processes that measure the same."""

LIMIT = 300
"""Seconds of CPU after which one number of devices is given up."""

FIRST_GOAL, SECOND_GOAL, GROUPS_GOAL = 10.0, 1.3, 1.2
LARGE_GOAL = 120.0
PHASES = ("plan", "process groups", "start", "step 1", "step 2", "checkpoint")


@dataclass(frozen=True)
class Start:
    """What one rank takes.

    Args:
        seconds: of CPU, of the plan and of each phase.
        mesh: the sizes of the axes of the parameters' mesh.
        groups: process groups made.
        memory: GiB.
    """

    devices: int
    seconds: dict[str, float]
    mesh: tuple[int, ...]
    groups: int
    memory: float


def run(size: Size = Size.DEFAULT) -> list[Table]:
    if size is Size.DEFAULT:
        return [table(MANY[:3:2], repeats=2)]
    return [table(MANY), large_table(in_fresh_process(large))]


def table(many: Sequence[int], repeats: int = REPEATS) -> Table:
    """One row for each plan and number of devices."""
    columns = ("devices", "mesh", *PHASES, "process groups made", "memory, GiB")
    shown = Table("CPU seconds", ("plan is", *columns))
    for name in PLANS:
        starts: list[Start] = []
        for devices in many:
            start = _fastest(partial(measured, name, devices), repeats)
            if start is None:
                shown.add(name, f"{devices:,}", f"over {LIMIT}", *["–"] * (len(columns) - 2))
                shown.missed.append(f"{name}, {devices:,} devices: not done after {LIMIT} s")
                continue
            starts.append(start)
            shown.add(name, f"{devices:,}", *_cells(start))
        shown.missed += [f"{name}, {goal}" for each in starts for goal in missed(each, starts[0])]
    return shown


def _fastest(measure: Callable[[], Start | None], repeats: int) -> Start | None:
    """Each phase as in the process that was fastest in it; None where one took too long."""
    starts = []
    for _ in range(repeats):
        if (start := in_fresh_process(measure)) is None:
            return None
        starts.append(start)
    seconds = {phase: min(each.seconds[phase] for each in starts) for phase in starts[0].seconds}
    return replace(starts[0], seconds=seconds)


def large_table(start: Start) -> Table:
    """The row of LLaMA 2 70B; no checkpoint is written without devices."""
    shown = Table(
        "LLaMA 2 70B, CPU seconds",
        ("devices", "mesh", *PHASES[:-1], "process groups made", "memory, GiB"),
    )
    shown.add(f"{start.devices:,}", *_cells(start))
    total = start.seconds["plan"] + start.seconds["start"] + start.seconds["step 1"]
    if total >= LARGE_GOAL:
        shown.missed.append(f"LLaMA 2 70B takes {total:.0f} s")
    return shown


def _cells(start: Start) -> list[str]:
    seconds = [f"{start.seconds[phase]:.2f}" for phase in PHASES if phase in start.seconds]
    mesh = "·".join(map(str, start.mesh))
    return [mesh, *seconds, f"{start.groups:,}", f"{start.memory:.2f}"]


def missed(start: Start, base: Start) -> list[str]:
    """The goals that are not met.

    Args:
        base: on the smallest number of devices.
    """
    first, second = start.seconds["step 1"], start.seconds["step 2"]
    goals = []
    if first >= FIRST_GOAL:
        goals.append(f"{start.devices:,} devices: the first step takes {first:.1f} s")
    if second > SECOND_GOAL * base.seconds["step 2"]:
        ratio = second / base.seconds["step 2"]
        goals.append(f"{start.devices:,} devices: the second step takes {ratio:.1f} times as long")
    if start.groups > GROUPS_GOAL * start.devices:
        goals.append(f"{start.devices:,} devices: {start.groups:,} process groups are made")
    return goals


def measured(name: str, devices: int) -> Start | None:
    """The rank in the middle, in a process of its own; None if it takes too long."""
    sharing, options = PLANS[name]
    signal.signal(signal.SIGPROF, _give_up)
    signal.setitimer(signal.ITIMER_PROF, LIMIT)
    model, plans = small("llama", batch=max(8, devices // sharing), width=64, vocabulary=512), []
    try:
        planning = cpu_seconds(lambda: plans.append(plan(*model, devices=devices, **options)))
        return _start(model, plans[0], planning, "cpu")
    except _TooLongError:
        return None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def large() -> Start:
    """LLaMA 2 70B on 1,024 devices."""
    model, plans = llama_2("70B", batch=128, sequence=4096), list[Plan]()
    options = {"cluster": "h100", "memory_limit": "none", "compute_dtype": "bfloat16"}
    planning = cpu_seconds(lambda: plans.append(plan(*model, devices=1024, **options)))
    return _start(model, plans[0], planning, "meta")


def _start(model: Any, planned: Plan, planning: float, device: str) -> Start:
    meshes = set()

    def optimizer(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """AdamW, before whose steps PyTorch clips."""
        chosen = list(parameters)
        meshes.update(parameter.device_mesh.shape for parameter in chosen)  # type: ignore[attr-defined]
        adamw = torch.optim.AdamW(chosen)
        adamw.register_step_pre_hook(lambda *_: _clip(chosen))
        return adamw

    ranks, devices = [planned.devices // 2], planned.devices
    (rank,) = rehearse(
        *model, planned, ranks=ranks, device=device, optimizer=optimizer, clip_norm=None
    ).ranks
    assert rank.as_planned
    (mesh,) = meshes
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return Start(devices, {"plan": planning, **_seconds(rank)}, mesh, rank.groups, peak)


def _clip(parameters: list[torch.nn.Parameter]) -> None:
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)


def _seconds(rank: RankRehearsal) -> dict[str, float]:
    phases = {phase.name: phase for phase in rank.phases}
    seconds = {name: phase.seconds for name, phase in phases.items()}
    seconds["process groups"] = phases["start"].parts["process groups"]
    seconds["step 2"] = min(seconds["step 2"], seconds["step 3"])
    if "checkpoint read" in seconds:
        seconds["checkpoint"] = seconds["checkpoint written"] + seconds["checkpoint read"]
    return seconds


class _TooLongError(BaseException):
    """The limit has passed. No `except Exception` on the way is to take it for an error."""


def _give_up(number: int, frame: object) -> None:
    raise _TooLongError
