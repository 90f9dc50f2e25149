"""Where a training run stands."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Position:
    """The place in the data at which training goes on.

    Args:
        step: steps that are done, over all epochs.
        epoch, batch: the batch that comes next.
    """

    step: int = 0
    epoch: int = 0
    batch: int = 0

    def next(self, batches: int) -> Position:
        """The place one step further, in epochs of so many batches."""
        if self.batch + 1 < batches:
            return Position(self.step + 1, self.epoch, self.batch + 1)
        return Position(self.step + 1, self.epoch + 1, 0)


BEGINNING = Position()
