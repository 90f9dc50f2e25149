"""Training steps against PyTorch's parallel modules

A LLaMA of 4 layers (width 256, batch 8 × 128 tokens), forward, backward and SGD update, float32, on
4 local processes with gloo and one thread each. Shardwright's and PyTorch's modules are built from
the same model in the same processes and run in turn, round after round; a step takes as long as its
slowest rank. *PyTorch / ours* is the median of the ratios within a round, with quartiles: above 1
if ours is faster. `level1` and `level3` are compared with `fully_shard` of each layer, with buckets
of the size of a layer; tensor parallel shards the same layers in the same way. Goal: at least 1
within the quartiles.
"""

from __future__ import annotations

import json

from benchmarks.size import Size
from benchmarks.table import Table
from benchmarks.timing import Sample
from benchmarks.torchrun import torchrun

RANKS = 4
TIMEOUT = 1800


def run(size: Size = Size.DEFAULT) -> list[Table]:
    rounds = size.of(10, full=30)
    table = Table(
        f"A training step on {RANKS} processes, {rounds} rounds, median (quartiles)",
        ("ours / PyTorch's", "ours, ms", "PyTorch's, ms", "PyTorch / ours"),
    )
    for name, pairs in measured(rounds).items():
        ours, theirs = (Sample(tuple(values)) for values in zip(*pairs, strict=True))
        ratio = Sample(tuple(b / a for a, b in pairs))
        table.add(name, f"{1e3 * ours.median:.0f}", f"{1e3 * theirs.median:.0f}", ratio.ratio())
        if ratio.quartiles[1] < 1:
            table.missed.append(f"{name}: {ratio.ratio()} is below 1")
    return [table]


def measured(rounds: int) -> dict[str, list[tuple[float, float]]]:
    """For each case the seconds of both, round by round.

    Raises:
        RuntimeError: if the processes fail.
    """
    output = torchrun("data_parallel_ranks", RANKS, "--rounds", str(rounds))
    found: dict[str, list[tuple[float, float]]] = json.loads(output.strip().splitlines()[-1])
    return found
