"""Predicted and measured pipeline bubbles

The share of idle time of 4 stages on 4 local processes. Chunks of the model sleep instead of
computing, 0.1 s forward and 0.2 s backward for a whole stage (divided among its chunks), half of
the backward pass for inputs and half for parameters; *uneven*: the second stage takes twice as
long. *Predicted*: from the order of PyTorch's schedules and these durations. *Measured*: one minus
the share of the step spent sleeping, from a barrier to the end of the slowest process; the median
of 2 steps after a warmup step. Only the measured share includes communication and PyTorch's
overhead around each action. Goal: within 5 percentage points.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.bubble_ranks import described
from benchmarks.size import Size
from benchmarks.table import Table
from benchmarks.torchrun import torchrun
from shardwright.core.cost.pipeline_timeline import ChunkSeconds, timeline
from shardwright.core.partition.pipeline_spec import PipelineSpec
from shardwright.core.partition.schedules import SCHEDULES as SCHEDULE_SPECS

STAGES = 4
FORWARD, BACKWARD = 0.1, 0.2
GOAL = 0.05
LOADS = ((4, 1), (12, 1), (8, 2))
"""Micro-batches, and how many times as long the second stage takes."""

SCHEDULES = (
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved_1f1b", 2),
    ("zero_bubble_v", 2),
    ("dualpipe_v", 2),
    ("looped_bfs", 2),
)

Case = tuple[PipelineSpec, list[ChunkSeconds]]


def run(size: Size = Size.DEFAULT) -> list[Table]:
    table = Table(
        f"Share of idle time of {STAGES} stages",
        ("schedule", "chunks", "micro-batches", "parts", "predicted", "measured"),
    )
    found = cases(size.of(LOADS[::2], full=LOADS))
    for (pipeline, parts), measured in zip(found, measure(found), strict=True):
        predicted = timeline(pipeline, parts).bubble
        kind = "even" if len(set(parts)) == 1 else "uneven"
        table.add(
            *(pipeline.schedule, pipeline.chunks, pipeline.micro_batches, kind),
            *(f"{predicted:.1%}", f"{measured:.1%}"),
        )
        if abs(measured - predicted) > GOAL:
            table.missed.append(
                f"{pipeline.schedule}, {pipeline.micro_batches} micro-batches, {kind}:"
                f" {measured:.1%} is more than {100 * GOAL:.0f} points off {predicted:.1%}"
            )
    return [table]


def cases(loads: Sequence[tuple[int, int]] = LOADS) -> list[Case]:
    """Every schedule with each of the loads that it can run."""
    found = []
    for schedule, chunks in SCHEDULES:
        for pieces, slow in loads:
            if pieces < SCHEDULE_SPECS[schedule].min_micro_batches(STAGES):
                continue
            pipeline = PipelineSpec(STAGES, pieces, schedule, chunks)
            parts = []
            for number in range(pipeline.num_chunks):
                times = (slow if pipeline.stage_of(number) == 1 else 1) / chunks
                parts.append(ChunkSeconds(times * FORWARD, times * BACKWARD))
            found.append((pipeline, parts))
    return found


def measure(cases: Sequence[Case]) -> list[float]:
    """For each case the share of the time in which stages wait.

    Raises:
        RuntimeError: if a process fails.
    """
    text = json.dumps([described(pipeline, parts) for pipeline, parts in cases])
    with TemporaryDirectory() as folder:
        file = Path(folder) / "measured.json"
        torchrun("bubble_ranks", STAGES, str(file), text)
        found: list[float] = json.loads(file.read_text())
    return found
