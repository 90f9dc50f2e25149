"""A step of Muon on sharded matrices

`torch.optim.Muon` over the matrices of a stack of layers (width 256, float32), on 4 local processes
with gloo and one thread each; only the optimizer's step is timed, and the slowest rank counts.
*Replicated* matrices are orthogonalized on every rank. *Sharded* ones (parameters over 4 ranks, as
FSDP does) are each collected by one rank. *By DTensor* is PyTorch's own step on the same shards,
whose products communicate (uncounted) and round otherwise. Bytes are what a rank sends in a step.
Goal: a sharded step takes at most three quarters of a replicated one, and sends less than an
all-gather.
"""

from __future__ import annotations

import json
import statistics

from benchmarks.size import Size
from benchmarks.table import Table
from benchmarks.torchrun import torchrun

RANKS = 4
ROUNDS = 8


def run(size: Size = Size.DEFAULT) -> list[Table]:
    rounds = size.of(ROUNDS, full=3 * ROUNDS)
    measured = json.loads(
        torchrun("muon_ranks", RANKS, "--rounds", str(rounds)).strip().splitlines()[-1]
    )
    table = Table(
        f"A step of Muon on {RANKS} processes, median of {rounds}",
        ("matrices", "ms", "sent, KiB", "largest difference"),
    )
    medians = {name: statistics.median(case["seconds"]) for name, case in measured.items()}
    for name, case in measured.items():
        sent = "–" if name == "by DTensor" else f"{case['bytes'] / 1024:.0f}"
        row = f"{1e3 * medians[name]:.0f}", sent
        table.add(name, *row, f"{case['difference']:.0e}")
    if medians["sharded"] > 0.75 * medians["replicated"]:
        table.missed.append("a sharded step takes more than three quarters of a replicated one")
    sharded, all_gather = (measured["sharded"][key] for key in ("bytes", "all_gather"))
    if sharded >= all_gather:
        table.missed.append(f"sends {sharded} bytes, an all-gather {all_gather}")
    return [table]
