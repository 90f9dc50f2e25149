"""Training loops of other libraries against one process

A classifier of five layers, in float32, is trained with AdamW under Accelerate, Lightning's Trainer
and Fabric, on 2 local processes with gloo: gradients are accumulated over two batches and clipped,
then all samples are evaluated and a checkpoint is saved, from which 1, 2 and 4 processes train a
second epoch under a plan of their own. Numbers are the largest relative differences to one process
without a framework. Goal: at most 1e-5. torchtitan's `Trainer` trains 2 layers of its small LLaMA
for four steps, with labels that are ignored and the loss in chunks, and resumes after two; it has
no stages. Goal: at most 2e-4, since float32 norms of so many numbers differ.

Steps are also timed beside each framework's own sharding, with the same local batches and losses:
an encoder of 4 layers (width 256) under Fabric's `ModelParallelStrategy` with `fully_shard`, and 2
layers of torchtitan's small LLaMA under its FSDP and its tensor parallelism. The programs take
turns in one launch; ratios are medians and quartiles of rounds. Goal: no ratio above 1
within the quartiles.
"""

from __future__ import annotations

import json
import tempfile
from importlib.util import find_spec
from typing import Any

from benchmarks.size import Size
from benchmarks.table import Table
from benchmarks.torchrun import torchrun

RANKS, RESUMED = 2, (1, 2, 4)
SCRIPTS = (
    ("frameworks_ranks", ("accelerate", "lightning"), 1e-5),
    # PyTorch's norm of half a million float32 numbers on a CPU is off by some 6e-5.
    ("torchtitan_ranks", ("torchtitan",), 2e-4),
)
"""Modules that train, the libraries that they need, and the largest difference that is wanted."""
COLUMNS = ("framework, plan", "loss", "norm", "evaluation")


def run(size: Size = Size.DEFAULT) -> list[Table]:
    return [differences(), speeds(size.of(5, full=15))]


def differences() -> Table:
    """Losses, norms, evaluations and resumed trainings, as relative differences to one process."""
    table = Table(
        f"Largest relative difference to one process, trained on {RANKS} processes",
        (*COLUMNS, *(f"resumed on {ranks}" for ranks in RESUMED)),
    )
    for script, libraries, goal in SCRIPTS:
        missing = [name for name in libraries if find_spec(name) is None]
        if missing:
            table.add(f"skipped: {', '.join(missing)} is not installed", *["—"] * 6)
        else:
            _add_differences(table, script, goal)
    return table


def _add_differences(table: Table, script: str, goal: float) -> None:
    """Add the rows of the frameworks and plans of one script."""
    with tempfile.TemporaryDirectory() as folder:
        # First the ranks that save, which also resume: a start takes longer than a training.
        of_ranks = {RANKS: measured(script, RANKS, folder, "save", "resume")}
        for ranks in {*RESUMED} - {RANKS}:
            of_ranks[ranks] = measured(script, ranks, folder, "resume")
    first, second = of_ranks[RANKS]["one process"]
    for name, numbers in of_ranks[RANKS]["save"].items():
        found = [difference(numbers[key], first[key]) for key in COLUMNS[1:]]
        for ranks in RESUMED:
            later = of_ranks[ranks]["resume"][name]
            found.append(max(difference(later[key], second[key]) for key in COLUMNS[1:]))
        table.add(name, *(f"{each:.1e}" for each in found))
        worst = max(found)
        if worst > goal:
            table.missed.append(f"{name}: {worst:.1e} is above {goal:.0e}")


def speeds(rounds: int) -> Table:
    """Seconds of steps under plans beside the frameworks' own sharding."""
    table = Table(
        f"A step on {RANKS} processes: median (smallest–largest), ratio (quartiles)",
        ("program", "ms", "ratio to the framework's own", "difference of losses"),
    )
    for framework in ("lightning", "torchtitan"):
        if find_spec(framework) is None:
            table.add(f"skipped: {framework} is not installed", *["—"] * 3)
            continue
        output = torchrun("framework_speed_ranks", RANKS, framework, str(rounds))
        for name, milliseconds, ratio, is_slower, loss_difference in json.loads(
            output.splitlines()[-1]
        ):
            table.add(name, milliseconds, ratio, f"{loss_difference:.0e}")
            if is_slower:
                table.missed.append(f"{name}: {ratio} times the framework's own")
    return table


def difference(found: list[float], wanted: list[float]) -> float:
    """The largest relative difference of two lists; infinite if their lengths differ."""
    if len(found) != len(wanted):
        return float("inf")
    return max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))


def measured(script: str, ranks: int, folder: str, *phases: str) -> dict[str, Any]:
    """What a script prints, by phase, and by framework and plan.

    Raises:
        RuntimeError: if a process fails.
    """
    output = torchrun(script, ranks, folder, *phases)
    found: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return found
