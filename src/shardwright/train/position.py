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
