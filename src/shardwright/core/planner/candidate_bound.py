"""Lower bounds on the step time of a candidate: by a formula, and by a simulated pipeline.

To simulate a pipeline of many stages and micro-batches takes as long as to search for the
candidate, so pipelines are simulated only where the formula does not decide.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

from shardwright.core.planner.candidate import Candidate


@dataclass(frozen=True)
class CandidateBound:
    """Lower bounds in seconds on the step time of a candidate with recomputation.

    Args:
        recompute_seconds: least seconds per micro-batch that each stage recomputes.
    """

    candidate: Candidate
    recompute_seconds: Sequence[float]

    @cached_property
    def unsimulated(self) -> float:
        """The bound of a formula; without stages, `simulated`."""
        if self.candidate.pipeline.stages == 1:
            return self.simulated
        return self.candidate.seconds_with_recompute(self.recompute_seconds, False)

    @cached_property
    def simulated(self) -> float:
        """The bound that simulates the passes of all stages."""
        return self.candidate.seconds_with_recompute(self.recompute_seconds)


def min_simulated(bounds: Iterable[CandidateBound]) -> float:
    """Return the smallest simulated bound, in seconds; infinite if there is none."""
    lowest = inf
    for bound in sorted(bounds, key=lambda bound: bound.unsimulated):
        # Neither this pipeline nor a later one can be faster.
        if bound.unsimulated >= lowest:
            break
        lowest = min(lowest, bound.simulated)
    return lowest
