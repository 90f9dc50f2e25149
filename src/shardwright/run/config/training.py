"""From a run and its plan to a trained model, as one rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from shardwright.core.api import parallelize
from shardwright.core.api.shared_plan import shared_plan
from shardwright.core.checkpoint.checkpoint import Checkpoints
from shardwright.core.checkpoint.position import Position
from shardwright.core.cost.clusters import load_cluster
from shardwright.core.cost.collective_totals import collective_totals
from shardwright.core.parallel.module import ParallelModule
from shardwright.core.plan import Plan
from shardwright.core.plan.measured import Measured
from shardwright.core.runtime.accelerator import peak_bytes
from shardwright.errors import ConfigError, PlanError
from shardwright.run.config.run import Run
from shardwright.run.launch.process_group import World, process_group
from shardwright.run.loop.loop import train
from shardwright.run.loop.non_finite import check_finite_state
from shardwright.run.loop.step_log import StepRecord
from shardwright.run.loop.step_profile import StepProfile, gathered_ranks


def train_rank(
    run: Run,
    plan: Plan | Callable[[], Plan],
    world: World,
    on_step: Callable[[StepRecord], None],
    on_start: Callable[[Position], None] = lambda start: None,
    profile: Profile | None = None,
) -> None:
    """Train as one rank of `world`.

    Args:
        plan: or what makes it, which rank 0 calls for all.
        on_start: called with the position where the run starts or resumes.
        profile: steps to be profiled.

    Raises:
        PlanError: the world is not of the plan's size, or the plan is for another model.
        CheckpointError: the newest checkpoint is of another model.
        ConfigError: fewer steps are left than are to be profiled.
        ShardwrightError: on all ranks, what rank 0 raises while it plans.
    """
    if isinstance(plan, Plan) and world.size != plan.devices:
        raise PlanError(
            f"the plan is for {plan.devices} devices, but there are {world.size} processes: "
            f"start {plan.devices}, or plan for {world.size}"
        )
    timeout = timedelta(seconds=run.config.train.timeout_seconds)
    saving: AbstractContextManager[Checkpoints | None] = run.checkpoints() or nullcontext()
    with process_group(world, timeout, run.config.train.device) as device, saving as checkpoints:
        if not isinstance(plan, Plan):
            # Code that differs between nodes would go unnoticed if the graph came from rank 0.
            plan = shared_plan((run.model_to_plan(), run.config.parallel.model_dump()), plan)
        training = RankTraining.of(run, plan, device, profile)
        training.train(checkpoints, on_step, on_start)


@dataclass(frozen=True)
class Profile:
    """Steps that are profiled, after a first one.

    Args:
        folder: of each rank, where its trace is written.
        on_measured: called on rank 0 with what all ranks measured.
    """

    steps: int
    folder: Callable[[int], Path]
    on_measured: Callable[[Plan, Measured], None]


def check_profiled_steps(profiled: int, steps: int) -> None:
    """Raises: ConfigError: a run has too few steps left for so many to be profiled."""
    if steps <= profiled:
        most = f": at most --profile {steps - 1}" if steps > 1 else ""
        raise ConfigError(
            f"--profile {profiled} needs {profiled + 1} steps, the first to warm up, but the run"
            f" has {steps}{most}"
        )


@dataclass(frozen=True)
class RankTraining:
    """A run on one rank, from the moment when it has its share of the parameters."""

    run: Run
    plan: Plan
    net: ParallelModule
    optimizer: torch.optim.Optimizer
    profile: Profile | None = None

    @classmethod
    def of(
        cls, run: Run, plan: Plan, device: torch.device, profile: Profile | None = None
    ) -> RankTraining:
        """Raises: PlanError: the plan is for another model, or for parts of batches."""
        if plan.arrivals:
            raise PlanError(
                "by the plan's dataset_strategy each rank gives its own part of a batch, but a run"
                " gives whole batches: plan with dataset_strategy='full_batch', or train with"
                " `sw.dataloader` in a loop of your own"
            )
        # On the meta device there are no values, so none are made.
        model = run.model_to_plan() if device.type == "meta" else run.deferred_model()
        net = parallelize(model, plan, device, named_ranges=profile is not None)
        assert isinstance(net, ParallelModule)
        return cls(run, plan, net, run.optimizer(net.parameters()), profile)

    def train(
        self,
        checkpoints: Checkpoints | None,
        on_step: Callable[[StepRecord], None],
        on_start: Callable[[Position], None] = lambda start: None,
    ) -> None:
        """All steps that are left; the other arguments are those of `train_rank`."""
        run, net, optimizer = self.run, self.net, self.optimizer
        settings, policy, numbers = run.config.train, run.checkpoint_policy, run.numbers
        start = policy.begin(net, optimizer, checkpoints, numbers)
        last = run.last_step(start)
        if self.profile is not None:
            check_profiled_steps(self.profile.steps, last - start.step)
        on_start(start)

        def step_ends(record: StepRecord) -> None:
            if profiled is not None and profiled.step_ends():
                self._measured(profiled)
            on_step(self._with_rates(record))

        def after_step(place: Position) -> None:
            saves = policy.saves_at(place.step, last) and checkpoints is not None
            if saves or place.step == last:
                check_finite_state(net, optimizer, f"after step {place.step}")
            if saves and checkpoints is not None:
                checkpoints.save(net, optimizer, place, self.plan, numbers)

        devices = net.execution.devices
        waits = devices.waits.counting(devices.device) if devices.several else nullcontext()
        with self._profiling() as profiled, waits:
            train(
                net,
                optimizer,
                run.batches,
                epochs=settings.epochs,
                max_steps=settings.steps,
                device=devices.device,
                on_step=step_ends,
                start=start,
                after_step=after_step,
                rate=run.rate(last),
                clip_norm=run.config.optimizer.clip_norm,
                non_finite=settings.non_finite,
                evaluation=run.evaluation,
            )

    def _with_rates(self, record: StepRecord) -> StepRecord:
        """A record with what follows from the plan, and the memory of the accelerator."""
        plan, speed, device = (
            self.plan,
            record.samples_per_second,
            self.net.execution.devices.device,
        )
        share = None
        if plan.step is not None and plan.step.utilization is not None:
            share = plan.step.utilization * plan.step.seconds * speed / self.run.batches.batch_size
        return replace(
            record,
            tokens_per_second=None if plan.sequence is None else speed * plan.sequence,
            utilization=share,
            peak_memory=peak_bytes(device),
        )

    def _profiling(self) -> AbstractContextManager[StepProfile | None]:
        if self.profile is None:
            return nullcontext()
        devices = self.net.execution.devices
        folder = self.profile.folder(_rank())
        return StepProfile(self.profile.steps, folder, devices.device)

    def _measured(self, profiled: StepProfile) -> None:
        """Hands on what all ranks measured, on rank 0."""
        assert self.profile is not None
        partitioned, devices = self.net.execution.partitioned, self.net.execution.devices
        mine = profiled.measured(_rank(), devices.stage, self.net, self.optimizer)
        ranks = gathered_ranks(mine)
        if ranks:
            name, stages = self.run.cluster, range(partitioned.pipeline.stages)
            cluster = None if name is None else load_cluster(name)
            self.profile.on_measured(
                self.plan,
                Measured(
                    fingerprint=self.plan.fingerprint,
                    device=devices.device.type,
                    steps=profiled.steps,
                    ranks=ranks,
                    predicted=tuple(collective_totals(partitioned, n, cluster) for n in stages),
                ),
            )


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
