"""Rehearse a configured run: run a few training steps of single ranks in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from shardwright.core.api.rehearsal import STEPS, Rehearsal, first_and_last_ranks, rehearse_rank
from shardwright.core.checkpoint.checkpoint import Checkpoints
from shardwright.core.parallel.module import ParallelModule
from shardwright.core.plan import Plan
from shardwright.run.config.run import Run
from shardwright.run.config.schema import CheckpointSection
from shardwright.run.config.training import RankTraining
from shardwright.run.data.data import Batches


def rehearse_run(
    run: Run, plan: Plan, ranks: Sequence[int] = (), device: torch.device | None = None
) -> Rehearsal:
    """Run three training steps as each of `ranks`, without the other ranks of the plan.

    Training starts from scratch on the run's own data; the run's checkpoints are neither read nor
    written. Language models without a text file get zero tokens of the right shape, because the
    built-in text may be shorter than three batches.

    Args:
        ranks: by default the first and the last rank of each stage.
        device: the CPU or, by default, the meta device.

    Raises:
        PlanError: if a rank does not exist, the plan is for another model, or a process group is
            running.
        ShardwrightError: if `train` would raise an error.
    """
    settings = run.config.train
    train = settings.model_copy(
        update={
            "steps": STEPS,
            # An epoch may have fewer batches than there are steps.
            "epochs": max(STEPS, settings.epochs),
            # After the last step, so that saving is rehearsed too.
            "checkpoint": CheckpointSection(every=STEPS),
            "resume": False,
            "evaluation": None,
            "load": None,
        }
    )
    short_run = _RehearsedRun(
        run.config.model_copy(update={"train": train}), run.folder, run.foreign
    )
    rehearsal_device = device or torch.device("meta")

    def build_training(device: torch.device) -> _RehearsedTraining:
        return _RehearsedTraining(RankTraining.of(short_run, plan, device))

    # Without duplicates: in a stage of one rank, the first is also the last.
    rehearsed_ranks = dict.fromkeys(ranks or first_and_last_ranks(plan))
    return Rehearsal(
        plan.devices,
        tuple(
            rehearse_rank(rank, plan, rehearsal_device, build_training) for rank in rehearsed_ranks
        ),
    )


@dataclass(frozen=True)
class _RehearsedTraining:
    """Adapter from `RankTraining` to the rehearsal's protocol `Trainee`."""

    training: RankTraining

    @property
    def net(self) -> ParallelModule:
        return self.training.net

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.training.optimizer

    def train(self, checkpoints: Checkpoints | None, on_step: Callable[[], None]) -> None:
        self.training.train(checkpoints, lambda record: on_step())


class _RehearsedRun(Run):
    """A run of a few steps; language models without a data file train on zero tokens."""

    @cached_property
    def batches(self) -> Batches:
        data = self.config.data
        if data.seq_length is None or data.path is not None:
            return super().batches
        # Expanded from one element, so that it takes no memory.
        tokens = torch.zeros((), dtype=torch.long).expand(STEPS * data.batch_size, data.seq_length)
        return Batches((tokens, tokens), data.batch_size)
