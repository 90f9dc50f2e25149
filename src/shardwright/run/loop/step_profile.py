"""Profiles steps of a run on each rank: a trace to be looked at, and a summary."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import profile, schedule, supported_activities

from shardwright.core.plan.measured import MeasuredRank
from shardwright.core.runtime.accelerator import peak_bytes, restart_peak
from shardwright.core.runtime.dtensor import own_tensor
from shardwright.run.loop.step_summary import StepSummary, most_allocated

TRACE = "trace.json.gz"


class StepProfile:
    """Profiles `steps` steps, after a first one that is slower than those that follow.

    Args:
        folder: where the trace is written, in the format of Chrome, for `ui.perfetto.dev`.
        device: of this rank.
    """

    def __init__(self, steps: int, folder: Path, device: torch.device) -> None:
        self.steps = steps
        self._accelerated, self._device = device.type != "cpu", device
        self._done, self._began, self._seconds = 0, 0.0, 0.0
        trace = str(folder / TRACE)
        self._profile = profile(
            activities=supported_activities(),  # type: ignore[no-untyped-call]
            schedule=schedule(wait=0, warmup=1, active=steps, repeat=1),
            on_trace_ready=lambda done: done.export_chrome_trace(trace),
            profile_memory=True,
        )

    def __enter__(self) -> StepProfile:
        self._profile.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)  # type: ignore[no-untyped-call]

    def step_ends(self) -> bool:
        """To be called after each step; whether it was the last of those to be profiled."""
        if self._done > self.steps:
            return False
        self._done += 1
        last = self._done > self.steps
        if last:
            self._seconds = (perf_counter() - self._began) / self.steps
        self._profile.step()
        if self._done == 1:
            restart_peak(self._device)
            self._began = perf_counter()
        return last

    def measured(
        self, rank: int, stage: int, net: nn.Module, optimizer: torch.optim.Optimizer
    ) -> MeasuredRank:
        """What the steps were like, once the last has ended."""
        events = self._profile.events() or []  # type: ignore[no-untyped-call]
        summary = StepSummary.of(events, self.steps, self._accelerated)
        peak = peak_bytes(self._device)
        if peak is None:
            peak = _kept_bytes(net, optimizer) + most_allocated(events)
        kinds = dict(summary.kinds)
        return MeasuredRank(rank, stage, self._seconds, kinds, summary.collectives, peak)


def _kept_bytes(net: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """What a rank holds between steps: its shards of parameters, buffers and optimizer state."""
    states = (value for state in optimizer.state.values() for value in state.values())
    tensors = (t for t in (*net.parameters(), *net.buffers(), *states) if torch.is_tensor(t))
    storages = (own_tensor(tensor).untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def gathered_ranks(mine: MeasuredRank) -> tuple[MeasuredRank, ...]:
    """What all ranks measured, in their order; nothing on the others. Every rank must call it."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return (mine,)
    every: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, every)
    return tuple(every or ())
