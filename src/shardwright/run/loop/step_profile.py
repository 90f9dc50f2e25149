"""Profile steps of a run on each rank, into a Chrome trace and a summary."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import nn
from torch.profiler import profile, schedule, supported_activities

from shardwright.core.agreement.collective import values_of_ranks
from shardwright.core.plan.measured import MeasuredRank
from shardwright.core.runtime.accelerator import peak_bytes, reset_peak_memory
from shardwright.core.runtime.dtensor import detached_local
from shardwright.run.loop.step_summary import StepSummary, peak_allocated

TRACE_FILE = "trace.json.gz"


class StepProfile:
    """Context that profiles `steps` steps, after one warm-up step.

    Args:
        folder: folder for the trace, a Chrome trace for `ui.perfetto.dev`.
        device: the device of this rank.
    """

    def __init__(self, steps: int, folder: Path, device: torch.device) -> None:
        self.steps = steps
        self._is_accelerated, self._device = device.type != "cpu", device
        self._num_done, self._start_time, self._seconds_per_step = 0, 0.0, 0.0
        trace = str(folder / TRACE_FILE)
        self._profile = profile(
            activities=supported_activities(),  # type: ignore[no-untyped-call]
            # PyTorch discards the warm-up step, in which starting the tracer takes time.
            schedule=schedule(wait=0, warmup=1, active=steps, repeat=1),
            on_trace_ready=lambda done: done.export_chrome_trace(trace),
            # The peak memory of a CPU is computed from these events.
            profile_memory=True,
        )

    def __enter__(self) -> StepProfile:
        self._profile.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)  # type: ignore[no-untyped-call]

    def step_done(self) -> bool:
        """Count a finished step; must be called after each step.

        Returns:
            Whether it was the last profiled step.
        """
        # Further steps of the run are not profiled.
        if self._num_done > self.steps:
            return False
        self._num_done += 1
        last = self._num_done > self.steps
        if last:
            # Taken before `step()`, which writes the trace and takes seconds itself.
            self._seconds_per_step = (perf_counter() - self._start_time) / self.steps
        self._profile.step()
        # The warm-up step allocates optimizer state and compiles kernels: measure after it.
        if self._num_done == 1:
            reset_peak_memory(self._device)
            self._start_time = perf_counter()
        return last

    def summarize(
        self, rank: int, stage: int, net: nn.Module, optimizer: torch.optim.Optimizer
    ) -> MeasuredRank:
        """Summarize the profiled steps, after the last of them has ended.

        Args:
            rank, stage: this rank and its pipeline stage.
        """
        events = self._profile.events() or []  # type: ignore[no-untyped-call]
        summary = StepSummary.of(events, self.steps, self._is_accelerated)
        peak_memory = peak_bytes(self._device)
        if peak_memory is None:
            # The CPU allocator records no peak: add up the allocation events of the profiler.
            peak_memory = _count_persistent_bytes(net, optimizer) + peak_allocated(events)
        seconds_by_kind = dict(summary.seconds_of)
        return MeasuredRank(
            rank, stage, self._seconds_per_step, seconds_by_kind, summary.collectives, peak_memory
        )


def _count_persistent_bytes(net: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of a rank's shards of parameters, buffers and optimizer state."""
    # Some optimizers also keep numbers in their state.
    states = (value for state in optimizer.state.values() for value in state.values())
    tensors = (t for t in (*net.parameters(), *net.buffers(), *states) if torch.is_tensor(t))
    storages = (detached_local(tensor).untyped_storage() for tensor in tensors)
    # By address, because tied parameters and views share storage.
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def gather_measured(measured: MeasuredRank) -> tuple[MeasuredRank, ...]:
    """Gather the measurements of all ranks on rank 0. Collective.

    Args:
        measured: measurements of this rank.

    Returns:
        The measurements in order of ranks on rank 0; an empty tuple on other ranks.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return (measured,)
    # As a dict, because values are sent as JSON.
    gathered = values_of_ranks(asdict(measured))
    ranks = TypeAdapter(tuple[MeasuredRank, ...]).validate_python(gathered)
    return ranks if dist.get_rank() == 0 else ()
