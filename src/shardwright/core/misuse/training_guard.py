"""Detect ranks that train differently between two calls of a model.

If the options of an optimizer differ between ranks, or only some ranks make a step or clear their
gradients, the replicas of a parameter drift apart. `batch_guard` compares the records of the ranks
(`core/runtime/training_record.py`) in the all-reduce of the next call.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from shardwright.core.runtime.training_record import TrainingRecord, unpack
from shardwright.errors import DataError

log = logging.getLogger("shardwright")

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
    "stage_steps": (
        "ranks made different numbers of optimizer steps over their pipeline stages",
        "make the same steps on all ranks: what decides about a step must be equal on all of them;"
        " take norms by `torch.nn.utils.get_total_norm`, which includes all stages",
    ),
    "stage_learning_rate": (
        "learning rates of pipeline stages that were equal at first differed",
        "set the same learning rate on all ranks: take norms by"
        " `torch.nn.utils.get_total_norm`, which includes all stages",
    ),
    "stage_options": (
        "checksums of the options of optimizers that were equal on all stages at first differed",
        "set the same options on all ranks: take norms by `torch.nn.utils.get_total_norm`,"
        " which includes all stages",
    ),
    "replicas": (
        "checksums of parameters of which all ranks have a replica differed",
        "change parameters and gradients on all ranks in the same way: clip, scale, mask, drop and"
        " write them with the same values",
    ),
    "has_gradients": (
        "only some ranks kept the gradients of an earlier step (1 for kept)",
        "call `zero_grad` on all ranks, at the same place of the training loop",
    ),
}
"""First and second line of the error, by field of `TrainingRecord`, in the order of comparison."""

_ONLY_IF_EQUAL = {
    "stage_steps": "stage_optimizers",
    "stage_learning_rate": "stage_rate_keys",
    "stage_options": "stage_option_keys",
}
"""Fields that are compared only between ranks with an equal other field, by name: stages may have
other optimizers and other parameter groups."""


REPLICA_TOLERANCE = 1e-5
"""Maximum relative difference between the checksums of replicas of two ranks."""

FACTOR_TOLERANCE = 0.02
"""Maximum relative difference between the factors of two ranks, which differences of rounded
parameters give."""

_FACTORS = {
    "gradient_factor": "gradients were multiplied by",
    "update_factor": "parameters were changed without an optimizer, by the gradient times",
}

_warned_factors = set[str]()


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
            if name in _ONLY_IF_EQUAL and not _have_equal_field(
                record, first, _ONLY_IF_EQUAL[name]
            ):
                continue
            tolerance = REPLICA_TOLERANCE if name == "replicas" else OPTION_TOLERANCE
            if not math.isclose(value, first_value, rel_tol=tolerance):
                raise DataError(
                    f"training differs between ranks: before call {call}, {problem}: {value:g}"
                    f" on rank {rank}, but {first_value:g} on rank 0\n{remedy}"
                )
        _warn_of_different_factors(call, rank, record, first)


def _warn_of_different_factors(
    call: int, rank: int, record: TrainingRecord, first: TrainingRecord
) -> None:
    """Warn once if pipeline stages scale gradients or updates differently.

    No error, as the factor of a layer is as it should be.
    """
    for name, change in _FACTORS.items():
        value, first_value = getattr(record, name), getattr(first, name)
        if not value or not first_value or name in _warned_factors:
            continue
        if not math.isclose(value, first_value, rel_tol=FACTOR_TOLERANCE):
            _warned_factors.add(name)
            log.warning(
                "before call %d, %s %.3g in the pipeline stage of rank %d, but by %.3g in that of"
                " rank 0\ntake norms by `torch.nn.utils.get_total_norm` or clip by"
                " `net.clip_grad_norm_`: these include all stages, but a loop over the parameters"
                " sees only those of its own stage; nothing to do if the stages should differ",
                *(call, change, value, rank, first_value),
            )


def _have_equal_field(record: TrainingRecord, first: TrainingRecord, name: str) -> bool:
    return bool(getattr(record, name) == getattr(first, name))


def _get_field_for_comparison(record: TrainingRecord, name: str) -> float:
    """Return a field of a record as it is compared: the learning rate as its mean over steps."""
    value: float = getattr(record, name)
    # The number of steps is equal here, as it is compared first.
    return value / max(1, record.steps) if name == "learning_rate" else value
