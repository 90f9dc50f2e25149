"""Detect ranks that train differently between two calls of a model.

If the options of an optimizer differ between ranks, or only some ranks make a step or clear their
gradients, the replicas of a parameter drift apart. `batch_guard` compares the records of the ranks
(`core/runtime/training_record.py`) in the all-reduce of the next call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardwright.core.runtime.training_record import TrainingRecord, unpack
from shardwright.errors import DataError

OPTION_TOLERANCE = 1e-6
"""Maximum relative difference between the optimizer options of two ranks, which allows rounding."""

_PROBLEMS_AND_REMEDIES = {
    "steps": (
        "ranks made different numbers of optimizer steps",
        "make the same steps on all ranks: what decides about a step, such as a check of the"
        " gradients, must be equal on all of them",
    ),
    "learning_rate": (
        "learning rates differed",
        "set the same learning rate on all ranks: a schedule must depend neither on the rank nor"
        " on its local data",
    ),
    "options": (
        "checksums of the options of optimizers differed",
        "set the same options, such as weight decay and momentum, on all ranks",
    ),
    "max_norm": (
        "gradients were clipped to different norms",
        "clip to the same norm on all ranks",
    ),
    "has_gradients": (
        "only some ranks kept the gradients of an earlier step (1 for kept)",
        "call `zero_grad` on all ranks, at the same place of the training loop",
    ),
}
"""First and second line of the error, by field of `TrainingRecord`, in the order of comparison."""


def check_equal_training(call: int, rows: Sequence[Sequence[int]]) -> None:
    """Check that clipping and optimizer steps since the previous call are equal on all ranks.

    Args:
        call: the number of the call, from 1, for errors.
        rows: the packed training record of each rank.

    Raises:
        DataError: if ranks have clipped gradients, set the options of optimizers, or stepped
            differently.
    """
    first, *others = map(unpack, rows)
    # Compared in the order of the table: a different number of steps changes all that follow.
    for rank, record in enumerate(others, 1):
        for name, (problem, remedy) in _PROBLEMS_AND_REMEDIES.items():
            value, first_value = (
                _get_field_for_comparison(record, name),
                _get_field_for_comparison(first, name),
            )
            if not math.isclose(value, first_value, rel_tol=OPTION_TOLERANCE):
                raise DataError(
                    f"training differs between ranks: before call {call}, {problem}: {value:g}"
                    f" on rank {rank}, but {first_value:g} on rank 0\n{remedy}"
                )


def _get_field_for_comparison(record: TrainingRecord, name: str) -> float:
    """Return a field of a record as it is compared: the learning rate as its mean over steps."""
    value: float = getattr(record, name)
    # The number of steps is equal here, as it is compared first.
    return value / max(1, record.steps) if name == "learning_rate" else value
