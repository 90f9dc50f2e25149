"""Measures the cluster `local`: processes that share the CPU of this machine.

While one process waits, the others use its share of the cores, so a step lasts as long as the CPU
time of all processes together. CPU time is measured while all processes run the same work: matrix
products, operators on long vectors, large all-reduces, and training steps of a small model with
several shardings. Overheads of operators, messages and passes are then fitted to these steps.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from shardwright.core.cost.cluster import (
    LOCAL,
    Cluster,
    cluster_to_yaml,
    read_cluster,
)
from shardwright.core.cost.local_cluster import ASSUMED_LINK, PASS_OVERHEAD, save
from shardwright.core.cost.measure import Clock, measure_device
from shardwright.core.cost.predict import predict
from shardwright.core.partition.partitioned import Partitioned
from shardwright.core.runtime.accelerator import HOST_BACKEND, loopback_interfaces
from shardwright.core.runtime.collectives import all_reduce
from shardwright.core.runtime.devices import Group
from shardwright.errors import ConfigError, needs_extra
from shardwright.progress import OnProgress, ignore_progress
from shardwright.text_files import read_text
from shardwright.tools.compare.small_model import SmallModel

MESSAGE, LARGE_MESSAGE = 1 << 18, 1 << 22
"""Elements (float32) of the all-reduces that are timed."""

PRIOR_WEIGHT = 0.01
"""Weight of the relative deviation of a figure from its assumed value, where the relative error of
a step has weight 1. Two processes need it: their steps have as many calls as messages, so the
steps alone do not determine how the overhead divides between both."""

FIGURES = ("overhead", "pass_overhead", "step_overhead", "call", "latency")
"""Fitted fields of the device and of its links, in seconds of a process that runs alone."""


def calibrate(processes: int = 2, on_progress: OnProgress = ignore_progress) -> Cluster:
    """Measures this machine as `measure_cluster` does, and saves the result in the user's cache."""
    cluster = measure_cluster(processes, on_progress)
    save(cluster)
    return cluster


def measure_cluster(processes: int, on_progress: OnProgress = ignore_progress) -> Cluster:
    """Measures this machine with processes that compute and communicate at the same time.

    Rates are those of the whole CPU, so that the result is also valid for plans for another number
    of processes.

    Args:
        processes: the number of processes, at least 2.
        on_progress: called before each part of the measurement.

    Raises:
        ValueError: if there are fewer than two processes.
        ConfigError: if scipy is not installed.
    """
    if processes < 2:
        raise ValueError(f"links join at least 2 processes, not {processes}")
    with needs_extra("tools", "calibrating this machine needs scipy", ConfigError):
        import scipy.optimize  # noqa: F401
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "cluster.yaml"
        reports: SimpleQueue[tuple[str, int, int]] = get_context("spawn").SimpleQueue()
        context = spawn(_measure, (processes, result, reports), processes, join=False)  # type: ignore[no-untyped-call]
        on_progress("starting processes")
        while not context.join(timeout=0.2):
            while not reports.empty():
                on_progress(*reports.get())
        return read_cluster(read_text(result, ConfigError), str(result))


