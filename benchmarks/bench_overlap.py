"""Redistributions of activations beside computation

A LLaMA of 4 layers (width 512, batch 4 × 128 tokens), tensor parallel on two hosts: network
namespaces joined by a pair of virtual interfaces, each of which sends 400 Mbit/s (token bucket),
with gloo and one thread each. From PyTorch's timeline, medians of 5 training steps: the
collectives, how long the program waits for them, and the share of the first that is the second.
*At once*: every redistribution is waited for where it is made. *Overlapped*: as programs are
written. *Compiled*: by `torch.compile`, which keeps the order. *Predicted*: by the time model, for
this link and a device that computes as long as was measured at once; where other processes use the
cores too, what is sent takes longer than the link needs. Goal: less is exposed than at once.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.namespaces import two_hosts
from benchmarks.overlap_ranks import BANDWIDTH
from benchmarks.page import ROOT
from benchmarks.size import Size
from benchmarks.table import Table

RATE = f"{BANDWIDTH * 8 // 10**6}mbit"
TIMEOUT = 600
COLUMNS = ("step, ms", "communication, ms", "exposed, ms", "share exposed")


def run(size: Size = Size.DEFAULT) -> list[Table]:
    table = Table(
        f"A training step on two hosts, {RATE} between them",
        ("program", *COLUMNS, "predicted: communication, ms", "exposed, ms", "share exposed"),
    )
    rows = measured(size.of(2, full=5))
    shares = {name: row["exposed"] / row["communication"] for name, row in rows.items()}
    for name in ("at once", "overlapped", "compiled"):
        table.add(name, *_times(rows[name]), *_times(rows[f"predicted {name}"])[1:])
    for name in ("overlapped", "compiled"):
        if shares[name] >= shares["at once"]:
            table.missed.append(f"{name}: {shares[name]:.0%} of communication is exposed")
    return [table]


def _times(row: dict[str, float]) -> list[str]:
    times = [f"{row[part]:.0f}" for part in ("step", "communication", "exposed")]
    return [*times, f"{row['exposed'] / row['communication']:.0%}"]


def measured(steps: int) -> dict[str, dict[str, float]]:
    """For each kind of program the milliseconds of a step.

    Raises:
        RuntimeError: if the processes fail.
    """
    with TemporaryDirectory() as folder, two_hosts() as hosts:
        files = [Path(folder, f"rank{rank}.txt") for rank in range(len(hosts))]
        where = {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": "29500", "WORLD_SIZE": "2"}
        path = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))
        processes = []
        for rank, host in enumerate(hosts):
            host.shape(RATE)
            environment = {**where, "RANK": str(rank), "PYTHONPATH": path}
            command = (sys.executable, "-m", "benchmarks.overlap_ranks", str(steps))
            processes.append(host.start(*command, output=files[rank], environment=environment))
        statuses = [process.wait(TIMEOUT) for process in processes]
        if any(statuses):
            raise RuntimeError(f"a process failed:\n{files[0].read_text()[-4000:]}")
        rows: dict[str, dict[str, float]] = json.loads(files[0].read_text().splitlines()[-1])
        return rows
