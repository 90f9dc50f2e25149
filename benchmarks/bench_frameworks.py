"""Training loops of other libraries against one process

A classifier of five layers, in float32, is trained with AdamW under Accelerate, Lightning's Trainer
and Fabric, on 2 local processes with gloo: gradients are accumulated over two batches and clipped,
then all samples are evaluated and a checkpoint is saved, from which 1, 2 and 4 processes train a
second epoch under a plan of their own. Numbers are the largest relative differences to one process
without a framework. Goal: at most 1e-5. Accelerate has no checkpoints of pipeline stages.
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
GOAL = 1e-5
COLUMNS = ("framework, plan", "loss", "norm", "evaluation")


def run(size: Size = Size.DEFAULT) -> list[Table]:
    table = Table(
        f"Largest relative difference to one process, trained on {RANKS} processes",
        (*COLUMNS, *(f"resumed on {ranks}" for ranks in RESUMED)),
    )
    missing = [name for name in ("accelerate", "lightning") if find_spec(name) is None]
    if missing:
        table.add(f"skipped: {', '.join(missing)} is not installed", *["—"] * 6)
        return [table]
    # Imported here because its frameworks may be missing.
    from benchmarks.frameworks_ranks import one_process

    first, second = one_process(2)
    with tempfile.TemporaryDirectory() as folder:
        saved = measured(RANKS, "save", folder)
        resumed = {ranks: measured(ranks, "resume", folder) for ranks in RESUMED}
    for name, numbers in saved.items():
        differences = [difference(numbers[key], first[key]) for key in COLUMNS[1:]]
        for ranks in RESUMED:
            later = resumed[ranks][name]
            differences.append(
                None
                if later is None
                else max(difference(later[key], second[key]) for key in COLUMNS[1:])
            )
        table.add(name, *("—" if each is None else f"{each:.1e}" for each in differences))
        worst = max(each for each in differences if each is not None)
        if worst > GOAL:
            table.missed.append(f"{name}: {worst:.1e} is above {GOAL:.0e}")
    return [table]


def difference(found: list[float], wanted: list[float]) -> float:
    """The largest relative difference of two lists; infinite if their lengths differ."""
    if len(found) != len(wanted):
        return float("inf")
    return max(abs(a - b) / abs(b) for a, b in zip(found, wanted, strict=True))


def measured(ranks: int, phase: str, folder: str) -> dict[str, Any]:
    """What `frameworks_ranks` prints, by framework and plan.

    Raises:
        RuntimeError: if a process fails.
    """
    output = torchrun("frameworks_ranks", ranks, phase, folder)
    found: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return found
