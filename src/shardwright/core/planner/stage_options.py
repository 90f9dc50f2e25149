"""Plan options with fixed numbers of stages and micro-batches, and bounds on their step time.

The search under a memory limit queues them by these bounds (`search_queue`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from shardwright.core.planner.attempts import AttemptGroups
from shardwright.core.planner.candidate import Candidate
from shardwright.core.planner.candidate_bound import CandidateBound, min_simulated
from shardwright.core.planner.captured_model import SharedCuts
from shardwright.core.planner.options import PlanOptions

StageRecompute = Callable[[Candidate, Sequence[int] | None, bool], Sequence[float]]
"""Function as described for `StageOptions.stage_recompute`."""


@dataclass
class StageOptions:
    """Options with fixed numbers of stages and micro-batches and a fixed schedule.

    Args:
        min_seconds: lower bound on the step time in seconds, for any memory limit.
        relaxed_options: options whose step time without a memory limit is a tighter lower bound;
            None if this bound is known, or if their search takes longer than it saves.
        was_relaxed: whether `relaxed_options` have been searched.
        may_fit: whether a lower bound on the memory of a candidate was within the limit.
        is_too_large: whether memory exceeded the limit even at the highest ZeRO level.
        balanced_bound: function that returns a lower bound in seconds on the step time with
            balanced stages, communication and the recomputation that the memory limit requires.
        stage_recompute: function from a candidate, the bytes per device of each of its stages
            without activations (None for the minimum), and whether to count the overhead of its
            sharding, to the estimated least seconds per micro-batch that each stage recomputes.
            None if nothing must be recomputed.
        was_balanced: whether `balanced_bound` has been called.
    """

    options: PlanOptions
    min_seconds: float = 0.0
    relaxed_options: PlanOptions | None = None
    was_relaxed: bool = False
    may_fit: bool = False
    is_too_large: bool = False
    balanced_bound: Callable[[], float] = lambda: 0.0
    stage_recompute: StageRecompute | None = None
    was_balanced: bool = False

    def balance_stages(self) -> None:
        """Increase `min_seconds` to `balanced_bound`."""
        self.was_balanced = True
        self.min_seconds = max(self.min_seconds, self.balanced_bound())


@dataclass(frozen=True)
class QueuedOptions:
    """Queue entry for attempts with equal `stage_options`.

    Args:
        groups: attempts grouped by `mem_coeff`, the next group to search first.
        continues_group: whether the search of the first group has begun, so that the group contains
            only the attempts that were not searched.
        previous_lowest: fastest step time in seconds with the next smaller `mem_coeff`, of plans
            that fit and others; infinite if it is unknown.
        earlier_cuts: cuts that groups with a smaller `mem_coeff` have tried at ZeRO levels.
    """

    # Shared by all entries of these options in the queue, so that a bound is tightened for all.
    stage_options: StageOptions
    groups: AttemptGroups
    continues_group: bool = False
    previous_lowest: float = inf
    earlier_cuts: tuple[SharedCuts, ...] = ()

    def without_earlier_cuts(self, candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """Return the candidates whose cuts no earlier group has tried.

        Several values of `mem_coeff` often give equal cuts, and all give the baselines.
        """
        return [
            each for each in candidates if not any(each.cuts is cuts for cuts in self.earlier_cuts)
        ]


@dataclass
class LowestSeconds:
    """Lower bounds in seconds on the step times of a group of attempts with equal `mem_coeff`.

    Args:
        of_group: lower bound over all candidates that no earlier group has tried.
        searched: lower bound over all cuts that the search with this `mem_coeff` found, except
            baselines. Baselines are equally fast with any `mem_coeff`, so no bound for the next
            `mem_coeff` follows from them.
    """

    of_group: float = inf
    searched: float = inf

    def lower(self, bounds: Sequence[CandidateBound]) -> None:
        """Lower both bounds to the smallest simulated bounds of further candidates."""
        searched = [bound for bound in bounds if not bound.candidate.is_baseline]
        self.of_group = min(self.of_group, min_simulated(bounds))
        self.searched = min(self.searched, min_simulated(searched))
