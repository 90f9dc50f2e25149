"""The position of a training run in its data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Position:
    """The position at which training continues.

    Args:
        step: number of completed steps, over all epochs.
        epoch, batch: the next batch, both counted from 0.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0

    def next(self, batches: int) -> Position:
        """The position after one more step, in epochs of `batches` batches."""
        if self.batch + 1 < batches:
            return Position(self.step + 1, self.epoch, self.batch + 1)
        return Position(self.step + 1, self.epoch + 1, 0)


BEGINNING = Position()
