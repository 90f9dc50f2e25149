"""Detect ranks that train differently between two calls of a model.

An optimizer with other options on each rank, or a step that only some ranks make, would let the
replicas of a parameter drift apart. `batch_guard` compares
the records of the ranks (`core/runtime/training_record.py`) in the all-reduce of the next call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.core.runtime.training_record import TrainingRecord, unpack
from shardwright.errors import DataError

OPTION_TOLERANCE = 1e-6
"""Maximum relative difference between options, which ranks compute in float64."""


@dataclass(frozen=True)
class TrainingDifference:
    """A difference between two ranks: what differs, their values, and the remedy."""

    what: str
    value: str
    first_value: str
    remedy: str


def check_equal_training(call: int, rows: Sequence[Sequence[int]]) -> None:
    """Check that losses, clipping and optimizer steps since the previous call are equal on all
    ranks.

    Args:
        call: the number of the call, from 1, for errors.
        rows: the packed training record of each rank.

    Raises:
        DataError: if ranks have clipped gradients, set the options of optimizers, or stepped
            differently.
    """
    first, *others = map(unpack, rows)
    for rank, record in enumerate(others, 1):
        difference = _difference(record, first)
        if difference is not None:
            raise DataError(
                f"before call {call}, {difference.what}: {difference.value} on rank {rank}, but"
                f" {difference.first_value} on rank 0\n{difference.remedy}"
            )


def _difference(record: TrainingRecord, first: TrainingRecord) -> TrainingDifference | None:
    """Return the first difference between two records, with the remedy; None if they are equal."""
    if record.steps != first.steps:
        return TrainingDifference(
            "ranks made different numbers of optimizer steps",
            str(record.steps),
            str(first.steps),
            "make the same steps on all ranks: what decides about a step, such as a check of the"
            " gradients, must be equal on all of them",
        )
    if _differ(record.learning_rate, first.learning_rate):
        return TrainingDifference(
            "learning rates differed",
            f"{record.learning_rate / record.steps:g}",
            f"{first.learning_rate / first.steps:g}",
            "set the same learning rate on all ranks: a schedule must depend neither on the rank"
            " nor on its local data",
        )
    if _differ(record.options, first.options):
        return TrainingDifference(
            "options of optimizers differed",
            f"checksum {record.options:g}",
            f"{first.options:g}",
            "set the same options, such as weight decay and momentum, on all ranks",
        )
    if _differ(record.max_norm, first.max_norm):
        return TrainingDifference(
            "gradients were clipped to different norms",
            f"{record.max_norm:g}",
            f"{first.max_norm:g}",
            "clip to the same norm on all ranks",
        )
    return None


def _differ(value: float, first_value: float) -> bool:
    return not math.isclose(value, first_value, rel_tol=OPTION_TOLERANCE)
