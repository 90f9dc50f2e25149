"""`Position` of a training run in its data, at which training resumes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Position:
    """Position of a training run in its data, at which training resumes.

    Args:
        step: number of completed steps, over all epochs.
        epoch: index of the epoch of the next batch, from 0.
        batch: index of the next batch in the epoch, from 0.
        sample: index of the next sample in the order of the epoch, from 0; None if all batches of
            the epoch have the same size, so that `batch` determines the index.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0
    sample: int | None = None


BEGINNING = Position()
