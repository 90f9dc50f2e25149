"""Trains for a few steps as one rank of many, without the others and without devices.

Everything that `train` runs on a rank runs here, and at the same size: process groups, the rank's
shards of the parameters, forward and backward, clipping, the optimizer, a checkpoint. Only what is
received from other ranks is not theirs; so numbers mean nothing, but shapes, bytes, calls and the
time on the host are those of the rank.
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
from shardwright.core.cost.tensor_tracking import PARAMETERS, FusedAttention
from shardwright.core.parallel.loss_weights import weighing_bytes
from shardwright.core.parallel.module import ParallelModule
from shardwright.core.plan import Plan
from shardwright.core.runtime.accelerator import AllocatedPeak, accelerator_kind
from shardwright.core.runtime.dtensor import own_tensor
from shardwright.core.torch_internals.distributed import GroupClock
from shardwright.errors import PlanError

STEPS = 3
"""The first makes the optimizer's state and fills caches; the others are like all that follow."""


@dataclass(frozen=True)
class RehearsalPhase:
    """A part of a rehearsal, in seconds of CPU.

    Args:
        parts: what of it was taken by what.
    """

    name: str
    seconds: float
    parts: dict[str, float]


@dataclass(frozen=True)
class RankRehearsal:
    """What one rank did.

    Args:
        device: where its tensors were: `cpu`, the accelerator, or `meta`, where they have no
            numbers and no memory.
        groups: how many calls made process groups.
        traffic: of a training step, by kind of collective.
        sent_bytes: in each step.
        planned_bytes: in a step, as the plan says, and to weigh its micro-batches.
        parameter_bytes, optimizer_bytes: what the rank keeps of them.
        peak_bytes: the most that its tensors took in a step.
        planned_peak: the same as the plan says.
        allocated_peak: what the accelerator's allocator gave out at most in a step; None elsewhere.
        checkpoint_bytes: of its files; None where there are none, which is not on the CPU.
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
        """Whether each step sent what the plan says. In the first, PyTorch's stages also vote."""
        first, *others = self.sent_bytes
        return first >= self.planned_bytes and set(others) == {self.planned_bytes}


@dataclass(frozen=True)
class Rehearsal:
    """What some ranks did, one after the other.

    Args:
        devices: of the plan.
    """

    devices: int
    ranks: tuple[RankRehearsal, ...]

    def passes(self) -> bool:
        """Whether all of them sent what the plan says."""
        return all(rank.as_planned for rank in self.ranks)


class Trainee(Protocol):
    """A model on one rank, and what trains it for `STEPS` steps."""

    @property
    def net(self) -> ParallelModule: ...

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    def train(self, checkpoints: Checkpoints | None, on_step: Callable[[], None]) -> None:
        """Calls `on_step` after each step, and saves a checkpoint after the last."""


def first_and_last_ranks(plan: Plan) -> list[int]:
    """The first and the last rank of each stage."""
    size = plan.mesh.num_devices
    ends = ((stage * size, stage * size + size - 1) for stage in range(plan.pipeline.stages))
    return list(dict.fromkeys(rank for pair in ends for rank in pair))


