"""What processes on this machine take, measured while all of them do it at once.

Where they share the cores of one CPU they take in turn the CPU time of all: a step lasts as long as
all of them work, whoever waits. So what is measured is the CPU time of small programs that are like
those of a plan: operators of a block of a transformer, collectives between them, forward and
backward, and passes of a pipeline.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor, nn
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
from shardwright.cost.small_pipeline import SmallPipeline
from shardwright.errors import ConfigError
from shardwright.rules.rule import Function
from shardwright.runtime.accelerator import (
    CPU,
    HOST_BACKEND,
    device_memory,
    loopback_interfaces,
    seconds_of,
)
from shardwright.runtime.collectives import (
    BoundCollective,
    all_gather,
    all_reduce,
    identity,
    reduce_scatter,
)
from shardwright.runtime.devices import Group
from shardwright.text_files import read_text

MATRIX, STREAM = 768, 1 << 23
"""Rows of the matrices and elements of the vectors that are timed."""

LARGE_MATRIX, LARGE_STREAM = 8192, 1 << 28
"""The same of an accelerator."""

ROWS, WIDTH, HEADS, BLOCKS = 8, 64, 4, 4
"""Of a small transformer, where operators take no longer than any."""

OPERATORS = 22 + 38
"""Of one of its blocks, as the time model counts them: forward, and gradients."""

LARGE_MESSAGE = 1 << 20
"""Elements (float32) of the large all-reduces that are timed."""

FEW, MANY = 2, 8
"""Micro-batches of the pipelines that are timed."""

CORES = os.cpu_count() or 1

REPEATS = 7


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
    clock = Clock(processes, dist.barrier)
    device = measure_device(clock)
    figures = [*device.rates.values(), device.memory_bandwidth, device.overhead]
    figures += [*_communication(clock), *_passes(clock)]
    mean = torch.tensor(figures, dtype=torch.float64) / processes
    dist.all_reduce(mean)
    *rates, bandwidth, overhead, short, long, pair, once, step = mean.tolist()
    if rank == 0:
        link = link_of(processes, short, long, pair)
        alone = once / processes - link.call - link.latency
        device = replace(
            device,
            rates=dict(zip(device.rates, rates, strict=True)),
            memory_bandwidth=bandwidth,
            overhead=overhead,
            pass_overhead=max(0.0, alone - SmallPipeline.OPERATORS * overhead),
            step_overhead=step / processes,
        )
        result.write_text(cluster_to_yaml(Cluster(LOCAL, device, (link,))), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


@dataclass(frozen=True)
class Clock:
    """Takes the time of what so many processes do at once.

    Args:
        together: waits for the other processes, which measure the same.
    """

    processes: int = 1
    together: Callable[[], object] = lambda: None

    @property
    def takes_turns(self) -> bool:
        """Whether the processes share cores."""
        return self.processes > CORES

    def seconds(self, work: Callable[[], object]) -> float:
        """The median time of `work` when all processes do it, after one round that is not counted;
        each round begins `together`.

        Where they share cores they take in turn the CPU time of all: the clock would also count
        what else the machine does.
        """
        clock, share = time.perf_counter, 1.0
        if self.takes_turns:
            clock, share = time.process_time, self.processes / CORES
        times = []
        for _ in range(REPEATS + 1):
            self.together()
            started = clock()
            work()
            times.append(clock() - started)
        return share * median(times[1:])


def measure_device(clock: Clock | None = None, device: torch.device = CPU) -> Device:
    """The CPU as processes such as this one share it, each with all threads that torch uses, at the
    rate of the whole; or an accelerator, which no other process uses.

    Args:
        clock: of this process alone by default.
    """
    clock = clock or Clock()

    def seconds(work: Callable[[], object]) -> float:
        """Of all processes' work, one after the other, at the rate of the whole CPU."""
        if device != CPU:
            return median([seconds_of(work, device) for _ in range(REPEATS + 1)][1:])
        return clock.seconds(work) / clock.processes

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
    beside = CORES if clock.processes == 1 and device == CPU else 1
    return Device(
        memory=device_memory(device),
        rates=rates,
        memory_bandwidth=moved / seconds(partial(torch.add, x, y, out=x)),
        overhead=seconds(SmallTransformer(device).train) / (OPERATORS * BLOCKS) / beside,
        at_full_rate=1 if device == CPU else None,
    )


