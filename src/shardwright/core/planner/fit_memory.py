"""Best-first search for the fastest candidate that fits into the memory limit.

A priority queue holds attempts (options to plan with) and candidates (decisions with a predicted
step time), by a lower bound of their step time in seconds. Each time an entry is taken from the
front, more is found out about it, at a higher cost each time, and it is queued again with a tighter
bound: an attempt is searched for candidates; a candidate gets an estimate of its memory, then a dry
run, then the least recomputation with which it fits. The first candidate that is known to fit when
it is taken is the answer, as no entry behind it can be faster. docs/architecture.md, "Candidates",
has the table of these steps.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count, zip_longest

from shardwright.core.cost.memory import Memory, binary, least_memory
from shardwright.core.plan.ranked import LeftOut, PlanKind
from shardwright.core.planner.attempts import Attempt, AttemptGroups, attempt_phases, too_large
from shardwright.core.planner.candidate import Candidate, Decide
from shardwright.core.planner.options import PlanOptions
from shardwright.core.planner.queued_candidate import (
    QueuedCandidate,
    RecomputeCache,
    memory_and_time_key,
)
from shardwright.core.planner.ranking import Ranking, requested_kind
from shardwright.core.search.recompute.search import MeasuredDecisions, RecomputeSearch
from shardwright.errors import (
    PlanError,
    PlanInterrupted,
    ShardwrightError,
    StrategyError,
    one_line,
)
from shardwright.progress import OnProgress, nested_progress

log = logging.getLogger("shardwright.search")

NEXT_COEFF_RATIO = 0.97
"""Lower bound of the step time with the next larger `mem_coeff`, as a fraction of the step time
with the one before. It is below 1 as the search's objective is simpler than the prediction, so that
a larger `mem_coeff` can be slightly faster. A heuristic, not a proof."""

EXPECTED_RATIO = 0.99
"""Lower bound of the step time of a candidate that fits, as a fraction of its step time with the
recomputation that estimates ask for. A heuristic, not a proof."""


@dataclass(frozen=True)
class StageOptions:
    """Options with a fixed number of stages and a fixed schedule.

    Args:
        min_seconds: lower bound of the step time.
    """

    options: PlanOptions
    min_seconds: float = 0.0


def within_memory(
    options: PlanOptions, decide: Decide, ranking: Ranking | None = None
) -> Candidate:
    """Return the candidate that `options` request if it fits into their memory limit, else one
    that fits after further changes.

    Without a cluster the first that fits after these changes, each on top of those before: sharded
    optimizer state, gradients and parameters (`level1` to `level3`), recomputation, a larger
    `mem_coeff`, more stages. With `recompute="auto"`, recomputation comes first. On a cluster the
    number of stages is fixed, and the result is the fastest that fits of all sharding levels and
    values of `mem_coeff`, each with the recomputation that it needs; so a lower limit never gives a
    faster plan. `mem_coeff="auto"` takes the smallest value with which the plan fits without other
    changes; if there is none, changes begin from the smallest value.

    Args:
        ranking: receives the fastest candidate of each kind; see `fastest_within_memory`.

    Raises:
        MemoryLimitError: no plan fits; names the smallest limit that one would fit.
    """
    candidate = fastest_within_memory([StageOptions(options)], decide, ranking=ranking)
    assert candidate is not None
    return candidate


def fastest_within_memory(
    stage_options: Sequence[StageOptions],
    decide: Decide,
    below: float = float("inf"),
    ranking: Ranking | None = None,
) -> Candidate | None:
    """Return the fastest candidate that fits, over several numbers of stages and schedules; None
    if the search reaches a step time of `below` seconds first.

    Args:
        ranking: receives the fastest candidate of each kind until it has enough kinds, and why
            other kinds have none.

    Raises:
        MemoryLimitError: no plan fits at any step time; names the smallest limit that one would
            fit.
        PlanInterrupted: on Ctrl-C, if a candidate is known to fit by then.
    """
    search = _Search(stage_options[0].options.limit, decide, len(stage_options) == 1)
    try:
        return _fastest(search, stage_options, below, ranking)
    except KeyboardInterrupt:
        fitting = search.known_to_fit()
        if not fitting:
            raise
        best = min(fitting, key=lambda candidate: candidate.seconds)
        raise PlanInterrupted(best.plan) from None


def _fastest(
    search: _Search, stage_options: Sequence[StageOptions], below: float, ranking: Ranking | None
) -> Candidate | None:
    on_progress = search.counting_entries(stage_options[0].options.on_progress)
    phases_by_stages = [
        attempt_phases(replace(each.options, on_progress=on_progress)) for each in stage_options
    ]
    # Phase by phase, so that all numbers of stages compete in each.
    for phase in zip_longest(*phases_by_stages, fillvalue=()):
        for each, groups in zip(stage_options, phase, strict=True):
            if groups:
                search.add(each.min_seconds, groups)
        fitted = search.run(below)
        if fitted is not None and ranking is not None:
            search.rank(fitted, ranking)
        if fitted is not None or search.queue:
            return fitted
    # With a finite `below` the caller has a plan already, so that nothing fitting is no error.
    if below < float("inf"):
        return None
    search.measure_dropped()
    fitted = search.run(below)
    if fitted is not None or search.queue:
        return fitted
    raise search.error()


@dataclass
class _Search:
    """Priority queue of attempts and candidates, and everything learned while it is searched.

    Args:
        limit: bytes per device; None for no limit.
        decide: searches for the candidates of given options.
        raises_first_error: whether an error of the first attempt, the requested options, is raised.
        smallest_plan: memory and attempt of the plan that needs least of those found not to fit.
        dropped: candidates that by a lower bound or an estimate cannot fit, with any recomputation
            or with that of blocks at one depth.
        recompute_cache: recomputation options of candidates.
        errors: options with which the model cannot be planned.
        smallest_peaks: by kind, the smallest measured peak that does not fit, in bytes per device.
        seen: keys of the candidates that were queued or dropped.
        num_processed: entries taken from the queue.
        queue: heap of (lower bound in seconds, own estimate in seconds, entry number, entry).
        entry_numbers: break ties, as entries cannot be compared.
    """

    limit: int | None
    decide: Decide
    raises_first_error: bool
    smallest_plan: tuple[Memory, Attempt] | None = None
    dropped: list[QueuedCandidate] = field(default_factory=list)
    recompute_cache: RecomputeCache = field(default_factory=RecomputeCache)
    errors: list[tuple[PlanOptions, ShardwrightError]] = field(default_factory=list)
    smallest_peaks: dict[PlanKind, int] = field(default_factory=dict)
    seen: set[object] = field(default_factory=set)
    num_processed: int = 0
    queue: list[tuple[float, float, int, QueuedCandidate | AttemptGroups]] = field(
        default_factory=list
    )
    entry_numbers: Iterator[int] = field(default_factory=count)

    def add(
        self, bound: float, entry: QueuedCandidate | AttemptGroups, seconds: float = 0.0
    ) -> None:
        """Queue an entry whose step takes at least `bound` seconds.

        Args:
            seconds: lower bound from the entry alone. `bound` may be inherited from the entry that
                this one came from; among equal bounds the entry with fewer `seconds` comes first.
        """
        heappush(self.queue, (max(bound, seconds), seconds, next(self.entry_numbers), entry))

    def counting_entries(self, on_progress: OnProgress) -> OnProgress:
        """Wrap a progress callback so that it counts processed entries of all queued so far."""

        def report(doing: str, done: int = 0, of: int = 0) -> None:
            total = self.num_processed + 1 + len(self.queue)
            nested_progress(on_progress, "", self.num_processed, total)(doing, done, of)

        return report

    def run(self, below: float) -> Candidate | None:
        """Return the next fastest candidate that fits; None if the queue is empty or its front
        takes `below` seconds or more."""
        while self.queue and self.queue[0][0] < below:
            bound, _, _, entry = front = heappop(self.queue)
            try:
                if not isinstance(entry, QueuedCandidate):
                    self._decide_attempts(bound, entry)
                elif (fitted := self._advance(entry, bound)) is not None:
                    return fitted
            except KeyboardInterrupt:
                # `known_to_fit` reads the queue after Ctrl-C.
                heappush(self.queue, front)
                raise
            self.num_processed += 1
        return None

    def known_to_fit(self) -> list[Candidate]:
        """Queued candidates that fit, with the recomputation that they need or with all possible.

        Dry runs are made only until one is found, as the user is waiting after Ctrl-C.
        """
        entries = [entry for *_, entry in self.queue if isinstance(entry, QueuedCandidate)]
        fitting = [queued.candidate for queued in entries if queued.fits]
        for queued in entries:
            if (
                queued.recompute_search is None
                or queued.fits
                or (fitting and not queued.recompute_search.is_measured)
            ):
                continue
            least = queued.recompute_search.fully_recomputed
            if least.memory.peak <= (self.limit or 0):
                fitted = replace(queued.candidate, decisions=least.decisions, measured=least.memory)
                fitting.append(fitted)
        return fitting

    def rank(self, fitted: Candidate | None, ranking: Ranking) -> None:
        """Add the fastest candidate and those of other kinds, then why the rest are left out."""
        while fitted is not None:
            ranking.add(fitted)
            continues = ranking.wants(kind for _, kind in self._queued_kinds())
            fitted = self.run(float("inf")) if continues else None
        for bound, kind in self._queued_kinds():
            ranking.leave_out(kind, LeftOut.slower(bound))
        for kind, peak in self.smallest_peaks.items():
            ranking.leave_out(kind, LeftOut.larger(peak))
        for queued in self.dropped:
            kind = requested_kind(queued.attempt.options)
            ranking.leave_out(kind, LeftOut.larger(queued.lower_bound))
        for options, error in self.errors:
            ranking.leave_out(requested_kind(options), LeftOut.because(one_line(error)))

    def _queued_kinds(self) -> Iterator[tuple[float, PlanKind]]:
        """Lower bound in seconds and kind of everything in the queue."""
        for bound, _, _, entry in self.queue:
            attempts = (
                [entry.attempt]
                if isinstance(entry, QueuedCandidate)
                else [attempt for group in entry for attempt in group]
            )
            for attempt in attempts:
                yield bound, requested_kind(attempt.options)

    def _decide_attempts(self, bound: float, groups: AttemptGroups) -> None:
        """Queue the candidates of the first group of attempts, and the other groups behind it."""
        fastest = bound
        candidates = (queued for attempt in groups[0] for queued in self._candidates(attempt))
        for number, queued in enumerate(candidates):
            seconds = max(bound, queued.candidate.seconds)
            fastest = min(fastest, seconds) if number else seconds
            self.add(seconds, queued)
        # Groups ascend in `mem_coeff`. The next one is searched only when nothing that is known can
        # be faster: most are never reached.
        if len(groups) > 1:
            self.add(max(bound, NEXT_COEFF_RATIO * fastest), groups[1:])

    def _candidates(self, attempt: Attempt) -> Iterator[QueuedCandidate]:
        """Candidates of an attempt that are new and may fit."""
        options, is_first = attempt.options, not self.seen
        try:
            for candidate in self.decide(options):
                queued = self._queue_entry(candidate, attempt)
                if queued is not None and self._may_fit(queued):
                    queued = self._aligned(queued)
                if queued is None:
                    continue
                if self._may_fit(queued):
                    yield queued
                else:
                    self.dropped.append(queued)
        # That a division into stages is impossible can show only here, when it is made.
        except (PlanError, StrategyError) as error:
            if self.raises_first_error and is_first:
                raise
            self.errors.append((options, error))

    def _may_fit(self, queued: QueuedCandidate) -> bool:
        return self.limit is None or max(queued.min_memory) <= self.limit

    def _queue_entry(self, candidate: Candidate, attempt: Attempt) -> QueuedCandidate | None:
        """Return a new queue entry, or None if the candidate duplicates an earlier one."""
        # A larger `mem_coeff` often gives the same cuts.
        key = memory_and_time_key(candidate, attempt)
        if key in self.seen:
            return None
        self.seen.add(key)
        min_memory = least_memory(candidate.partitioned, attempt.options.optimizer)
        return QueuedCandidate(attempt, candidate, min_memory)

    def _aligned(self, queued: QueuedCandidate) -> QueuedCandidate | None:
        """Return the aligned candidate (`Candidate.aligned`), or None if it duplicates one."""
        aligned = queued.candidate.aligned
        return queued if aligned is queued.candidate else self._queue_entry(aligned, queued.attempt)

    def _advance(self, queued: QueuedCandidate, bound: float) -> Candidate | None:
        """Return the candidate if it is known to fit; else take the next step towards that and
        queue the result, unless it cannot fit."""
        if self.limit is None or queued.fits:
            return queued.candidate
        candidate, attempt = queued.candidate, queued.attempt
        if queued.recompute_search is not None:
            result = queued.recompute_search.run()
            log.info("%s: %s of %s", attempt, binary(result.memory.peak), binary(self.limit))
            if result.memory.peak > self.limit:
                # The estimate by which it should have fitted was wrong.
                self.add(bound, replace(queued, recompute_search=None, trust_estimate=False))
                return None
            fitted = replace(candidate, decisions=result.decisions, measured=result.memory)
            self.add(bound, replace(queued, candidate=fitted, fits=True), fitted.seconds)
            return None
        if queued.must_recompute:
            for search in self._recompute_searches(queued):
                expected = replace(candidate, decisions=search.expected_decisions())
                self.add(
                    bound,
                    replace(queued, recompute_search=search),
                    EXPECTED_RATIO * expected.seconds,
                )
            return None
        recompute_levels = (
            self.recompute_cache.recompute_levels(candidate) if attempt.recompute else None
        )
        may_fit = recompute_levels is None or recompute_levels.may_fit_without_recompute(
            queued.min_memory, self.limit
        )
        # A dry run takes about a second, so it is made only where the estimate allows it.
        if may_fit and (needed := self._measure(queued)).peak <= self.limit:
            return replace(candidate, measured=needed)
        if recompute_levels is not None:
            decisions = recompute_levels.expected_decisions(
                candidate.decisions, queued.min_memory, self.limit
            )
            expected = replace(candidate, decisions=decisions)
            self.add(bound, replace(queued, must_recompute=True), EXPECTED_RATIO * expected.seconds)
        return None

    def _measure(self, queued: QueuedCandidate) -> Memory:
        """Memory of a candidate as it is, by a dry run."""
        needed = queued.candidate.memory()
        log.info("%s: %s of %s", queued.attempt, binary(needed.peak), binary(self.limit or 0))
        self._record_peak(MeasuredDecisions(queued.candidate.decisions, needed), queued.attempt)
        return needed

    def _recompute_searches(self, queued: QueuedCandidate) -> list[RecomputeSearch]:
        """Search for the least recomputation, one per depth in the module tree whose blocks can
        free enough. Depths come in groups, those of the lowest estimated peak first, then larger
        blocks; groups after the first in which a depth can fit are not considered."""
        # Recomputation does not change the peak outside of forward and backward passes: once
        # measured at one depth, it is a lower bound at all others.
        recompute_levels = self.recompute_cache.recompute_levels(queued.candidate)
        peak_outside_passes = 0
        for depths in recompute_levels.depths:
            searches: list[RecomputeSearch] = []
            for depth in depths:
                least = [
                    max(size, peak_outside_passes)
                    for size in recompute_levels.min_memory(depth, queued.min_memory)
                ]
                if max(least) > (self.limit or 0):
                    self._drop(queued, depth, max(least))
                    continue
                search = self.recompute_cache.search(queued, depth, self.limit or 0)
                if search.can_fit:
                    searches.append(search)
                    continue
                peak_outside_passes = max(peak_outside_passes, search.peak_outside_passes)
                if search.is_measured:
                    self._record_peak(search.fully_recomputed, queued.attempt)
                else:
                    self._drop(queued, depth, search.largest_stage.peak)
            if searches:
                return searches
        return []

    def _drop(self, queued: QueuedCandidate, depth: int, size: int) -> None:
        dropped = replace(queued, block_depth=depth, min_recomputed_memory=size)
        self.dropped.append(dropped)

    def _record_peak(self, measured: MeasuredDecisions, attempt: Attempt) -> None:
        """Keep the smallest measured peak, overall and of the kind, for errors and rankings."""
        kind = requested_kind(attempt.options)
        peak = self.smallest_peaks.get(kind, measured.memory.peak)
        self.smallest_peaks[kind] = min(peak, measured.memory.peak)
        if self.smallest_plan is None or measured.memory.peak < self.smallest_plan[0].peak:
            self.smallest_plan = measured.memory, attempt

    def measure_dropped(self) -> None:
        """Measure dropped candidates as long as one may need less than the smallest so far. One
        that fits, although an estimate said otherwise, is queued again."""
        while self.dropped:
            queued = min(self.dropped, key=lambda queued: queued.lower_bound)
            self.dropped.remove(queued)
            if not self._may_be_smallest(queued.lower_bound):
                break
            if queued.block_depth is not None:
                self._measure_recomputing(queued, queued.block_depth)
            elif (aligned := self._aligned(queued)) is None:
                continue
            elif queued.attempt.recompute:
                self.dropped.extend(self._at_depths(aligned))
            else:
                self._measure(aligned)

    def _may_be_smallest(self, size: int) -> bool:
        return self.smallest_plan is None or size < self.smallest_plan[0].peak

    def _measure_recomputing(self, queued: QueuedCandidate, depth: int) -> None:
        """Measure a candidate with all possible recomputation at a depth. If its largest stage
        alone is above the smallest plan so far, the other stages are not measured."""
        measured = replace(queued, trust_estimate=False)
        search = self.recompute_cache.search(measured, depth, self.limit or 0)
        if search.can_fit:
            self.add(0.0, replace(queued, recompute_search=search), queued.candidate.seconds)
        elif self._may_be_smallest(search.largest_stage.peak):
            self._record_peak(search.fully_recomputed, queued.attempt)

    def _at_depths(self, queued: QueuedCandidate) -> Iterator[QueuedCandidate]:
        """The candidate with all blocks recomputed, for each depth that blocks can have."""
        recompute_levels = self.recompute_cache.recompute_levels(queued.candidate)
        for depth in (depth for depths in recompute_levels.depths for depth in depths):
            size = max(recompute_levels.min_memory(depth, queued.min_memory))
            yield replace(queued, block_depth=depth, min_recomputed_memory=size)

    def error(self) -> ShardwrightError:
        """`MemoryLimitError` with the smallest plan, or the first error if none could be made."""
        # Nothing was measured if the model cannot be planned with any options.
        if self.smallest_plan is None:
            return self.errors[0][1]
        needed, attempt = self.smallest_plan
        return too_large(attempt, self.limit or 0, needed)