def rehearse_rank(
    rank: int, plan: Plan, device: torch.device, prepare: Callable[[torch.device], Trainee]
) -> RankRehearsal:
    """Trains as `rank` of the plan's devices.

    Args:
        device: the CPU, the meta device, or an accelerator.
        prepare: makes the model, the rank's shards of it, and the optimizer.

    Raises:
        PlanError: there is no such rank, or a process group is running.
    """
    if not 0 <= rank < plan.devices:
        raise PlanError(f"no rank {rank}: {plan.devices} devices are ranks 0 to {plan.devices - 1}")
    kind = accelerator_kind()
    valid = ["meta", "cpu", *([kind.type] if kind is not None else [])]
    if device.type not in valid:
        raise PlanError(f"a rank cannot be rehearsed on '{device}': valid are {' or '.join(valid)}")
    clock, lone = _Clock(), LoneRank()
    with (
        TemporaryDirectory() as folder,
        GroupClock() as groups,
        fake_process_group(rank, plan.devices, device),
        torch.random.fork_rng(),
        FusedAttention() if device.type == "meta" else nullcontext(),
        lone,
    ):
        allocated, peaks = AllocatedPeak.of(device), list[int]()
        trainee = prepare(device)
        clock.parts["process groups"] = groups.seconds
        clock.end("start")
        sent, happened = _observe(trainee, lone, clock), list[int]()
        checkpoints = Checkpoints(folder) if device.type == "cpu" else None

        def on_step() -> None:
            clock.end(f"step {len(sent)}")
            happened.append(len(lone.history))
            if allocated is not None:
                peaks.append(allocated.bytes())

        if allocated is not None:
            allocated.restart()
        trainee.train(checkpoints, on_step)
        if checkpoints is not None:
            clock.end("checkpoint written")
            checkpoints.load(trainee.net, trainee.optimizer)
            clock.end("checkpoint read")
        files = [path.stat().st_size for path in Path(folder).rglob("*.distcp")]
    net, optimizer, stage = trainee.net, trainee.optimizer, trainee.net.execution.devices.stage
    state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
    return RankRehearsal(
        rank=rank,
        stage=stage,
        device=device.type,
        phases=tuple(clock.phases),
        groups=groups.calls,
        traffic=lone.traffic,
        sent_bytes=tuple(sent),
        planned_bytes=_planned_bytes(net),
        parameter_bytes=sum(own_tensor(p).nbytes for p in net.parameters()),
        optimizer_bytes=sum(own_tensor(t).nbytes for t in state),
        peak_bytes=sum(lone.bytes_between(lone.peak(end=happened[-1])).values()),
        planned_peak=memory(net.execution.partitioned, optimizer, plan.dry_runs).stages[stage].peak,
        allocated_peak=max(peaks, default=None),
        checkpoint_bytes=None if checkpoints is None else sum(files),
    )


def _planned_bytes(net: ParallelModule) -> int:
    stage, last = net.execution.devices.stage, net.execution.partitioned.chunks[-1].stage
    weighing = weighing_bytes(net.execution.partitioned) if stage == last else 0
    return sum(net.execution.partitioned.step_bytes[stage]) + weighing


@dataclass
class _Clock:
    """Takes the time of one phase after the other, and of parts of it."""

    phases: list[RehearsalPhase] = field(default_factory=list)
    parts: dict[str, float] = field(default_factory=dict)
    began: float = field(default_factory=time.process_time)

    def end(self, name: str) -> None:
        """Ends the phase that began where the one before ended."""
        now = time.process_time()
        self.phases.append(RehearsalPhase(name, now - self.began, self.parts))
        self.parts, self.began = {}, now

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function; what it takes is a part of the phase."""

        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.parts[part] = time.process_time() - began

        return call


def _observe(trainee: Trainee, lone: LoneRank, clock: _Clock) -> list[int]:
    """Looks on while a model is trained: seconds, tensors, and what each step sends, which is added
    to the result."""
    net, optimizer, sent = trainee.net, trainee.optimizer, list[int]()
    lone.track([own_tensor(parameter) for parameter in net.parameters()], PARAMETERS)
    lone.track(list(net.buffers()), "")

    def train_step(*args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = step(*args, **kwargs)
        sent.append(sum(each.bytes for each in lone.traffic.values()))
        return loss

    step = clock.timed("forward and backward", lone.counted(net.train_step))
    vars(net)["train_step"] = train_step
    vars(net)["clip_grad_norm_"] = clock.timed("clipping", net.clip_grad_norm_)
    optimizer.step = clock.timed("optimizer", partial(type(optimizer).step, optimizer))  # type: ignore[method-assign]
    return sent