class SmallTransformer:
    """Blocks on a few rows, with the views between operators that such blocks have."""

    def __init__(self, device: torch.device) -> None:
        self.blocks = [_SmallBlock().to(device) for _ in range(BLOCKS)]
        self.x = torch.ones(1, ROWS, WIDTH, device=device, requires_grad=True)

    def train(self, before: Function = identity, after: Function = identity) -> None:
        """Forward and backward.

        Args:
            before, after: what comes before and after attention and the linear layers that follow.
        """
        x = self.x
        for block in self.blocks:
            x = block(x, before, after)
        x.sum().backward()  # type: ignore[no-untyped-call]


class _SmallBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6))

    def forward(self, x: Tensor, before: Function, after: Function) -> Tensor:
        query, key, value, out, up, down = self.linears
        rows = before(self.norms[0](x))
        q, k, v = (
            linear(rows).view(1, -1, HEADS, WIDTH // HEADS).transpose(1, 2)
            for linear in (query, key, value)
        )
        attention = nn.functional.scaled_dot_product_attention(_rotated(q), _rotated(k), v)
        x = x + after(out(attention.transpose(1, 2).reshape(1, -1, WIDTH)))
        return x + after(down(nn.functional.gelu(up(before(self.norms[1](x))))))


def _rotated(x: Tensor) -> Tensor:
    """As rotary positions do it, by a constant angle."""
    half = x.shape[-1] // 2
    return x * 0.6 + torch.cat([-x[..., half:], x[..., :half]], -1) * 0.8


def _communication(clock: Clock) -> tuple[float, float, float]:
    """Seconds of a small collective and of a large all-reduce of all processes, and of a small
    collective of each two, which is 0 where the processes are odd in number."""
    every, network = _group(clock.processes), SmallTransformer(CPU)
    short = _collective(every, network, clock)
    long = clock.seconds(partial(all_reduce(every), torch.zeros(LARGE_MESSAGE)))
    pair = 0.0 if clock.processes % 2 else _collective(_group(2), network, clock)
    return short, long, pair


def _group(size: int) -> Group:
    """This process and its neighbors, as many as are in each group."""
    mine, _ = dist.new_subgroups(size)  # type: ignore[no-untyped-call]
    return Group((), str(mine.group_name), size, tuple(range(size)))


def _collective(group: Group, network: SmallTransformer, clock: Clock) -> float:
    """Seconds of a small one between operators, forward or backward, as sequence parallelism has
    them: as many gathers as reductions that scatter."""
    gather, scatter = all_gather(1, group), reduce_scatter(1, group)
    before, after = BoundCollective(gather, scatter), BoundCollective(scatter, gather)
    with_them = clock.seconds(partial(network.train, before, after))
    return max(0.0, with_them - clock.seconds(network.train)) / (8 * BLOCKS)


def _passes(clock: Clock) -> tuple[float, float]:
    """Seconds of a pass of one stage for one micro-batch, with sending what it made, and of all
    that a step takes beside its passes."""
    few, many = (
        clock.seconds(SmallPipeline(clock.processes, CPU, number).train) for number in (FEW, MANY)
    )
    once = max(0.0, many - few) / (2 * (MANY - FEW))
    # While the pipeline fills and drains stages wait, unless they take turns.
    waits = 0 if clock.takes_turns else clock.processes - 1
    return once, max(0.0, few - 2 * (FEW + waits) * once)


def link_of(processes: int, short: float, long: float, pair: float) -> LinkLevel:
    """The link on which collectives of so many processes take so long.

    Args:
        short: seconds of a small one of all processes, on average of gathers and reductions that
            scatter: one round and two.
        long: of a large all-reduce of all processes.
        pair: as `short`, of two of them, all processes at once; 0 if it is not known.
    """
    messages = 1.5 * (processes - 1)
    latency, call = short / messages, 0.0
    if pair and processes > 2:
        # A call takes the same in any group, and messages follow each other.
        latency = max(0.0, short - pair) / (messages - 1.5)
        call = max(0.0, pair - 1.5 * latency)
    moving = max(long - call - 2 * (processes - 1) * latency, 1e-9)
    sent = 2 * (processes - 1) / processes * 4 * LARGE_MESSAGE
    alone = latency / processes, call / processes
    return LinkLevel("processes", sent / moving, alone[0], call=alone[1], collectives=GLOO)
