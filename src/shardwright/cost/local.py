"""The cluster `local`: processes on this machine's CPU, measured and kept in the user's cache.

`shardwright calibrate` measures everything. Where it has not run, the CPU is measured at first use,
which takes some tenths of a second, and the links are assumed to be those of gloo on one machine.
"""

from __future__ import annotations

import logging
import os
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import ceil, log2
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from shardwright.cost.cluster import LOCAL, Cluster, Device, Level, read_cluster, written

logger = logging.getLogger("shardwright.cost")

ASSUMED_LINK = Level("processes", bandwidth=1e9, latency=2e-4)
"""gloo over loopback: some 0.4 ms for the smallest all-reduce of two processes."""

MATRIX, STREAM, SMALL = 768, 1 << 23, 8
"""Rows of the matrices, elements of the long and of the short vectors that are timed."""

SMALL_MESSAGE, LARGE_MESSAGE = 1 << 10, 1 << 22
"""Elements of the all-reduces that are timed (float32)."""

REPEATS = 7


def cache_file() -> Path:
    """Where the measurements are kept: `$XDG_CACHE_HOME/shardwright/local.yaml`, by default in
    `~/.cache`."""
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "shardwright" / "local.yaml"


def local_cluster() -> Cluster:
    """This machine as it was measured; measures its CPU if it never was.

    Raises:
        ConfigError: if the file in the cache is not as it should be.
    """
    file = cache_file()
    if file.is_file():
        return read_cluster(file.read_text(encoding="utf-8"), str(file))
    cluster = Cluster(LOCAL, measured_device(), (ASSUMED_LINK,))
    save(cluster)
    return cluster


def calibrate(processes: int = 2) -> Cluster:
    """Measures this machine's CPU, and its links with `processes` processes; keeps the result.

    Raises:
        ValueError: if there are fewer than two processes.
    """
    if processes < 2:
        raise ValueError(f"links join at least 2 processes, not {processes}")
    cluster = Cluster(LOCAL, measured_device(), (measured_link(processes),))
    save(cluster)
    return cluster


def save(cluster: Cluster) -> None:
    """Keeps the measurements, unless the cache cannot be written: then they are made again."""
    file = cache_file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=file.parent, delete=False, encoding="utf-8"
        ) as draft:
            draft.write(written(replace(cluster, name=LOCAL)))
        Path(draft.name).replace(file)
    except OSError as error:
        logger.warning("measurements of this machine are not kept: %s", error)


def measured_device() -> Device:
    """The CPU with all threads that torch uses; processes share it, so one is at full rate."""
    rates = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        a = torch.ones(MATRIX, MATRIX, dtype=dtype)
        rates[str(dtype).removeprefix("torch.")] = 2 * MATRIX**3 / _seconds(partial(torch.mm, a, a))
    x, y = torch.ones(STREAM), torch.ones(STREAM)
    small = torch.ones(SMALL)
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Device(
        memory=pages,
        rates=rates,
        memory_bandwidth=3 * x.element_size() * STREAM / _seconds(partial(torch.add, x, y, out=x)),
        overhead=_seconds(lambda: [small + small for _ in range(100)]) / 100,
        at_full_rate=1,
    )


def measured_link(processes: int) -> Level:
    """The link whose α-β time of an all-reduce is the measured one, for short and long ones."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "seconds"
        spawn(_all_reduces, (processes, _free_port(), result), nprocs=processes)  # type: ignore[no-untyped-call]
        short, long = map(float, result.read_text().split())
    rounds = 2 * ceil(log2(processes))
    sent = 2 * (processes - 1) / processes * 4 * (LARGE_MESSAGE - SMALL_MESSAGE)
    return Level("processes", sent / max(long - short, 1e-9), short / rounds)


def _all_reduces(rank: int, processes: int, port: int, result: Path) -> None:
    """One rank of the measurement; rank 0 writes the seconds of a short and of a long one."""
    torch.set_num_threads(max(1, torch.get_num_threads() // processes))
    address = f"tcp://localhost:{port}"
    dist.init_process_group("gloo", address, rank=rank, world_size=processes)
    found = []
    for elements in (SMALL_MESSAGE, LARGE_MESSAGE):
        found.append(_seconds(partial(dist.all_reduce, torch.zeros(elements))))
    if rank == 0:
        result.write_text(" ".join(map(str, found)))
    dist.barrier()
    dist.destroy_process_group()


def _seconds(work: Callable[[], object]) -> float:
    """The median time of `work`, after one round that is not counted."""
    times = []
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return median(times[1:])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port: int = probe.getsockname()[1]
        return port
