"""Options with fixed numbers of stages and micro-batches, in the queue of the search under a memory
limit."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.core.planner.attempts import AttemptGroups
from shardwright.core.planner.options import PlanOptions


@dataclass
class StageOptions:
    """Options with fixed numbers of stages and micro-batches and a fixed schedule.

    Args:
        min_seconds: lower bound on the step time in seconds, for any memory limit.
        relaxed: options whose step time without a memory limit is a tighter lower bound; None if
            they have been searched, or if their search does not pay.
        may_fit: whether a lower bound on the memory of a candidate was within the limit.
    """

    options: PlanOptions
    min_seconds: float = 0.0
    relaxed: PlanOptions | None = None
    may_fit: bool = False


@dataclass(frozen=True)
class QueuedOptions:
    """Attempts with equal `stage_options`, of which the first group is searched next."""

    stage_options: StageOptions
    groups: AttemptGroups
