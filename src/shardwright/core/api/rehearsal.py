"""Dry-run a few training steps as one rank, without the other ranks and without devices.

The rank runs at full size: process groups, parameter shards, forward and backward passes, gradient
clipping, the optimizer and a checkpoint. Received tensors have placeholder values, so that results
are meaningless; shapes, bytes, calls and host time equal those of a real rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwright.core.api.lone_rank import LoneRank, Traffic, fake_process_group
from shardwright.core.checkpoint.checkpoint import Checkpoints
from shardwright.core.cost.memory import memory
from shardwright.core.cost.tensor_tracking import PARAMETERS
from shardwright.core.parallel.module import ParallelModule
from shardwright.core.parallel.whole_batch_values import prologue_bytes
from shardwright.core.plan import Plan
from shardwright.core.runtime.accelerator import AllocatedPeak, accelerator_type
from shardwright.core.runtime.dtensor import detached_local
from shardwright.core.torch_internals.distributed import GroupClock
from shardwright.errors import PlanError

STEPS = 3
"""Number of training steps. The first differs: it creates optimizer state and fills caches."""


@dataclass(frozen=True)
class RehearsalPhase:
    """CPU time of a phase of a rehearsal.

    Args:
        name: name of the phase, such as `step 1`.
        seconds: CPU seconds of the phase.
        parts: CPU seconds by component of the phase, such as `optimizer`; the sum may be less than
            `seconds`.
    """

    name: str
    seconds: float
    parts: dict[str, float]


@dataclass(frozen=True)
class RankRehearsal:
    """Measurements of one rank's rehearsal.

    Args:
        rank, stage: the rank, and the index of its pipeline stage.
        device: type of the device: `cpu`, an accelerator, or `meta`.
        phases: CPU time of each phase, in order.
        groups: number of calls that created process groups.
        traffic: calls and bytes of the last training step, by collective.
        sent_bytes: bytes that the rank sent in each step.
        planned_bytes: predicted bytes that the rank sends per step, including all-gathers of inputs
            for operators on the global batch.
        parameter_bytes, optimizer_bytes: bytes of the rank's shards of parameters and of optimizer
            state.
        peak_bytes: peak bytes of live tensors in a step.
        planned_peak: predicted peak bytes of a step.
        allocated_peak: peak bytes allocated on the accelerator in a step; None on CPU and meta.
        checkpoint_bytes: bytes of the rank's checkpoint files; None unless on the CPU.
    """

    rank: int
    stage: int
    device: str
    phases: tuple[RehearsalPhase, ...]
    groups: int
    traffic: dict[str, Traffic]
    sent_bytes: tuple[int, ...]
    planned_bytes: int
    parameter_bytes: int
    optimizer_bytes: int
    peak_bytes: int
    planned_peak: int
    allocated_peak: int | None
    checkpoint_bytes: int | None

    @property
    def as_planned(self) -> bool:
        """Whether every step sent the predicted bytes. The first step may send more, as PyTorch's
        pipeline stages exchange shapes."""
        first, *later = self.sent_bytes
        return first >= self.planned_bytes and set(later) == {self.planned_bytes}


@dataclass(frozen=True)
class Rehearsal:
    """Rehearsals of some ranks of a plan.

    Args:
        devices: number of devices of the plan.
        ranks: measurements of each rehearsed rank.
    """

    devices: int
    ranks: tuple[RankRehearsal, ...]

    def passes(self) -> bool:
        """Whether every rehearsed rank sent the predicted bytes."""
        return all(rank.as_planned for rank in self.ranks)


class Trainee(Protocol):
    """A planned model with an optimizer and a training loop."""

    @property
    def net(self) -> ParallelModule: ...

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    def train(self, checkpoints: Checkpoints | None, on_step: Callable[[], None]) -> None:
        """Train for `STEPS` steps, then save a checkpoint.

        Args:
            checkpoints: folder of the checkpoint; None to save none.
            on_step: called after each step.
        """


def first_and_last_ranks(plan: Plan) -> list[int]:
    """Return the first and the last rank of each pipeline stage."""
    size = plan.mesh.num_devices
    ends = ((stage * size, stage * size + size - 1) for stage in range(plan.pipeline.stages))
    # A stage of one device has the same first and last rank.
    return list(dict.fromkeys(rank for pair in ends for rank in pair))


def rehearse_rank(
    rank: int, plan: Plan, device: torch.device, prepare: Callable[[torch.device], Trainee]
) -> RankRehearsal:
    """Train as one rank of a plan, and return the measurements.

    Args:
        rank: the rank.
        plan: the plan.
        device: the CPU, the meta device, or an accelerator.
        prepare: builds the planned model and its optimizer on a given device.

    Raises:
        PlanError: if the rank or device does not exist, or a process group is running.
    """
    if not 0 <= rank < plan.devices:
        raise PlanError(
            f"no rank {rank}: the plan has {plan.devices} devices\n"
            f"use a rank from 0 to {plan.devices - 1}"
        )
    own_device = accelerator_type()
    valid = ["meta", "cpu", *([own_device.type] if own_device is not None else [])]
    if device.type not in valid:
        raise PlanError(
            f"`sw.rehearse` cannot run a rank on device {str(device)!r}\n"
            f"valid devices are {' and '.join(valid)}"
        )
    clock, lone_rank = _PhaseClock(), LoneRank()
    # `lone_rank` is entered last: the innermost dispatch mode sees the collectives first.
    with (
        TemporaryDirectory() as folder,
        GroupClock() as groups,
        fake_process_group(rank, plan.devices, device),
        # A rehearsal leaves the caller's random numbers as they are.
        torch.random.fork_rng(),
        plan.dry_runs.kernels if device.type == "meta" else nullcontext(),
        lone_rank,
    ):
        allocated, peaks = AllocatedPeak.of(device), list[int]()
        trainee = prepare(device)
        # Before the phase ends, of which it is a component.
        clock.seconds_of["process groups"] = groups.seconds
        clock.end("start")
        step_bytes, step_ends = _instrument_training(trainee, lone_rank, clock), list[int]()
        # Meta tensors have no values to write.
        checkpoints = Checkpoints(folder) if device.type == "cpu" else None

        def on_step() -> None:
            clock.end(f"step {len(step_bytes)}")
            step_ends.append(len(lone_rank.history))
            if allocated is not None:
                peaks.append(allocated.bytes())

        if allocated is not None:
            # After the model is prepared, so that the peak is that of the steps.
            allocated.restart()
        trainee.train(checkpoints, on_step)
        if checkpoints is not None:
            clock.end("checkpoint written")
            checkpoints.load(trainee.net, trainee.optimizer)
            clock.end("checkpoint read")
        # Files of `torch.distributed.checkpoint` with shards; its metadata file is not per rank.
        files = [path.stat().st_size for path in Path(folder).rglob("*.distcp")]
    net, optimizer, stage = trainee.net, trainee.optimizer, trainee.net.execution.devices.stage
    # Step counters of optimizers are tensors too, and count as in a checkpoint.
    state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
    return RankRehearsal(
        rank=rank,
        stage=stage,
        device=device.type,
        phases=tuple(clock.phases),
        groups=groups.calls,
        traffic=lone_rank.traffic,
        sent_bytes=tuple(step_bytes),
        planned_bytes=_get_planned_sent_bytes(net),
        parameter_bytes=sum(detached_local(p).nbytes for p in net.parameters()),
        optimizer_bytes=sum(detached_local(t).nbytes for t in state),
        # Only up to the last step, as checkpoints allocate tensors too.
        peak_bytes=sum(
            lone_rank.bytes_between(lone_rank.events_until_peak(end=step_ends[-1])).values()
        ),
        planned_peak=memory(net.execution.partitioned, optimizer, plan.dry_runs).stages[stage].peak,
        allocated_peak=max(peaks, default=None),
        checkpoint_bytes=None if checkpoints is None else sum(files),
    )


def _get_planned_sent_bytes(net: ParallelModule) -> int:
    stage, partitioned = net.execution.devices.stage, net.execution.partitioned
    return sum(partitioned.step_bytes[stage]) + prologue_bytes(partitioned, stage)


@dataclass
class _PhaseClock:
    """Clock of CPU seconds for consecutive phases and their components."""

    phases: list[RehearsalPhase] = field(default_factory=list)
    seconds_of: dict[str, float] = field(default_factory=dict)
    start: float = field(default_factory=time.process_time)

    def end(self, name: str) -> None:
        """End the current phase, called `name`, and begin the next."""
        # CPU seconds, as other processes of the machine do not count.
        now = time.process_time()
        self.phases.append(RehearsalPhase(name, now - self.start, self.seconds_of))
        self.seconds_of, self.start = {}, now

    def timed(self, component: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function to record its CPU time as `component` of the current phase."""

        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                spent = self.seconds_of.get(component, 0.0) + time.process_time() - start
                self.seconds_of[component] = spent

        return call


def _instrument_training(trainee: Trainee, lone_rank: LoneRank, clock: _PhaseClock) -> list[int]:
    """Instrument a training loop to measure CPU time, live tensors and bytes sent.

    Args:
        trainee: the training loop, changed in place.
        lone_rank: tracks live tensors and counts bytes sent.
        clock: measures CPU time.

    Returns:
        A list to which every training step appends the bytes sent.
    """
    net, optimizer, step_bytes = trainee.net, trainee.optimizer, list[int]()
    lone_rank.track([detached_local(parameter) for parameter in net.parameters()], PARAMETERS)
    lone_rank.track(list(net.buffers()), "")

    def train_step(*args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = step(*args, **kwargs)
        step_bytes.append(sum(each.bytes for each in lone_rank.traffic.values()))
        return loss

    step = clock.timed("forward and backward", lone_rank.counted(net.train_step))
    # `vars`, as a planned module's own `__setattr__` may react to attributes.
    vars(net)["train_step"] = train_step
    vars(net)["clip_grad_norm_"] = clock.timed("clipping", net.clip_grad_norm_)
    optimizer.step = clock.timed("optimizer", partial(type(optimizer).step, optimizer))  # type: ignore[method-assign]
    return step_bytes
