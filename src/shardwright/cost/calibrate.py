"""The cluster `local`: processes on this machine's CPU, measured and kept in the user's cache.

`shardwright calibrate` measures everything, with as many processes as are asked for. Where it has
not run, the CPU is measured by one process at first use, which takes some tenths of a second, and
the links are assumed to be those of gloo on one machine.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from shardwright.cost.cluster import (
    GLOO,
    LOCAL,
    Cluster,
    Device,
    LinkLevel,
    cluster_to_yaml,
    read_cluster,
)
from shardwright.errors import ConfigError
from shardwright.runtime.accelerator import (
    CPU,
    HOST_BACKEND,
    device_memory,
    loopback_interfaces,
    seconds_of,
)
from shardwright.text_files import read_text

logger = logging.getLogger("shardwright.cost")

ASSUMED_LINK = LinkLevel("processes", bandwidth=1e9, latency=2e-4, collectives=GLOO)
"""gloo over loopback: some 0.4 ms for the smallest all-reduce of two processes."""

MATRIX, STREAM, SMALL = 768, 1 << 23, 8
"""Rows of the matrices, elements of the long and of the short vectors that are timed."""

LARGE_MATRIX, LARGE_STREAM = 8192, 1 << 28
"""The same of an accelerator."""

CHAIN = 300
"""So many small operators follow each other."""

SMALL_MESSAGE, LARGE_MESSAGE, BURST = 1 << 10, 1 << 20, 10
"""Elements of the all-reduces that are timed (float32), and how many at once."""

CORES = os.cpu_count() or 1

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
        return read_cluster(read_text(file, ConfigError), str(file))
    cluster = Cluster(LOCAL, measure_device(), (ASSUMED_LINK,))
    save(cluster)
    return cluster


def calibrate(processes: int = 2) -> Cluster:
    """Measures this machine's CPU and its links with so many processes; keeps the result.

    Raises:
        ValueError: if there are fewer than two processes.
    """
    cluster = measure_cluster(processes)
    save(cluster)
    return cluster


def save(cluster: Cluster) -> None:
    """Keeps the measurements, unless the cache cannot be written: then they are made again."""
    file = cache_file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", dir=file.parent, delete=False, encoding="utf-8"
        ) as partial:
            partial.write(cluster_to_yaml(replace(cluster, name=LOCAL)))
        Path(partial.name).replace(file)
    except OSError as error:
        logger.warning("measurements of this machine are not kept: %s", error)


def measure_cluster(processes: int) -> Cluster:
    """This machine as it is for so many processes that compute and communicate at once. What one of
    them gets of the CPU is multiplied, so that plans for other numbers share it out again.

    Raises:
        ValueError: if there are fewer than two processes.
    """
    if processes < 2:
        raise ValueError(f"links join at least 2 processes, not {processes}")
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "cluster.yaml"
        spawn(_measure, (processes, result), nprocs=processes)  # type: ignore[no-untyped-call]
        return read_cluster(read_text(result, ConfigError), str(result))


def _measure(rank: int, processes: int, result: Path) -> None:
    """One process of the measurement; rank 0 writes the average of all."""
    torch.set_num_threads(max(1, torch.get_num_threads() // processes))
    os.environ |= {**loopback_interfaces(), **os.environ}
    store = result.with_name("store").as_uri()
    dist.init_process_group(HOST_BACKEND, store, rank=rank, world_size=processes)
    device = measure_device(processes, dist.barrier)
    short, long = (
        _seconds(partial(_all_reduces, elements), processes, dist.barrier) / BURST
        for elements in (SMALL_MESSAGE, LARGE_MESSAGE)
    )
    figures = [*device.rates.values(), device.memory_bandwidth, device.overhead, short, long]
    mean = torch.tensor(figures, dtype=torch.float64) / processes
    dist.all_reduce(mean)
    *rates, bandwidth, overhead, short, long = mean.tolist()
    device = replace(
        device,
        rates=dict(zip(device.rates, rates, strict=True)),
        memory_bandwidth=bandwidth,
        overhead=overhead,
    )
    if rank == 0:
        link = measure_link(processes, short, long)
        result.write_text(cluster_to_yaml(Cluster(LOCAL, device, (link,))), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def measure_device(
    processes: int = 1,
    together: Callable[[], object] = lambda: None,
    device: torch.device = CPU,
) -> Device:
    """The CPU as `processes` such as this one share it, each with all threads that torch uses; or
    an accelerator, which no other process uses.

    Args:
        together: waits for the other processes, which measure the same.
    """

    def seconds(work: Callable[[], object]) -> float:
        """Of all processes' work, one after the other, at the rate of the whole CPU."""
        if device != CPU:
            return median([seconds_of(work, device) for _ in range(REPEATS + 1)][1:])
        return _seconds(work, processes, together) / processes

    rows, elements = (MATRIX, STREAM) if device == CPU else (LARGE_MATRIX, LARGE_STREAM)
    # Not every accelerator has double precision, and few CPUs are fast in half precision.
    third = torch.float64 if device == CPU else torch.float16
    rates = {}
    for dtype in (torch.float32, torch.bfloat16, third):
        a = torch.rand(rows, rows, device=device).to(dtype)
        rates[str(dtype).removeprefix("torch.")] = 2 * rows**3 / seconds(partial(torch.mm, a, a))
    x, y = torch.ones(elements, device=device), torch.ones(elements, device=device)
    moved = 3 * x.element_size() * elements
    # A single process leaves the other cores to those that will be beside it.
    beside = CORES if processes == 1 and device == CPU else 1
    return Device(
        memory=device_memory(device),
        rates=rates,
        memory_bandwidth=moved / seconds(partial(torch.add, x, y, out=x)),
        overhead=seconds(partial(_chain, device)) / (3 * CHAIN) / beside,
        at_full_rate=1 if device == CPU else None,
    )


def _chain(device: torch.device) -> None:
    """Products that each are computed forward and have two gradients, too small to take time."""
    y = torch.ones(SMALL, device=device)
    factors = [torch.ones(SMALL, requires_grad=True, device=device) for _ in range(CHAIN)]
    y.requires_grad_()
    for factor in factors:
        y = y * factor
    y.sum().backward()  # type: ignore[no-untyped-call]


def _all_reduces(elements: int) -> None:
    x = torch.zeros(elements)
    for _ in range(BURST):
        dist.all_reduce(x)


def measure_link(processes: int, short: float, long: float) -> LinkLevel:
    """The link on which a short and a long all-reduce take so many seconds."""
    sent = 2 * (processes - 1) / processes * 4 * (LARGE_MESSAGE - SMALL_MESSAGE)
    latency = short / (2 * (processes - 1))
    return LinkLevel("processes", sent / max(long - short, 1e-9), latency, collectives=GLOO)


def _seconds(work: Callable[[], object], processes: int, together: Callable[[], object]) -> float:
    """The median time of `work` when so many processes do it, after one round that is not counted;
    each round begins `together`.

    Where they share cores they take in turn the CPU time of all: the clock would also count what
    else the machine does.
    """
    clock, share = time.perf_counter, 1.0
    if processes > CORES:
        clock, share = time.process_time, processes / CORES
    times = []
    for _ in range(REPEATS + 1):
        together()
        started = clock()
        work()
        times.append(clock() - started)
    return share * median(times[1:])
