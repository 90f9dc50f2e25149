"""Measure the cluster `local`: processes that share the CPU of this machine.

While one process waits, the others use its cores, so a step takes the sum of the CPU times of all
processes. CPU time is measured while all processes run the same work: matrix
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

from shardwright.core.cost.cluster import LOCAL, Cluster
from shardwright.core.cost.cluster_file import cluster_to_yaml, read_cluster
from shardwright.core.cost.local_cluster import ASSUMED_LINK, PASS_OVERHEAD, save_local_cluster
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

SHORT_MESSAGE, LONG_MESSAGE = 1 << 18, 1 << 22
"""Number of float32 elements of the timed all-reduces."""

PRIOR_WEIGHT = 0.01
"""Weight of the prior: the relative deviation of a figure from its assumed value. The relative
error of a step has weight 1. Steps of two processes have as many calls as messages, so without a
prior they cannot separate the overhead of a call from that of a message."""

FIGURES = ("overhead", "pass_overhead", "step_overhead", "call", "latency")
"""Fitted fields of `Device` and `LinkLevel`, in seconds of a process that runs alone."""


def calibrate(processes: int = 2, on_progress: OnProgress = ignore_progress) -> Cluster:
    """Measure this machine with `measure_cluster`, and save the cluster in the user's cache."""
    cluster = measure_cluster(processes, on_progress)
    save_local_cluster(cluster)
    return cluster


def measure_cluster(processes: int, on_progress: OnProgress = ignore_progress) -> Cluster:
    """Measure this machine with processes that compute and communicate at the same time.

    Rates are per CPU, not per process, so the result is also valid for another number of processes.

    Args:
        processes: number of processes, at least 2.
        on_progress: called before each part of the measurement.

    Raises:
        ValueError: if there are fewer than two processes.
        ConfigError: if `scipy` is not installed.
    """
    if processes < 2:
        raise ValueError(
            f"measuring links needs at least 2 processes, got {processes}\nuse processes=2"
        )
    # Imported early, so that a missing package is reported before minutes of measuring.
    with needs_extra("tools", "calibrating this machine needs `scipy`", ConfigError):
        import scipy.optimize  # noqa: F401
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "cluster.yaml"
        reports: SimpleQueue[tuple[str, int, int]] = get_context("spawn").SimpleQueue()
        context = spawn(_measure_in_process, (processes, result, reports), processes, join=False)  # type: ignore[no-untyped-call]
        on_progress("starting processes")
        # False while processes run; raises the error of a process that failed.
        while not context.join(timeout=0.2):
            while not reports.empty():
                on_progress(*reports.get())
        return read_cluster(read_text(result, ConfigError), str(result))


