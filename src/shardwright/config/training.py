"""From a run and its plan to a trained model, as one rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta

import torch

from shardwright.api import parallelize
from shardwright.api.shared_plan import shared_plan
from shardwright.config.run import Run
from shardwright.errors import PlanError
from shardwright.parallel.module import ParallelModule
from shardwright.plan import Plan
from shardwright.train.checkpoint import Checkpoints
from shardwright.train.loop import train
from shardwright.train.non_finite import check_finite_state
from shardwright.train.position import Position
from shardwright.train.process_group import World, process_group
from shardwright.train.step_log import StepRecord


def train_rank(
    run: Run,
    plan: Plan | Callable[[], Plan],
    world: World,
    on_step: Callable[[StepRecord], None],
    on_start: Callable[[Position], None] = lambda start: None,
) -> None:
    """Train as one rank of `world`.

    Args:
        plan: or what makes it, which rank 0 calls for all.
        on_start: called with the position where the run starts or resumes.

    Raises:
        PlanError: the world is not of the plan's size, or the plan is for another model.
        CheckpointError: the newest checkpoint is of another model.
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
        RankTraining.of(run, plan, device).train(checkpoints, on_step, on_start)


@dataclass(frozen=True)
class RankTraining:
    """A run on one rank, from the moment when it has its share of the parameters."""

    run: Run
    plan: Plan
    net: ParallelModule
    optimizer: torch.optim.Optimizer

    @classmethod
    def of(cls, run: Run, plan: Plan, device: torch.device) -> RankTraining:
        """Raises: PlanError: the plan is for another model."""
        # On the meta device there are no values, so none are made.
        model = run.model_to_plan() if device.type == "meta" else run.deferred_model()
        net = parallelize(model, plan, device)
        assert isinstance(net, ParallelModule)
        return cls(run, plan, net, run.optimizer(net.parameters()))

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
        on_start(start)

        def after_step(place: Position) -> None:
            saves = policy.saves_at(place.step, last) and checkpoints is not None
            if saves or place.step == last:
                check_finite_state(net, optimizer, f"after step {place.step}")
            if saves and checkpoints is not None:
                checkpoints.save(net, optimizer, place, self.plan, numbers)

        train(
            net,
            optimizer,
            run.batches,
            epochs=settings.epochs,
            max_steps=settings.steps,
            device=net.execution.devices.device,
            on_step=on_step,
            start=start,
            after_step=after_step,
            rate=run.rate(last),
            clip_norm=run.config.optimizer.clip_norm,
            non_finite=settings.non_finite,
            evaluation=run.evaluation,
        )
