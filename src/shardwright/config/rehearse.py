"""A rehearsal of the run that a configuration describes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial

import torch

from shardwright.config.run import Run
from shardwright.config.schema import CheckpointSection
from shardwright.config.training import RankTraining
from shardwright.plan import Plan
from shardwright.train.data import Batches
from shardwright.train.rehearsal import STEPS, Rehearsal, first_and_last_ranks, rehearse_rank


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
    short = _ShortRun(run.config.model_copy(update={"train": train}), run.folder, run.language)
    where = device or torch.device("meta")
    prepare = partial(RankTraining.of, short, plan)
    chosen = dict.fromkeys(ranks or first_and_last_ranks(plan))
    return Rehearsal(
        plan.devices, tuple(rehearse_rank(rank, plan, where, prepare) for rank in chosen)
    )


class _ShortRun(Run):
    """A run of a few steps, for which any text will do."""

    @cached_property
    def batches(self) -> Batches:
        data = self.config.data
        if data.seq_length is None or data.path is not None:
            return super().batches
        tokens = torch.zeros((), dtype=torch.long).expand(STEPS * data.batch_size, data.seq_length)
        return Batches((tokens, tokens), data.batch_size)
