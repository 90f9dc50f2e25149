"""Local maps against PyTorch's parallel modules

A LLaMA of 4 layers (width 256, batch 8 × 128 tokens), forward, backward and SGD update, float32, on
2 local processes with gloo and one thread each: with each attention a `local_map`, and as a whole.
Shardwright's and PyTorch's modules are built from the same model in the same processes and run in
turn, round after round; a step takes as long as its slowest rank. *PyTorch / ours* is the median of
the ratios within a round, with a 90% interval of that median: above 1 if ours is faster. Goal: at
least 0.97 at its lower end.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Sequence

from benchmarks.size import Size
from benchmarks.table import Table
from benchmarks.timing import Sample
from benchmarks.torchrun import torchrun

RANKS = 2
ROUNDS = 30
GOAL = 0.97
DRAWS = 2000
"""Resampled medians of an interval."""


def run(size: Size = Size.DEFAULT) -> list[Table]:
    rounds = size.of(ROUNDS, full=2 * ROUNDS)
    table = Table(
        f"A training step on {RANKS} processes, {rounds} rounds, median (90% interval)",
        ("ours / PyTorch's", "ours, ms", "PyTorch's, ms", "PyTorch / ours"),
    )
    for name, pairs in measured(rounds).items():
        ours, theirs = (Sample(tuple(values)) for values in zip(*pairs, strict=True))
        ratios = [b / a for a, b in pairs]
        low, high = interval(ratios)
        text = f"{statistics.median(ratios):.3f} ({low:.3f}–{high:.3f})"
        table.add(name, f"{1e3 * ours.median:.0f}", f"{1e3 * theirs.median:.0f}", text)
        if low < GOAL:
            table.missed.append(f"{name}: {text} is below {GOAL}")
    return [table]


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """The 90% interval of the median, by resampling."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(DRAWS))
    return medians[DRAWS // 20], medians[-DRAWS // 20]


def measured(rounds: int) -> dict[str, list[tuple[float, float]]]:
    """For each case the seconds of both, round by round.

    Raises:
        RuntimeError: if the processes fail.
    """
    output = torchrun("local_map_ranks", RANKS, "--rounds", str(rounds))
    found: dict[str, list[tuple[float, float]]] = json.loads(output.strip().splitlines()[-1])
    return found
