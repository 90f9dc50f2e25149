"""A rehearsal of the run that a configuration describes."""

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
    """Trains for three steps as each of some ranks of the plan's devices, without the others.

    The run starts anew, from its own data; its checkpoints are neither read nor written. Where it
    names no text, tokens of the right shape stand in for the built-in story, which is short.

    Args:
        ranks: by default the first and the last of each stage.
        device: the CPU, or by default the meta device.

    Raises:
        PlanError: there is no such rank, the plan is for another model, or a process group is
            running.
        ShardwrightError: what `train` would raise.
    """
    settings = run.config.train
    train = settings.model_copy(
        update={
            "steps": STEPS,
            "epochs": max(STEPS, settings.epochs),
            "checkpoint": CheckpointSection(every=STEPS),
            "resume": False,
            "evaluation": None,
            "load": None,
        }
    )
    short = _ShortRun(run.config.model_copy(update={"train": train}), run.folder, run.foreign)
    where = device or torch.device("meta")

    def prepare(device: torch.device) -> _ShortTraining:
        return _ShortTraining(RankTraining.of(short, plan, device))

    chosen = dict.fromkeys(ranks or first_and_last_ranks(plan))
    return Rehearsal(
        plan.devices, tuple(rehearse_rank(rank, plan, where, prepare) for rank in chosen)
    )


@dataclass(frozen=True)
class _ShortTraining:
    """A `Trainee`."""

    training: RankTraining

    @property
    def net(self) -> ParallelModule:
        return self.training.net

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.training.optimizer

    def train(self, checkpoints: Checkpoints | None, on_step: Callable[[], None]) -> None:
        self.training.train(checkpoints, lambda record: on_step())


class _ShortRun(Run):
    """A run of a few steps, for which any text will do."""

    @cached_property
    def batches(self) -> Batches:
        data = self.config.data
        if data.seq_length is None or data.path is not None:
            return super().batches
        tokens = torch.zeros((), dtype=torch.long).expand(STEPS * data.batch_size, data.seq_length)
        return Batches((tokens, tokens), data.batch_size)
