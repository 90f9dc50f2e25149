"""Measure this machine's CPU or accelerator: rates of large operators, overhead of small
operators."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn

from shardwright.core.cost.cluster import Device
from shardwright.core.runtime.accelerator import CPU, device_memory, seconds_of

MATRIX_ROWS, VECTOR_NUMEL = 768, 1 << 23
"""Rows of the square matrices and elements of the vectors that are timed on a CPU. A matrix product
takes some milliseconds; a vector of 32 MB is larger than the cache."""

LARGE_MATRIX_ROWS, LARGE_VECTOR_NUMEL = 8192, 1 << 28
"""Rows of the matrices and elements of the vectors that are timed on an accelerator, which reaches
its peak rates only with operators of this size."""

ROWS, WIDTH, HEADS, BLOCKS = 8, 64, 4, 4
"""Sizes of a transformer small enough that each operator takes only its launch overhead."""

OPERATORS_PER_BLOCK = 22 + 38
"""Number of operators of one block of `SmallTransformer`, forward + backward, as counted by the
time model."""

CORES = os.cpu_count() or 1

REPEATS = 7
"""Number of timed rounds; odd, so that the median is the time of one round."""


@dataclass(frozen=True)
class Clock:
    """Timer of a function that several processes run at the same time.

    Args:
        processes: number of processes.
        wait_for_others: function that blocks until all processes have called it.
    """

    processes: int = 1
    wait_for_others: Callable[[], object] = lambda: None

    @property
    def shares_cores(self) -> bool:
        """Whether there are more processes than cores."""
        return self.processes > CORES

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the median seconds of `work` while all processes run it, after one warm-up round.

        If processes share cores, the time is derived from CPU time, as wall time would include
        other load on the machine.
        """
        clock, share = time.perf_counter, 1.0
        if self.shares_cores:
            clock, share = time.process_time, self.processes / CORES
        times = []
        for _ in range(REPEATS + 1):
            # All processes start together, so that each round has the load of all of them.
            self.wait_for_others()
            start = clock()
            work()
            times.append(clock() - start)
        # One of n processes has 1/n of the cores, so its wall time is n / cores of its CPU time.
        return share * median(times[1:])


def measure_device(clock: Clock | None = None, device: torch.device = CPU) -> Device:
    """Return the measured rates of the CPU, or of an accelerator that no other process uses.

    Args:
        clock: timer of the processes that share the CPU, each with all threads of torch; by default
            a timer of this process only.
        device: device to measure.
    """
    clock = clock or Clock()

    def seconds(work: Callable[[], object]) -> float:
        """Return the seconds of a call of `work` on `device`; on a CPU, in one process that uses
        all cores."""
        # An accelerator is timed by events, as its kernels run after the call has returned.
        if device != CPU:
            return median([seconds_of(work, device) for _ in range(REPEATS + 1)][1:])
        # Alone, each process would have the cores of all.
        return clock.seconds(work) / clock.processes

    rows, elements = (
        (MATRIX_ROWS, VECTOR_NUMEL) if device == CPU else (LARGE_MATRIX_ROWS, LARGE_VECTOR_NUMEL)
    )
    # Not every accelerator has double precision, and few CPUs are fast in half precision.
    third_dtype = torch.float64 if device == CPU else torch.float16
    rates = {}
    for dtype in (torch.float32, torch.bfloat16, third_dtype):
        a = torch.rand(rows, rows, device=device).to(dtype)
        rates[str(dtype).removeprefix("torch.")] = 2 * rows**3 / seconds(partial(torch.mm, a, a))
    x, y = torch.ones(elements, device=device), torch.ones(elements, device=device)
    # The addition reads two vectors and writes one.
    moved_bytes = 3 * x.element_size() * elements
    # Small operators use one core, and further processes use the other cores at the same time.
    concurrent_processes = CORES if clock.processes == 1 and device == CPU else 1
    return Device(
        memory=device_memory(device),
        rates=rates,
        # With `out`, as allocating a result would be timed too.
        memory_bandwidth=moved_bytes / seconds(partial(torch.add, x, y, out=x)),
        overhead=seconds(SmallTransformer(device).train)
        / (OPERATORS_PER_BLOCK * BLOCKS)
        / concurrent_processes,
        # The rates are those of one process that uses all cores, which further processes share.
        at_full_rate=1 if device == CPU else None,
    )


class SmallTransformer:
    """`BLOCKS` small transformer blocks over `ROWS` tokens, with views between operators."""

    def __init__(self, device: torch.device) -> None:
        self.blocks = [_SmallTransformerBlock().to(device) for _ in range(BLOCKS)]
        self.x = torch.ones(1, ROWS, WIDTH, device=device, requires_grad=True)

    def train(self) -> None:
        """Run the forward and the backward pass of all blocks."""
        x = self.x
        for block in self.blocks:
            x = block(x)
        x.sum().backward()  # type: ignore[no-untyped-call]


class _SmallTransformerBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value, out, up, down = self.linears
        rows = self.norms[0](x)
        q, k, v = (
            linear(rows).view(1, -1, HEADS, WIDTH // HEADS).transpose(1, 2)
            for linear in (query, key, value)
        )
        attention = nn.functional.scaled_dot_product_attention(_apply_rope(q), _apply_rope(k), v)
        x = x + out(attention.transpose(1, 2).reshape(1, -1, WIDTH))
        y: Tensor = down(nn.functional.gelu(up(self.norms[1](x))))
        return x + y


def _apply_rope(x: Tensor) -> Tensor:
    """Apply a rotary position embedding with a constant angle to `x`."""
    half = x.shape[-1] // 2
    # Cosine and sine of one angle.
    return x * 0.6 + torch.cat([-x[..., half:], x[..., :half]], -1) * 0.8