def _measure(
    rank: int, processes: int, result: Path, reports: SimpleQueue[tuple[str, int, int]]
) -> None:
    """Runs one process of the measurement. Rank 0 reports progress and writes the mean of all."""
    torch.set_num_threads(max(1, torch.get_num_threads() // processes))
    os.environ |= {**loopback_interfaces(), **os.environ}
    store = result.with_name("store").as_uri()
    dist.init_process_group(HOST_BACKEND, store, rank=rank, world_size=processes)
    report = (lambda *words: reports.put(words)) if rank == 0 else ignore_progress
    report("operators and large messages", 0, 0)
    cluster = _large_figures(Clock(processes, dist.barrier))
    steps = list(_steps(Clock(processes, dist.barrier), cluster, report))
    if rank == 0:
        result.write_text(cluster_to_yaml(fit_overheads(cluster, steps)), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _large_figures(clock: Clock) -> Cluster:
    """Measures rates of large operators and messages, without overheads."""
    device = measure_device(clock)
    group = Group((), dist.group.WORLD.group_name, clock.processes, tuple(range(clock.processes)))  # type: ignore[union-attr]
    short, long = (
        clock.seconds(partial(all_reduce(group), torch.zeros(size)))
        for size in (MESSAGE, LARGE_MESSAGE)
    )
    sent = 2 * (clock.processes - 1) / clock.processes * 4 * (LARGE_MESSAGE - MESSAGE)
    bandwidth = sent / max(long - short, 1e-9)
    figures = _mean([*device.rates.values(), device.memory_bandwidth, device.overhead, bandwidth])
    *rates, memory_bandwidth, overhead, bandwidth = figures
    device = replace(
        device,
        rates=dict(zip(device.rates, rates, strict=True)),
        memory_bandwidth=memory_bandwidth,
        overhead=overhead,
    )
    return Cluster(LOCAL, device, (replace(ASSUMED_LINK, bandwidth=bandwidth),))


def _mean(figures: Sequence[float]) -> list[float]:
    """Averages figures over all processes."""
    mean = torch.tensor(figures, dtype=torch.float64) / dist.get_world_size()
    dist.all_reduce(mean)
    return mean.tolist()


@dataclass(frozen=True)
class MeasuredStep:
    """A step of the small model.

    Args:
        counts: predicted number of times that each of `FIGURES` occurs in the step.
        others: predicted seconds of everything else.
        seconds: measured.
    """

    counts: tuple[float, ...]
    others: float
    seconds: float


def _steps(clock: Clock, cluster: Cluster, report: OnProgress) -> Iterator[MeasuredStep]:
    model = SmallModel(clock.processes)
    for number, division in enumerate(model.divisions):
        report("steps of a small model", number, len(model.divisions))
        training = model.divided(division, cluster)
        training.step()
        # Processes that each train a replica share the CPU; one alone would have all of it.
        share = division.devices / clock.processes
        (seconds,) = _mean([share * clock.seconds(training.step)])
        yield measured_step(training.plan.partitioned, cluster, seconds)


def measured_step(partitioned: Partitioned, cluster: Cluster, seconds: float) -> MeasuredStep:
    """Splits the prediction of a step into the contribution of each of `FIGURES` and the rest.

    Args:
        seconds: measured seconds of the step.
    """
    # For devices that share a processor the time model is linear in FIGURES: a prediction with one
    # figure set to 1 s and the others to 0 gives its count.
    others = predict(partitioned, with_figures(cluster, dict.fromkeys(FIGURES, 0.0))).seconds
    counts = (
        predict(partitioned, with_figures(cluster, {**dict.fromkeys(FIGURES, 0.0), name: 1.0}))
        for name in FIGURES
    )
    return MeasuredStep(tuple(each.seconds - others for each in counts), others, seconds)


def with_figures(cluster: Cluster, figures: Mapping[str, float]) -> Cluster:
    """Returns a cluster of one level with other values of `FIGURES`."""
    (level,) = cluster.levels
    device = replace(
        cluster.device,
        overhead=figures["overhead"],
        pass_overhead=figures["pass_overhead"],
        step_overhead=figures["step_overhead"],
    )
    level = replace(level, call=figures["call"], latency=figures["latency"])
    return replace(cluster, device=device, levels=(level,))


def fit_overheads(cluster: Cluster, steps: Sequence[MeasuredStep]) -> Cluster:
    """Fits `FIGURES` to steps: non-negative least squares of relative errors."""
    from scipy.optimize import nnls

    link = ASSUMED_LINK
    assumed = {
        "overhead": cluster.device.overhead,
        "pass_overhead": PASS_OVERHEAD,
        "step_overhead": PASS_OVERHEAD,
        "call": link.call,
        "latency": link.latency,
    }
    counts = np.array([each.counts for each in steps])
    seconds = np.array([each.seconds for each in steps])
    others = np.array([each.others for each in steps])
    pulls = PRIOR_WEIGHT / np.array([assumed[name] for name in FIGURES])
    rows = np.vstack([counts / seconds[:, None], np.diag(pulls)])
    wanted = np.concatenate([1 - others / seconds, np.full(len(FIGURES), PRIOR_WEIGHT)])
    found, _ = nnls(rows, wanted)
    return with_figures(cluster, dict(zip(FIGURES, map(float, found), strict=True)))
