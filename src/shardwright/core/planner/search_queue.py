"""The priority queue of the best-first search under a memory limit, and the results so far."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappush
from itertools import count

from shardwright.core.cost.memory import Memory
from shardwright.core.cost.memory_bounds import memory_lower_bounds
from shardwright.core.plan.ranked import PlanKind
from shardwright.core.planner.attempts import Attempt
from shardwright.core.planner.candidate import Candidate, FindCandidates
from shardwright.core.planner.options import PlanOptions
from shardwright.core.planner.queued_candidate import (
    QueuedCandidate,
    RecomputeCache,
    memory_and_time_key,
)
from shardwright.core.planner.ranking import requested_kind
from shardwright.core.planner.slow_search import ReportTimes
from shardwright.core.planner.stage_options import QueuedOptions
from shardwright.core.search.recompute.search import MeasuredDecisions
from shardwright.errors import ShardwrightError

QueueEntry = tuple[float, float, int, QueuedCandidate | QueuedOptions]
"""(Lower bound in seconds, lower bound in seconds of the entry alone, entry number, entry)."""


@dataclass
class SearchQueue:
    """The priority queue of attempts and candidates, and the results of the search so far.

    Args:
        limit: memory limit in bytes per device; None for no limit.
        find_candidates: function that searches with given options and returns candidates.
        raises_first_error: whether to raise the error of the first attempt, whose options the user
            requested, rather than record the error in `errors`.
        smallest_measured: (memory, attempt) of the plan with the least measured memory, of all
            plans that do not fit.
        dropped: candidates with a lower bound or an estimate of memory above the limit, for any
            recomputation or for recomputation of blocks at one depth.
        postponed: options that are searched only if nothing else fits.
        postponed_memory: lower bound on the bytes per device of postponed options, by kind of plan.
        recompute_cache: recomputation levels that candidates share.
        errors: options with which the model cannot be planned, each with the error.
        smallest_peaks: smallest measured peak above the limit, in bytes per device, by plan kind.
        entry_keys: keys of the candidates that were queued or dropped.
        queue: heap of entries, the smallest lower bound first.
        entry_numbers: numbers that break ties, as entries cannot be compared.
        num_attempts: number of attempts of the search.
        num_searched: number of attempts that were searched.
        report_times: when to report the best candidate so far.
    """

    limit: int | None
    find_candidates: FindCandidates
    raises_first_error: bool
    smallest_measured: tuple[Memory, Attempt] | None = None
    dropped: list[QueuedCandidate] = field(default_factory=list)
    postponed: list[QueuedOptions] = field(default_factory=list)
    postponed_memory: dict[PlanKind, int] = field(default_factory=dict)
    recompute_cache: RecomputeCache = field(default_factory=RecomputeCache)
    errors: list[tuple[PlanOptions, ShardwrightError]] = field(default_factory=list)
    smallest_peaks: dict[PlanKind, int] = field(default_factory=dict)
    entry_keys: set[object] = field(default_factory=set)
    queue: list[QueueEntry] = field(default_factory=list)
    entry_numbers: Iterator[int] = field(default_factory=count)
    num_attempts: int = 1
    num_searched: int = 0
    report_times: ReportTimes = field(default_factory=ReportTimes)

    def add(
        self, bound: float, entry: QueuedCandidate | QueuedOptions, seconds: float = 0.0
    ) -> None:
        """Queue `entry` with `max(bound, seconds)` as the lower bound on its step time.

        Args:
            bound: lower bound in seconds on the step time of all entries derived from the same
                attempt, `entry` included.
            seconds: lower bound in seconds on the step time of `entry` alone; breaks ties, smallest
                first.
        """
        heappush(self.queue, (max(bound, seconds), seconds, next(self.entry_numbers), entry))

    def _may_fit_in_memory(self, queued: QueuedCandidate) -> bool:
        return self.limit is None or max(queued.min_memory) <= self.limit

    def _make_queue_entry(self, candidate: Candidate, attempt: Attempt) -> QueuedCandidate | None:
        """Return a queue entry for `candidate`, or None if an equal candidate was queued before."""
        # A larger `mem_coeff` often gives the same cuts.
        key = memory_and_time_key(candidate, attempt)
        if key in self.entry_keys:
            return None
        self.entry_keys.add(key)
        min_memory = memory_lower_bounds(candidate.partitioned, attempt.options.optimizer)
        return QueuedCandidate(attempt, candidate, min_memory)

    def _record_smallest_peak(self, measured: MeasuredDecisions, attempt: Attempt) -> None:
        """Update the smallest measured peak memory over all attempts, and over attempts of the same
        `PlanKind`."""
        plan_kind = requested_kind(attempt.options)
        peak_bytes = self.smallest_peaks.get(plan_kind, measured.memory.peak)
        self.smallest_peaks[plan_kind] = min(peak_bytes, measured.memory.peak)
        if self.smallest_measured is None or measured.memory.peak < self.smallest_measured[0].peak:
            self.smallest_measured = measured.memory, attempt
