"""The priority queue of the best-first search under a memory limit.

The queue contains attempts (options to plan with) and candidates (decisions with a predicted step
time), by a lower bound of their step time in seconds. An entry that is taken from the front is
examined and queued again with a tighter bound; each examination costs more than the one before. An
attempt is searched for candidates. A candidate gets an estimate of its memory, then a dry run, then
the least recomputation with which it fits. The first candidate that is known to fit when it is
taken is the answer, as no entry behind it can be faster. docs/architecture.md, "Candidates", has
the table of these steps.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count

from shardwright.core.cost.memory import Memory, binary, least_memory
from shardwright.core.plan.ranked import LeftOut, PlanKind
from shardwright.core.planner.attempts import Attempt, AttemptGroups, memory_limit_error
from shardwright.core.planner.candidate import Candidate, Decide
from shardwright.core.planner.options import PlanOptions
from shardwright.core.planner.queued_candidate import (
    QueuedCandidate,
    RecomputeCache,
    memory_and_time_key,
)
from shardwright.core.planner.ranking import Ranking, requested_kind
from shardwright.core.search.recompute.search import MeasuredDecisions, RecomputeSearch
from shardwright.errors import PlanError, ShardwrightError, StrategyError, one_line
from shardwright.progress import OnProgress, nested_progress

log = logging.getLogger("shardwright.search")

NEXT_MEM_COEFF_BOUND = 0.97
"""Lower bound of the step time with the next larger `mem_coeff`, as a fraction of the fastest step
with the `mem_coeff` before it. It is below 1 as the search's objective is simpler than the
prediction, so that a larger `mem_coeff` can be slightly faster. A heuristic, not a proof."""

RECOMPUTED_BOUND = 0.99
"""Lower bound of the step time of a candidate that fits, as a fraction of its step time with the
recomputation that estimates ask for. A heuristic, not a proof."""


@dataclass
class MemorySearch:
    """The priority queue of attempts and candidates, and the results of the search so far.

    Args:
        limit: memory limit in bytes per device; None for no limit.
        decide: searches with given options and returns candidates.
        strict: whether an error of the first attempt, the requested options, is raised.
        smallest: memory and attempt of the smallest plan found that does not fit.
        dropped: candidates that cannot fit by a lower bound or an estimate, with any recomputation
            or with that of blocks at one depth.
        recompute_cache: recomputation levels shared by candidates.
        errors: options with which the model cannot be planned, with the error of each.
        smallest_peaks: for each kind the smallest measured peak that does not fit, in bytes per
            device.
        entry_keys: keys of the candidates that were queued or dropped.
        num_processed: number of entries taken from the queue.
        queue: heap of (lower bound in seconds, own lower bound in seconds, entry number, entry).
        entry_numbers: numbers that break ties, as entries cannot be compared.
    """

    limit: int | None
    decide: Decide
    strict: bool
    smallest: tuple[Memory, Attempt] | None = None
    dropped: list[QueuedCandidate] = field(default_factory=list)
    recompute_cache: RecomputeCache = field(default_factory=RecomputeCache)
    errors: list[tuple[PlanOptions, ShardwrightError]] = field(default_factory=list)
    smallest_peaks: dict[PlanKind, int] = field(default_factory=dict)
    entry_keys: set[object] = field(default_factory=set)
    num_processed: int = 0
    queue: list[tuple[float, float, int, QueuedCandidate | AttemptGroups]] = field(
        default_factory=list
    )
    entry_numbers: Iterator[int] = field(default_factory=count)

    def add(
        self, bound: float, entry: QueuedCandidate | AttemptGroups, seconds: float = 0.0
    ) -> None:
        """Queue an entry, ordered by its lower bound on step time, `max(bound, seconds)`.

        Args:
            bound: lower bound in seconds, possibly inherited from the entry it was derived from.
            seconds: lower bound in seconds of the entry itself; breaks ties, smallest first.
        """
        heappush(self.queue, (max(bound, seconds), seconds, next(self.entry_numbers), entry))

    def count_entries(self, on_progress: OnProgress) -> OnProgress:
        """Wrap a progress callback so that it also counts processed entries of those queued."""

        def report(doing: str, done: int = 0, of: int = 0) -> None:
            # One more than in the queue: the entry that is being examined has been taken out.
            total = self.num_processed + 1 + len(self.queue)
            nested_progress(on_progress, "", self.num_processed, total)(doing, done, of)

        return report

    def run(self, below: float) -> Candidate | None:
        """Return the next fastest candidate that fits; None if the queue is empty or the bound of
        its front is `below` seconds or more."""
        while self.queue and self.queue[0][0] < below:
            bound, _, _, entry = front = heappop(self.queue)
            try:
                if not isinstance(entry, QueuedCandidate):
                    self._search_attempts(bound, entry)
                elif (fitted := self._examine(entry, bound)) is not None:
                    return fitted
            except KeyboardInterrupt:
                # `known_to_fit` reads the queue after Ctrl-C.
                heappush(self.queue, front)
                raise
            self.num_processed += 1
        return None

    def known_to_fit(self) -> list[Candidate]:
        """Return queued candidates that fit, with the recomputation that they need or with all of
        it.

        Dry runs are made only until a candidate is found, as the user is waiting after Ctrl-C.
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
            smallest = queued.recompute_search.fully_recomputed
            if smallest.memory.peak <= (self.limit or 0):
                fitting.append(
                    replace(
                        queued.candidate, decisions=smallest.decisions, measured=smallest.memory
                    )
                )
        return fitting

    def rank(self, fitted: Candidate | None, ranking: Ranking) -> None:
        """Add the fastest candidate and the fastest of other kinds to a ranking, then the reasons
        why the remaining kinds are left out."""
        while fitted is not None:
            ranking.add(fitted)
            needs_more = ranking.wants(kind for _, kind in self._queued_kinds())
            fitted = self.run(float("inf")) if needs_more else None
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
        """Yield the lower bound in seconds and the kind of each attempt and candidate in the
        queue."""
        for bound, _, _, entry in self.queue:
            attempts = (
                [entry.attempt]
                if isinstance(entry, QueuedCandidate)
                else [attempt for group in entry for attempt in group]
            )
            for attempt in attempts:
                yield bound, requested_kind(attempt.options)

    def _search_attempts(self, bound: float, groups: AttemptGroups) -> None:
        """Queue the candidates of the first group of attempts, and the other groups behind them."""
        min_seconds = bound
        candidates = (queued for attempt in groups[0] for queued in self._new_candidates(attempt))
        for index, queued in enumerate(candidates):
            seconds = max(bound, queued.candidate.seconds)
            min_seconds = min(min_seconds, seconds) if index else seconds
            self.add(seconds, queued)
        # The next group is searched only if no candidate that is clearly faster fits.
        if len(groups) > 1:
            self.add(max(bound, NEXT_MEM_COEFF_BOUND * min_seconds), groups[1:])

    def _new_candidates(self, attempt: Attempt) -> Iterator[QueuedCandidate]:
        """Yield the candidates of an attempt that are new and may fit."""
        options, is_first = attempt.options, not self.entry_keys
        try:
            for candidate in self.decide(options):
                queued = self._new_entry(candidate, attempt)
                # Aligning takes many predictions, so candidates that cannot fit are not aligned.
                if queued is not None and self._may_fit(queued):
                    queued = self._align(queued)
                if queued is None:
                    continue
                if self._may_fit(queued):
                    yield queued
                else:
                    self.dropped.append(queued)
        # Whether a division into stages is possible is known only when it is made, here.
        except (PlanError, StrategyError) as error:
            if self.strict and is_first:
                raise
            self.errors.append((options, error))

    def _may_fit(self, queued: QueuedCandidate) -> bool:
        return self.limit is None or max(queued.min_memory) <= self.limit

    def _new_entry(self, candidate: Candidate, attempt: Attempt) -> QueuedCandidate | None:
        """Return a queue entry, or None if the candidate duplicates an earlier one."""
        # A larger `mem_coeff` often gives the same cuts.
        key = memory_and_time_key(candidate, attempt)
        if key in self.entry_keys:
            return None
        self.entry_keys.add(key)
        min_memory = least_memory(candidate.partitioned, attempt.options.optimizer)
        return QueuedCandidate(attempt, candidate, min_memory)

    def _align(self, queued: QueuedCandidate) -> QueuedCandidate | None:
        """Return the entry of `Candidate.aligned`, or None if that duplicates an earlier
        candidate."""
        aligned = queued.candidate.aligned
        return queued if aligned is queued.candidate else self._new_entry(aligned, queued.attempt)

    def _examine(self, queued: QueuedCandidate, bound: float) -> Candidate | None:
        """Return the candidate if it is known to fit; else examine it further and queue the result,
        unless it cannot fit."""
        if self.limit is None or queued.fits:
            return queued.candidate
        candidate, attempt = queued.candidate, queued.attempt
        if queued.recompute_search is not None:
            result = queued.recompute_search.run()
            log.info("%s: %s of %s", attempt, binary(result.memory.peak), binary(self.limit))
            if result.memory.peak > self.limit:
                # It should have fitted by an estimate, so the next search makes dry runs.
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
                    RECOMPUTED_BOUND * expected.seconds,
                )
            return None
        recompute_levels = (
            self.recompute_cache.recompute_levels(candidate) if attempt.recompute else None
        )
        may_fit = recompute_levels is None or recompute_levels.may_fit_without_recompute(
            queued.min_memory, self.limit
        )
        # A dry run takes about a second, so it is made only where the estimate allows it.
        if may_fit and (memory := self._measure(queued)).peak <= self.limit:
            return replace(candidate, measured=memory)
        # The step time with the expected recomputation is a tighter bound: other candidates may be
        # faster, and then no search for levels is made.
        if recompute_levels is not None:
            decisions = recompute_levels.expected_decisions(
                candidate.decisions, queued.min_memory, self.limit
            )
            expected = replace(candidate, decisions=decisions)
            self.add(
                bound, replace(queued, must_recompute=True), RECOMPUTED_BOUND * expected.seconds
            )
        return None

    def _measure(self, queued: QueuedCandidate) -> Memory:
        """Measure the memory of a candidate without recomputation by a dry run."""
        memory = queued.candidate.memory()
        log.info("%s: %s of %s", queued.attempt, binary(memory.peak), binary(self.limit or 0))
        self._record_peak(MeasuredDecisions(queued.candidate.decisions, memory), queued.attempt)
        return memory

    def _recompute_searches(self, queued: QueuedCandidate) -> list[RecomputeSearch]:
        """Return searches for the least recomputation, one per depth in the module tree whose
        blocks can free enough.

        Depths come in groups (`RecomputeBlocks.depths`); groups after the first one in which a
        depth can fit are not considered.
        """
        recompute_levels = self.recompute_cache.recompute_levels(queued.candidate)
        # The peak outside of forward and backward passes, which recomputation does not change: once
        # measured at one depth it is a lower bound at all others.
        peak_outside_passes = 0
        for depths in recompute_levels.depths:
            searches: list[RecomputeSearch] = []
            for depth in depths:
                min_memory = max(
                    peak_outside_passes, *recompute_levels.min_memory(depth, queued.min_memory)
                )
                if min_memory > (self.limit or 0):
                    self._drop_at_depth(queued, depth, min_memory)
                    continue
                search = self.recompute_cache.search(queued, depth, self.limit or 0)
                if search.can_fit:
                    searches.append(search)
                    continue
                peak_outside_passes = max(peak_outside_passes, search.peak_outside_passes)
                if search.is_measured:
                    self._record_peak(search.fully_recomputed, queued.attempt)
                else:
                    self._drop_at_depth(queued, depth, search.largest_stage.peak)
            if searches:
                return searches
        return []

    def _drop_at_depth(self, queued: QueuedCandidate, depth: int, min_memory: int) -> None:
        dropped = replace(queued, block_depth=depth, min_recomputed_memory=min_memory)
        self.dropped.append(dropped)

    def _record_peak(self, measured: MeasuredDecisions, attempt: Attempt) -> None:
        """Update the smallest measured peaks, overall and of the kind, for errors and rankings."""
        kind = requested_kind(attempt.options)
        peak = self.smallest_peaks.get(kind, measured.memory.peak)
        self.smallest_peaks[kind] = min(peak, measured.memory.peak)
        if self.smallest is None or measured.memory.peak < self.smallest[0].peak:
            self.smallest = measured.memory, attempt

    def measure_dropped(self) -> None:
        """Measure dropped candidates as long as one may need less memory than the smallest so far.

        A candidate that fits although an estimate was above the limit is queued again.
        """
        while self.dropped:
            queued = min(self.dropped, key=lambda queued: queued.lower_bound)
            self.dropped.remove(queued)
            if not self._may_be_smallest(queued.lower_bound):
                break
            if queued.block_depth is not None:
                self._measure_fully_recomputed(queued, queued.block_depth)
            elif (aligned := self._align(queued)) is None:
                continue
            elif queued.attempt.recompute:
                self.dropped.extend(self._entries_at_depths(aligned))
            else:
                self._measure(aligned)

    def _may_be_smallest(self, min_memory: int) -> bool:
        return self.smallest is None or min_memory < self.smallest[0].peak

    def _measure_fully_recomputed(self, queued: QueuedCandidate, depth: int) -> None:
        """Measure a candidate with all blocks at a depth recomputed.

        If its largest stage alone needs more than the smallest plan so far, the other stages are
        not measured.
        """
        measured = replace(queued, trust_estimate=False)
        search = self.recompute_cache.search(measured, depth, self.limit or 0)
        if search.can_fit:
            self.add(0.0, replace(queued, recompute_search=search), queued.candidate.seconds)
        elif self._may_be_smallest(search.largest_stage.peak):
            self._record_peak(search.fully_recomputed, queued.attempt)

    def _entries_at_depths(self, queued: QueuedCandidate) -> Iterator[QueuedCandidate]:
        """Yield the entry for each depth in the module tree, with the lower bound at that depth."""
        recompute_levels = self.recompute_cache.recompute_levels(queued.candidate)
        for depth in (depth for depths in recompute_levels.depths for depth in depths):
            min_memory = max(recompute_levels.min_memory(depth, queued.min_memory))
            yield replace(queued, block_depth=depth, min_recomputed_memory=min_memory)

    def error(self) -> ShardwrightError:
        """Return a `MemoryLimitError` with the smallest plan, or the first error without any
        plan."""
        # Nothing was measured if the model cannot be planned with any options.
        if self.smallest is None:
            return self.errors[0][1]
        memory, attempt = self.smallest
        return memory_limit_error(attempt, self.limit or 0, memory)
