"""One rank of 8 to 4,096 devices starts

A LLaMA of two layers, with one sequence for each device, is planned for so many devices, and the
rank in the middle is rehearsed on a fake process group, with real tensors on the CPU: process
groups, three steps with clipping and AdamW, and a checkpoint, by the code that `train` runs. CPU
time on one core, each in a process of its own; *start* is the model, process groups and parameters,
and *memory* the peak of the process. Goals: the first step on 4,096 devices under 10 s, every
second step at most 1.3 times that on 8, at most 1.2 process groups a device.
"""

from __future__ import annotations

import resource
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.models import small
from benchmarks.table import Table
from benchmarks.timing import cpu_seconds, in_fresh_process
from shardwright.api import plan, rehearse
from shardwright.plan import Plan

MANY = (8, 64, 256, 1024, 4096)
LIMIT = 300
"""Seconds of CPU after which one number of devices is given up."""

FIRST_GOAL, SECOND_GOAL, GROUPS_GOAL = 10.0, 1.3, 1.2


@dataclass(frozen=True)
class Start:
    """What one rank takes.

    Args:
        seconds: of CPU, of the plan and of each phase.
        groups: process groups made.
        memory: GiB.
    """

    devices: int
    seconds: dict[str, float]
    groups: int
    memory: float


def run() -> list[Table]:
    return [table(MANY)]


def table(many: Sequence[int]) -> Table:
    """One row for each number of devices."""
    phases = ("plan", "process groups", "start", "step 1", "step 2", "checkpoint")
    shown = Table("CPU seconds", ("devices", *phases, "process groups made", "memory, GiB"))
    starts: list[Start] = []
    for devices in many:
        start = in_fresh_process(partial(measured, devices))
        if start is None:
            shown.add(f"{devices:,}", *[f"over {LIMIT}", *["–"] * (len(shown.columns) - 2)])
            shown.missed.append(f"{devices:,} devices: not done after {LIMIT} s")
            continue
        starts.append(start)
        cells = (f"{start.seconds[phase]:.2f}" for phase in phases)
        shown.add(f"{devices:,}", *cells, f"{start.groups:,}", f"{start.memory:.2f}")
    shown.missed += [goal for start in starts for goal in missed(start, starts[0])]
    return shown


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


def measured(devices: int) -> Start | None:
    """The rank in the middle, in a process of its own; None if it takes too long."""
    signal.signal(signal.SIGPROF, _give_up)
    signal.setitimer(signal.ITIMER_PROF, LIMIT)
    model, plans = small("llama", batch=devices, width=64, vocabulary=512), list[Plan]()
    try:
        planning = cpu_seconds(lambda: plans.append(plan(*model, devices=devices)))
        (rank,) = rehearse(*model, plans[0], ranks=[devices // 2], device="cpu").ranks
    except _TooLongError:
        return None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    assert rank.as_planned
    phases = {phase.name: phase for phase in rank.phases}
    seconds = {"plan": planning, **{name: phase.seconds for name, phase in phases.items()}}
    seconds["process groups"] = phases["start"].parts["process groups"]
    seconds["checkpoint"] = seconds["checkpoint written"] + seconds["checkpoint read"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return Start(devices, seconds, rank.groups, peak)


class _TooLongError(BaseException):
    """The limit has passed. No `except Exception` on the way is to take it for an error."""


def _give_up(number: int, frame: object) -> None:
    raise _TooLongError