def _measure_in_process(
    rank: int, processes: int, result: Path, reports: SimpleQueue[tuple[str, int, int]]
) -> None:
    """Run the measurements as one of the processes.

    Args:
        result: file to which rank 0 writes the cluster, averaged over the processes.
        reports: queue to which rank 0 sends its progress.
    """
    # The processes share the cores.
    torch.set_num_threads(max(1, torch.get_num_threads() // processes))
    # Variables of the user take precedence.
    os.environ |= {**loopback_interfaces(), **os.environ}
    # A file instead of a port, which other users of the machine could reach.
    store = result.with_name("store").as_uri()
    dist.init_process_group(HOST_BACKEND, store, rank=rank, world_size=processes)
    # All ranks measure the same; one of them reports it.
    report = (lambda *words: reports.put(words)) if rank == 0 else ignore_progress
    report("operators and large messages", 0, 0)
    cluster = _measure_rates(Clock(processes, dist.barrier))
    steps = list(_measure_steps(Clock(processes, dist.barrier), cluster, report))
    if rank == 0:
        result.write_text(cluster_to_yaml(fit_overheads(cluster, steps)), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _measure_rates(clock: Clock) -> Cluster:
    """Measure the rates of large operators and messages, without overheads."""
    device = measure_device(clock)
    # A group of all processes, which needs no device mesh.
    group = Group((), dist.group.WORLD.group_name, clock.processes, tuple(range(clock.processes)))  # type: ignore[union-attr]
    # Two sizes, whose difference in time has no latency.
    short, long = (
        clock.seconds(partial(all_reduce(group), torch.zeros(size)))
        for size in (SHORT_MESSAGE, LONG_MESSAGE)
    )
    # 2 (n-1)/n of the 4-byte elements: a ring all-reduce.
    sent = 2 * (clock.processes - 1) / clock.processes * 4 * (LONG_MESSAGE - SHORT_MESSAGE)
    # Positive, even if noise makes the long message the faster one.
    bandwidth = sent / max(long - short, 1e-9)
    figures = _average_over_processes(
        [*device.rates.values(), device.memory_bandwidth, device.overhead, bandwidth]
    )
    *rates, memory_bandwidth, overhead, bandwidth = figures
    device = replace(
        device,
        rates=dict(zip(device.rates, rates, strict=True)),
        memory_bandwidth=memory_bandwidth,
        overhead=overhead,
    )
    return Cluster(LOCAL, device, (replace(ASSUMED_LINK, bandwidth=bandwidth),))


def _average_over_processes(figures: Sequence[float]) -> list[float]:
    """Average numbers elementwise over all processes. Collective."""
    mean = torch.tensor(figures, dtype=torch.float64) / dist.get_world_size()
    dist.all_reduce(mean)
    return mean.tolist()


@dataclass(frozen=True)
class MeasuredStep:
    """Measured and predicted time of one training step of a small model, to fit overheads.

    Args:
        counts: coefficient of each of `FIGURES` (fitted overheads of the cluster, in seconds) in
            the predicted time of the step.
        other_seconds: predicted seconds of the step if all `FIGURES` are 0.
        seconds: measured seconds of the step.
    """

    counts: tuple[float, ...]
    other_seconds: float
    seconds: float


def _measure_steps(clock: Clock, cluster: Cluster, report: OnProgress) -> Iterator[MeasuredStep]:
    model = SmallModel(clock.processes)
    for index, sharding in enumerate(model.shardings):
        report("steps of a small model", index, len(model.shardings))
        training = model.prepare_training(sharding, cluster)
        # Untimed: allocates the state of the optimizer.
        training.step()
        # If fewer devices than processes train together, the processes train independent replicas
        # at the same time, each with its share of the CPU.
        share = sharding.devices / clock.processes
        (seconds,) = _average_over_processes([share * clock.seconds(training.step)])
        yield measured_step(training.plan.partitioned, cluster, seconds)


def measured_step(partitioned: Partitioned, cluster: Cluster, seconds: float) -> MeasuredStep:
    """Split the predicted time of a step into the contributions of `FIGURES` and all other seconds.

    Args:
        partitioned: the model of the step, partitioned over the processes.
        cluster: cluster of the prediction; its values of `FIGURES` are ignored.
        seconds: measured seconds of the step.
    """
    # For devices that share a processor the time model is linear in FIGURES: a prediction with one
    # figure set to 1 s and the others to 0 gives its count.
    other_seconds = predict(partitioned, with_figures(cluster, dict.fromkeys(FIGURES, 0.0))).seconds
    counts = (
        predict(partitioned, with_figures(cluster, {**dict.fromkeys(FIGURES, 0.0), name: 1.0}))
        for name in FIGURES
    )
    return MeasuredStep(
        tuple(each.seconds - other_seconds for each in counts), other_seconds, seconds
    )


def with_figures(cluster: Cluster, figures: Mapping[str, float]) -> Cluster:
    """Return a copy of `cluster`, which has one link level, with new values of `FIGURES`."""
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
    """Return `cluster` with non-negative `FIGURES`, the least-squares fit to measured `steps`."""
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
    other_seconds = np.array([each.other_seconds for each in steps])
    prior_weights = PRIOR_WEIGHT / np.array([assumed[name] for name in FIGURES])
    # One row for each step, relative to its time, and one for each figure: the prior.
    rows = np.vstack([counts / seconds[:, None], np.diag(prior_weights)])
    targets = np.concatenate([1 - other_seconds / seconds, np.full(len(FIGURES), PRIOR_WEIGHT)])
    fitted, _ = nnls(rows, targets)
    return with_figures(cluster, dict(zip(FIGURES, map(float, fitted), strict=True)))
