"""Train a planned run on one rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from shardwright.core.agreement.collective import values_of_ranks
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
from shardwright.core.runtime.stop_signals import StopSignals
from shardwright.errors import ConfigError, PlanError
from shardwright.run.config.run import Run
from shardwright.run.launch.process_group import World, process_group
from shardwright.run.launch.rank_failure import StoppedError
from shardwright.run.loop.loop import train
from shardwright.run.loop.non_finite import check_finite_state
from shardwright.run.loop.step_log import StepRecord
from shardwright.run.loop.step_profile import StepProfile, gather_measured


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
        plan: a plan, or a function that returns one; only rank 0 calls it, and the other ranks
            receive its result.
        on_step: called after each step.
        on_start: called with the position at which the run starts or resumes.
        profile: number of steps to profile, and destinations of the results; None for no profile.

    Raises:
        PlanError: if the plan is for another number of devices, or for another model.
        CheckpointError: if the newest checkpoint belongs to another model.
        ConfigError: if fewer steps remain than `profile` needs.
        ShardwrightError: if planning failed on rank 0; raised on all ranks.
        StoppedError: if a rank received a signal to stop, and all ranks have saved a checkpoint.
    """
    if isinstance(plan, Plan) and world.size != plan.devices:
        raise PlanError(
            f"the plan is for {plan.devices} devices, but there are {world.size} processes\n"
            f"start {plan.devices} processes, or plan for {world.size} devices"
        )
    timeout = timedelta(seconds=run.config.train.timeout_seconds)
    # Leaving the context waits for an asynchronous save that is still being written.
    saving: AbstractContextManager[Checkpoints | None] = run.checkpoints() or nullcontext()
    with process_group(world, timeout, run.config.train.device) as device:
        # Within the process group, which an asynchronous save still needs.
        with saving as checkpoints:
            if not isinstance(plan, Plan):
                # Every rank builds its model, and shares the plan only with ranks whose model is
                # equal: if all took rank 0's graph, code that differs between nodes would go
                # unnoticed.
                request = run.model_to_plan(), run.config.parallel.model_dump()
                plan = shared_plan(request, plan)
            training = RankTraining.of(run, plan, device, profile)
            stopped = training.train(checkpoints, on_step, on_start)
        if stopped is not None:
            # A launcher ends all ranks with the first, which must not be before all have saved.
            values_of_ranks(None)
    if stopped is not None:
        raise stopped


@dataclass(frozen=True)
class Profile:
    """Number of steps to profile, and destinations of the results.

    Args:
        steps: number of profiled steps, after one warm-up step.
        folder: maps a rank to the folder of its trace.
        on_measured: called on rank 0 with the plan and the measurements of all ranks.
    """

    steps: int
    folder: Callable[[int], Path]
    on_measured: Callable[[Plan, Measured], None]


def check_profiled_steps(profiled: int, steps: int) -> None:
    """Raise ConfigError unless `steps` allow one warm-up step and `profiled` profiled steps."""
    if steps <= profiled:
        most = f"at most --profile {steps - 1}, or " if steps > 1 else ""
        raise ConfigError(
            f"--profile {profiled} needs {profiled + 1} steps, the first for warm-up, but only"
            f" {steps} remain\nuse {most}more `train.steps`"
        )


@dataclass(frozen=True)
class RankTraining:
    """A run on one rank, with its parallelized model and optimizer."""

    run: Run
    plan: Plan
    net: ParallelModule
    optimizer: torch.optim.Optimizer
    profile: Profile | None = None

    @classmethod
    def of(
        cls, run: Run, plan: Plan, device: torch.device, profile: Profile | None = None
    ) -> RankTraining:
        """Parallelize the model of `run` and build its optimizer.

        Raises:
            PlanError: if the plan is for another model, or expects a shard of the batch per rank.
        """
        if plan.arrivals:
            raise PlanError(
                "the plan's `dataset_strategy` expects each rank's own shard of a batch, but a "
                "configured run passes the global batch to every rank\nplan with "
                "`dataset_strategy='full_batch'`, or write a training loop with `sw.dataloader`"
            )
        # A rehearsal on the meta device has no values to initialize.
        model = run.model_to_plan() if device.type == "meta" else run.deferred_model()
        net = parallelize(model, plan, device, named_ranges=profile is not None)
        assert isinstance(net, ParallelModule)
        return cls(run, plan, net, run.optimizer(net), profile)

    def train(
        self,
        checkpoints: Checkpoints | None,
        on_step: Callable[[StepRecord], None],
        on_start: Callable[[Position], None] = lambda start: None,
    ) -> StoppedError | None:
        """Restore the newest checkpoint, and train for the remaining steps.

        If `checkpoints` is not None, a signal to stop on any rank ends the run on all ranks after
        the same step, with a checkpoint.

        Args:
            checkpoints: source and destination of checkpoints; None for neither.
            on_step: called after each step with its record.
            on_start: called with the position at which the run starts or resumes.

        Returns:
            The error to raise if a signal stopped the run before its last step; otherwise None.
        """
        run, net, optimizer = self.run, self.net, self.optimizer
        settings, policy, numbers = run.config.train, run.checkpoint_policy, run.numbers
        start = policy.begin(net, optimizer, checkpoints, numbers)
        last_step = run.last_step(start)
        if self.profile is not None:
            check_profiled_steps(self.profile.steps, last_step - start.step)
        on_start(start)

        def step_done(record: StepRecord) -> None:
            # Collective: all ranks count the same steps, so all end the profile after the same one.
            if step_profile is not None and step_profile.step_done():
                self._report_measurements(step_profile)
            on_step(self._add_throughput(record))

        # Without checkpoints nothing could be saved, so that signals have their usual effect.
        end, stop = start, None if checkpoints is None else StopSignals()

        def after_step(position: Position) -> bool:
            nonlocal end
            end, stops = position, stop is not None and stop.requested()
            # After a signal to stop, a checkpoint is saved at once, whatever the interval.
            saves = checkpoints is not None and (stops or policy.saves_at(position.step, last_step))
            # Reads all parameters, so only where NaN would outlive the run: in a checkpoint or in
            # the final weights.
            if saves or position.step == last_step:
                check_finite_state(net, optimizer, f"after step {position.step}")
            if saves and checkpoints is not None:
                checkpoints.save(net, optimizer, position, self.plan, numbers)
            return stops

        devices = net.execution.devices
        # A single device has no communication to wait for.
        waits = devices.waits.enable(devices.device) if devices.is_distributed else nullcontext()
        with stop or nullcontext(), self._make_profile_context() as step_profile, waits:
            train(
                net,
                optimizer,
                run.batches,
                epochs=settings.epochs,
                max_steps=settings.steps,
                device=devices.device,
                on_step=step_done,
                start=start,
                after_step=after_step,
                rate=run.rate(last_step),
                clip_norm=run.config.optimizer.clip_norm,
                non_finite=settings.non_finite,
                evaluation=run.evaluation,
            )
        # A signal during the last step has stopped nothing.
        if stop is None or stop.stopped_by is None or end.step == last_step:
            return None
        rank, number = stop.stopped_by
        return StoppedError(
            number,
            f"rank {rank} received the signal, and all ranks saved a checkpoint after step"
            f" {end.step}\n"
            "use --resume to continue from this checkpoint",
        )

    def _add_throughput(self, record: StepRecord) -> StepRecord:
        """Return the record with tokens per second, MFU and the accelerator's peak memory."""
        plan, speed, device = (
            self.plan,
            record.samples_per_second,
            self.net.execution.devices.device,
        )
        mfu = None
        if plan.step is not None and plan.step.utilization is not None:
            # The FLOPs of a step are the same as predicted, so MFU scales with the inverse of the
            # step time: predicted MFU · predicted seconds / measured seconds.
            mfu = plan.step.utilization * plan.step.seconds * speed / self.run.batches.batch_size
        return replace(
            record,
            tokens_per_second=None if plan.sequence is None else speed * plan.sequence,
            utilization=mfu,
            peak_memory=peak_bytes(device),
        )

    def _make_profile_context(self) -> AbstractContextManager[StepProfile | None]:
        if self.profile is None:
            return nullcontext()
        devices = self.net.execution.devices
        folder = self.profile.folder(_get_rank())
        return StepProfile(self.profile.steps, folder, devices.device)

    def _report_measurements(self, step_profile: StepProfile) -> None:
        """Gather the measurements of all ranks, and pass them to `on_measured` on rank 0."""
        assert self.profile is not None
        partitioned, devices = self.net.execution.partitioned, self.net.execution.devices
        own_rank = step_profile.summarize(_get_rank(), devices.stage, self.net, self.optimizer)
        ranks = gather_measured(own_rank)
        # Empty on all ranks but 0.
        if ranks:
            name, stages = self.run.cluster, range(partitioned.pipeline.stages)
            cluster = None if name is None else load_cluster(name)
            self.profile.on_measured(
                self.plan,
                Measured(
                    fingerprint=self.plan.fingerprint,
                    device=devices.device.type,
                    steps=step_profile.steps,
                    ranks=ranks,
                    predicted=tuple(
                        collective_totals(partitioned, stage, cluster) for stage in stages
                    ),
                ),
            )


def _get_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
