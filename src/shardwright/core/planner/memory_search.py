"""The priority queue of the best-first search under a memory limit.

The queue contains attempts (options to plan with) and candidates (decisions with a predicted step
time), ordered by a lower bound on their step time in seconds. The first entry is taken, examined
and queued again with a tighter bound; each examination costs more than the previous one. An attempt
is searched for candidates. A candidate gets an estimate of its memory, then a dry run, then the
least recomputation with which it fits. The first candidate that is known to fit when it is taken is
the answer, as no later entry can be faster. docs/architecture.md, "Candidates", has the table of
these steps.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count
from math import inf

from shardwright.core.cost.memory import Memory, bytes_text, memory_lower_bounds
from shardwright.core.plan.ranked import LeftOut, PlanKind
from shardwright.core.planner.attempts import Attempt, memory_limit_error
from shardwright.core.planner.candidate import Candidate, FindCandidates
from shardwright.core.planner.options import PlanOptions
from shardwright.core.planner.queued_candidate import (
    QueuedCandidate,
    RecomputeCache,
    memory_and_time_key,
)
from shardwright.core.planner.ranking import Ranking, requested_kind
from shardwright.core.planner.slow_search import ReportTimes
from shardwright.core.planner.stage_options import QueuedOptions, StageOptions
from shardwright.core.search.recompute.search import MeasuredDecisions, RecomputeSearch
from shardwright.errors import PlanError, ShardwrightError, StrategyError, one_line
from shardwright.progress import OnProgress, nested_progress

log = logging.getLogger("shardwright.search")

NEXT_MEM_COEFF_BOUND = 0.97
"""Assumed lower bound on the step time with the next larger `mem_coeff`, as a fraction of the
expected step time. Below 1, since a plan with a larger `mem_coeff` can be slightly faster: the
objective of the search is simpler than the prediction."""

MIN_INCREASE_RATIO = 2.0
"""Assumed minimum ratio of the next increase of the step time to the previous increase, when
`mem_coeff` is raised twice by a factor of 8.

A search pays `mem_coeff` seconds for each unit of parameter memory that it saves. The ratio is 2 if
the second raise saves a fourth of the memory that the first saved, at 8 times the price per unit.
A raise that saves less hardly makes the plan smaller."""

UNSHARDED_BOUND = 0.99
"""Assumed lower bound on the step time without ZeRO, as a fraction of the step time predicted for
the cuts of the first ZeRO level if they are used without ZeRO."""

RECOMPUTED_BOUND = 0.99
"""Assumed lower bound on the step time of a candidate that fits, as a fraction of its step time
with the recomputation that an estimate of its memory requires."""


def next_mem_coeff_bound(lowest: float, previous: float) -> float:
    """Return an assumed lower bound in seconds on the step time with the next larger `mem_coeff`.

    Args:
        lowest: fastest step time with the current `mem_coeff`; infinite if it is unknown.
        previous: fastest step time with the next smaller `mem_coeff`; infinite if it is unknown.
    """
    if lowest == inf:
        return 0.0
    increase = lowest - previous if previous < lowest else 0.0
    return NEXT_MEM_COEFF_BOUND * (lowest + MIN_INCREASE_RATIO * increase)


@dataclass
class MemorySearch:
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
        smallest_peaks: smallest measured peak that does not fit, in bytes per device, by plan kind.
        entry_keys: keys of the candidates that were queued or dropped.
        queue: heap of (lower bound in seconds, lower bound in seconds of the entry alone, entry
            number, entry).
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
    queue: list[tuple[float, float, int, QueuedCandidate | QueuedOptions]] = field(
        default_factory=list
    )
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

    def count_attempts(self, on_progress: OnProgress) -> OnProgress:
        """Return a progress callback that passes the share of searched attempts to `on_progress`.

        The total is known from the start. A search may end before all attempts are searched, as it
        skips attempts that cannot be faster.
        """

        def report(doing: str, done: int = 0, of: int = 0) -> None:
            # Index of the attempt in progress, which is below the total until the search ends.
            searched = min(self.num_searched, self.num_attempts - 1)
            nested_progress(on_progress, "", searched, self.num_attempts)(doing, done, of)

        return report

    def run(self, below: float) -> Candidate | None:
        """Return the fastest candidate in the queue that fits; None if all lower bounds are at
        least `below` seconds."""
        while self.queue and self.queue[0][0] < below:
            bound, _, _, entry = front = heappop(self.queue)
            try:
                if not isinstance(entry, QueuedCandidate):
                    self._process_queued_options(bound, entry)
                elif (fitted := self._process_queued_candidate(entry, bound)) is not None:
                    return fitted
            except KeyboardInterrupt:
                # `fitting_candidates` reads the queue after Ctrl-C.
                heappush(self.queue, front)
                raise
            seconds = self.report_times.due()
            if seconds is not None:
                self._log_best_candidate(seconds)
        return None

    def _log_best_candidate(self, seconds: float) -> None:
        """Log the fastest candidate that is known to fit.

        Args:
            seconds: elapsed seconds of the search.
        """
        fitting = self.fitting_candidates()
        # The front has the smallest lower bound of all plans that are left.
        bound = self.queue[0][0] if self.queue else 0.0
        if not fitting:
            message = "no plan is known to fit yet"
        else:
            best = min(fitting, key=lambda candidate: candidate.seconds)
            words = best.options.describe_pipeline(), best.options.describe()
            message = (
                f"the best plan so far takes {best.seconds:.4g} s per step"
                f" ({', '.join(words)}); Ctrl-C ends the search with it"
            )
        log.warning(
            "the search has taken %.0f s and goes on: %s; no plan takes less than %.4g s",
            *(seconds, message, bound),
        )

    def fitting_candidates(self) -> list[Candidate]:
        """Return queued candidates that are known to fit, with full recomputation where necessary.

        Dry runs are made only until one candidate is found, as the user is waiting after Ctrl-C.
        """
        entries = [entry for *_, entry in self.queue if isinstance(entry, QueuedCandidate)]
        fitting = [queued.candidate for queued in entries if queued.fits]
        for queued in entries:
            # No search for recomputation yet, listed already, or a dry run that is not needed.
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
                        queued.candidate,
                        decisions=smallest.decisions,
                        measured_memory=smallest.memory,
                    )
                )
        return fitting

    def rank(self, fitted: Candidate | None, ranking: Ranking) -> None:
        """Record in `ranking` the fastest candidate of each kind of plan, and why other kinds have
        no candidate.

        Args:
            fitted: fastest candidate that fits, as returned by `run`.
        """
        while fitted is not None:
            ranking.add(fitted)
            needs_more = ranking.needs_more(
                plan_kind for _, plan_kind in self._plan_kinds_in_queue()
            )
            # The queue is ordered by step time, so its next answer is the next fastest plan.
            fitted = self.run(float("inf")) if needs_more else None
        for bound, plan_kind in self._plan_kinds_in_queue():
            ranking.leave_out(plan_kind, LeftOut.slower(bound))
        needed = [*self.smallest_peaks.items(), *self.postponed_memory.items()]
        for plan_kind, peak_bytes in needed:
            ranking.leave_out(plan_kind, LeftOut.larger(peak_bytes))
        for queued in self.dropped:
            plan_kind = requested_kind(queued.attempt.options)
            ranking.leave_out(plan_kind, LeftOut.larger(queued.lower_bound))
        for options, error in self.errors:
            ranking.leave_out(requested_kind(options), LeftOut.because(one_line(error)))

    def _plan_kinds_in_queue(self) -> Iterator[tuple[float, PlanKind]]:
        """Yield the lower bound on the step time in seconds and the requested `PlanKind` of each
        attempt and candidate in the queue."""
        for bound, _, _, entry in self.queue:
            attempts = (
                [entry.attempt]
                if isinstance(entry, QueuedCandidate)
                else [attempt for group in entry.groups for attempt in group]
            )
            for attempt in attempts:
                yield bound, requested_kind(attempt.options)

    def _process_queued_options(self, bound: float, queued: QueuedOptions) -> None:
        """Take the next step for options in the queue, each more expensive than the one before.

        The steps tighten the lower bound on the step time by the recomputation that memory
        requires, then by a search without a memory limit. The last step searches the first group of
        attempts, or postpones the options if they need too much memory.

        Args:
            bound: lower bound in seconds on the step time of all attempts.
        """
        stage_options = queued.stage_options
        # From the cheapest look to the most expensive: a formula, a search for a bound, all
        # attempts.
        if stage_options.recompute_seconds is None:
            stage_options.add_recomputation()
            self.add(max(bound, stage_options.min_seconds), queued)
        elif stage_options.relaxed_options is not None:
            if self._tighten_step_time_bound(stage_options):
                self.add(max(bound, stage_options.min_seconds), queued)
        # What a device stores at the last ZeRO level hardly depends on `mem_coeff`. If even that is
        # too much, larger values are tried only if nothing else fits.
        elif stage_options.is_too_large and not stage_options.may_fit:
            self.postponed.append(queued)
        else:
            self._search_first_group(bound, queued)

    def _search_first_group(self, bound: float, queued: QueuedOptions) -> None:
        """Search the first group of attempts up to the lowest ZeRO level that may fit, and queue
        the candidates.

        A higher ZeRO level only adds communication. So the attempts at higher levels are queued
        again, as one entry, and the other groups as another entry.

        Args:
            bound: lower bound in seconds on the step time of all attempts.
        """
        stage_options, groups = queued.stage_options, queued.groups
        attempts, lowest, num_sharded, may_fit = list(groups[0]), inf, 0, False
        # In a group that was begun before, the attempt without ZeRO has been queued or searched.
        if not queued.continues_group:
            attempts, lowest = self._queue_attempt_without_zero(bound, stage_options, attempts)
        while attempts and not may_fit:
            attempt, num_dropped = attempts.pop(0), len(self.dropped)
            self.num_searched += 1
            # As a list, since the search appends candidates that cannot fit to `dropped` on the
            # way.
            candidates = list(self._search_new_candidates(attempt))
            for each in candidates:
                seconds = self._bound_seconds_with_recompute(
                    each.candidate, stage_options, each.min_memory
                )
                self.add(bound, each, seconds)
            dropped = self.dropped[num_dropped:]
            # Up to the lowest level, as higher levels are slower.
            if not num_sharded:
                new = (each.candidate for each in (*candidates, *dropped))
                lowest = min(
                    (
                        lowest,
                        *(self._bound_seconds_with_recompute(each, stage_options) for each in new),
                    )
                )
            num_sharded += attempt.options.sharding is not None
            # Not before a ZeRO level: sharding the optimizer state can make the step faster too.
            may_fit = bool(candidates and num_sharded)
            stage_options.may_fit = stage_options.may_fit or bool(candidates)
            # ZeRO-3 over all replicas needs the least memory: what is too large here fits at no
            # level.
            if attempt.options.shards_all:
                stage_options.is_too_large = bool(dropped)
        remaining = QueuedOptions(stage_options, groups[1:], previous_lowest=lowest)
        remaining_bound = max(bound, next_mem_coeff_bound(lowest, queued.previous_lowest))
        lowest = bound if lowest == inf else max(bound, lowest)
        log.debug(
            "%s, %s: at least %.4g s per step",
            *(stage_options.options.describe_pipeline(), groups[0][0], lowest),
        )
        # The attempts that are left are higher levels, none of which is faster than the lowest.
        if attempts:
            self.add(lowest, QueuedOptions(stage_options, [attempts], continues_group=True))
        if len(groups) > 1 and not queued.continues_group:
            # Searched only if no candidate that is clearly faster fits.
            self.add(remaining_bound, remaining)

    def _bound_seconds_with_recompute(
        self,
        candidate: Candidate,
        stage_options: StageOptions,
        min_memory: Sequence[int] | None = None,
    ) -> float:
        """Return a lower bound in seconds on the step time of `candidate` with the recomputation
        that the memory limit requires.

        Args:
            min_memory: minimum bytes per device of each stage, without activations; by default the
                minimum over all plans with `stage_options`.
        """
        predicted = candidate.predicted
        # Without a cluster no seconds are predicted, and the order of the phases decides.
        if predicted is None:
            return 0.0
        needed = stage_options.recompute_seconds or 0.0
        if min_memory is not None:
            needed = stage_options.recompute_bound(min_memory)
        # Recomputation may hide exposed communication of parameters, or fill the waits of stages.
        return predicted.seconds + max(0.0, needed - predicted.spare_seconds)

    def _queue_attempt_without_zero(
        self, bound: float, stage_options: StageOptions, attempts: list[Attempt]
    ) -> tuple[list[Attempt], float]:
        """Queue the attempt without ZeRO separately from the attempts at ZeRO levels.

        The attempt is postponed if no candidate of the first ZeRO level may fit, since a device
        stores at least as much without ZeRO. Otherwise the step time without ZeRO is bounded with
        the cuts found for the first level, and the attempt is searched only if nothing faster fits.

        Args:
            bound: lower bound in seconds on the step time of all attempts.

        Returns:
            The other attempts, and a lower bound in seconds on the step time without ZeRO (infinite
            if the attempt was not queued).
        """
        first, *sharded = attempts
        # Nothing to separate: every plan fits, the user requested ZeRO, or no level of it is tried.
        if self.limit is None or first.options.sharding is not None or not sharded:
            return attempts, inf
        try:
            # The model caches the search, so the attempt itself gets this result without searching
            # again.
            candidates = self.find_candidates(sharded[0].options)
        except (PlanError, StrategyError):
            # Recorded when the attempts themselves are searched.
            return attempts, inf
        # Where ZeRO shards nothing, the attempt without it goes first, as it needs no change.
        if not any(each.shards_storage for each in candidates):
            return attempts, inf
        optimizer = first.options.optimizer
        memory = [memory_lower_bounds(each.partitioned, optimizer) for each in candidates]
        # Of each candidate the largest stage, of all candidates the smallest.
        needed = min(map(max, memory))
        if needed <= self.limit:
            unsharded = [each.with_sharding_of(first.options) for each in candidates]
            lowest = min(
                self._bound_seconds_with_recompute(each, stage_options) for each in unsharded
            )
            # Only candidates whose least memory is within the limit; the others cannot fit.
            lowest_that_fits = min(
                self._bound_seconds_with_recompute(each, stage_options, stages)
                for each, stages in zip(unsharded, memory, strict=True)
                if max(stages) <= self.limit
            )
            queued = QueuedOptions(stage_options, [[first]], continues_group=True)
            self.add(bound, queued, UNSHARDED_BOUND * lowest_that_fits)
            return sharded, lowest
        self.postponed.append(QueuedOptions(stage_options, [[first]]))
        plan_kind = requested_kind(first.options)
        lowest_memory = self.postponed_memory.get(plan_kind, needed)
        self.postponed_memory[plan_kind] = min(needed, lowest_memory)
        return sharded, inf

    def _tighten_step_time_bound(self, stage_options: StageOptions) -> bool:
        """Raise `stage_options.min_seconds` to the step time without a memory limit plus the
        recomputation that every plan needs.

        Returns:
            False if the model cannot be planned with these options.
        """
        relaxed, stage_options.relaxed_options = stage_options.relaxed_options, None
        assert relaxed is not None
        try:
            relaxed_candidates = self.find_candidates(relaxed)
            seconds = min(
                self._bound_seconds_with_recompute(each, stage_options)
                for each in relaxed_candidates
            )
        except (PlanError, StrategyError) as error:
            self.errors.append((relaxed, error))
            # Infinite, so that later phases do not add these options again.
            stage_options.min_seconds = inf
            return False
        stage_options.min_seconds = max(stage_options.min_seconds, seconds)
        log.info("%s: at least %.4g s per step", relaxed.describe_pipeline(), seconds)
        return True

    def _search_new_candidates(self, attempt: Attempt) -> Iterator[QueuedCandidate]:
        """Yield new candidates of `attempt` that may fit; record candidates that cannot fit."""
        # Before any candidate the options are those that the user requested.
        options, is_first = attempt.options, not self.entry_keys
        try:
            for candidate in self.find_candidates(options):
                queued = self._make_new_entry(candidate, attempt)
                if queued is None:
                    continue
                if self._may_fit_in_memory(queued):
                    yield queued
                else:
                    self.dropped.append(queued)
        # `find_candidates` divides the model into stages, which may turn out to be impossible.
        except (PlanError, StrategyError) as error:
            if self.raises_first_error and is_first:
                raise
            self.errors.append((options, error))

    def _may_fit_in_memory(self, queued: QueuedCandidate) -> bool:
        return self.limit is None or max(queued.min_memory) <= self.limit

    def _make_new_entry(self, candidate: Candidate, attempt: Attempt) -> QueuedCandidate | None:
        """Return a queue entry for `candidate`, or None if an equal candidate was queued before."""
        # A larger `mem_coeff` often gives the same cuts.
        key = memory_and_time_key(candidate, attempt)
        if key in self.entry_keys:
            return None
        self.entry_keys.add(key)
        min_memory = memory_lower_bounds(candidate.partitioned, attempt.options.optimizer)
        return QueuedCandidate(attempt, candidate, min_memory)

    def _make_aligned_entry(self, queued: QueuedCandidate) -> QueuedCandidate | None:
        """Return a queue entry for `queued.candidate.aligned`, or None if an equal candidate was
        queued before."""
        aligned = queued.candidate.aligned
        return (
            queued if aligned is queued.candidate else self._make_new_entry(aligned, queued.attempt)
        )

    def _process_queued_candidate(self, queued: QueuedCandidate, bound: float) -> Candidate | None:
        """Take the next step to decide whether a queued candidate fits into memory.

        Args:
            bound: lower bound in seconds with which the candidate was queued.

        Returns:
            The candidate if it is known to fit; else None, and the candidate is queued again with a
            tighter bound unless it cannot fit.
        """
        # Without a limit every candidate fits, and only aligning is left to do.
        if queued.fits or (self.limit is None and queued.is_aligned):
            return queued.candidate
        if self.limit is None:
            self._queue_aligned_candidate(queued, queued.candidate.seconds)
        elif queued.recompute_search is not None:
            self._run_recompute_search(queued, queued.recompute_search, bound)
        elif not queued.must_recompute:
            return self._measure_without_recompute(queued, bound)
        elif not queued.is_aligned:
            self._queue_aligned_candidate(queued, bound)
        else:
            for search in self._searches_by_block_depth(queued):
                expected = replace(queued.candidate, decisions=search.expected_decisions())
                self.add(
                    bound,
                    replace(queued, recompute_search=search),
                    RECOMPUTED_BOUND * expected.seconds,
                )
        return None

    def _run_recompute_search(
        self, queued: QueuedCandidate, search: RecomputeSearch, bound: float
    ) -> None:
        """Find the least recomputation with which the candidate fits, and queue the result."""
        # Recomputation is searched for only under a limit, so the limit is never None here.
        result, limit = search.run(), self.limit or 0
        log.info("%s: %s of %s", queued.attempt, bytes_text(result.memory.peak), bytes_text(limit))
        if result.memory.peak > limit:
            # By an estimate the candidate should have fitted, so the next search makes dry runs.
            self.add(bound, replace(queued, recompute_search=None, trust_estimate=False))
            return
        fitted = replace(
            queued.candidate, decisions=result.decisions, measured_memory=result.memory
        )
        self.add(bound, replace(queued, candidate=fitted, fits=True), fitted.seconds)

    def _measure_without_recompute(self, queued: QueuedCandidate, bound: float) -> Candidate | None:
        """Return the candidate if it fits without recomputation; else queue it with the
        recomputation that it is expected to need, and return None."""
        candidate, limit = queued.candidate, self.limit or 0
        recompute_levels = (
            self.recompute_cache.recompute_levels(candidate) if queued.attempt.recompute else None
        )
        may_fit = recompute_levels is None or recompute_levels.may_fit_without_recompute(
            queued.min_memory, limit
        )
        if may_fit and not queued.is_aligned:
            self._queue_aligned_candidate(queued, candidate.seconds)
            return None
        # A dry run takes about a second, so it is made only where the estimate is within the limit.
        if may_fit and (memory := self._measure_candidate_memory(queued)).peak <= limit:
            return replace(candidate, measured_memory=memory)
        # The step time with the expected recomputation is a tighter bound. If other candidates are
        # faster, no recomputation is searched for.
        if recompute_levels is not None:
            decisions = recompute_levels.expected_decisions(
                candidate.decisions, queued.min_memory, limit
            )
            expected = replace(candidate, decisions=decisions)
            self.add(
                bound, replace(queued, must_recompute=True), RECOMPUTED_BOUND * expected.seconds
            )
        return None

    def _queue_aligned_candidate(self, queued: QueuedCandidate, bound: float) -> None:
        """Queue `Candidate.aligned` with the lower bound `bound` in seconds, unless it cannot fit
        or an equal candidate was queued before.

        Aligning takes many predictions, so only candidates that may be chosen are aligned.
        """
        aligned = self._make_aligned_entry(queued)
        if aligned is None:
            return
        aligned = replace(aligned, is_aligned=True, must_recompute=queued.must_recompute)
        if self._may_fit_in_memory(aligned):
            # Aligning may shorten the step below the bound with which the candidate was queued.
            self.add(min(bound, aligned.candidate.seconds), aligned)
        else:
            self.dropped.append(aligned)

    def _measure_candidate_memory(self, queued: QueuedCandidate) -> Memory:
        """Measure the memory of a candidate by a dry run that recomputes only the operators that
        the user marked."""
        memory = queued.candidate.memory()
        log.info(
            "%s: %s of %s", queued.attempt, bytes_text(memory.peak), bytes_text(self.limit or 0)
        )
        self._record_smallest_peak(
            MeasuredDecisions(queued.candidate.decisions, memory), queued.attempt
        )
        return memory

    def _searches_by_block_depth(self, queued: QueuedCandidate) -> list[RecomputeSearch]:
        """Return searches for the least recomputation, one per depth of the module tree at which
        recomputing all modules frees enough memory.

        Depths come in groups (`RecomputeBlocks.depths`); only the first group with a depth at which
        the candidate can fit is considered.
        """
        recompute_levels = self.recompute_cache.recompute_levels(queued.candidate)
        # Recomputation does not change the peak outside of forward and backward passes: measured at
        # one depth, it is a lower bound at all other depths.
        peak_outside_passes = 0
        for depths in recompute_levels.depths:
            searches: list[RecomputeSearch] = []
            for depth in depths:
                min_memory = max(
                    peak_outside_passes, *recompute_levels.min_memory(depth, queued.min_memory)
                )
                if min_memory > (self.limit or 0):
                    self._drop_candidate_at_depth(queued, depth, min_memory)
                    continue
                search = self.recompute_cache.search(queued, depth, self.limit or 0)
                if search.can_fit:
                    searches.append(search)
                    continue
                peak_outside_passes = max(peak_outside_passes, search.peak_outside_passes)
                # Only a measured peak may be named in the error; an estimate may be wrong and is
                # kept to measure.
                if search.is_measured:
                    self._record_smallest_peak(search.fully_recomputed, queued.attempt)
                else:
                    self._drop_candidate_at_depth(queued, depth, search.largest_stage.peak)
            if searches:
                return searches
        return []

    def _drop_candidate_at_depth(
        self, queued: QueuedCandidate, depth: int, min_memory: int
    ) -> None:
        dropped = replace(queued, block_depth=depth, min_recomputed_memory=min_memory)
        self.dropped.append(dropped)

    def _record_smallest_peak(self, measured: MeasuredDecisions, attempt: Attempt) -> None:
        """Update the smallest measured peak memory over all attempts, and over attempts of the same
        `PlanKind`."""
        plan_kind = requested_kind(attempt.options)
        peak_bytes = self.smallest_peaks.get(plan_kind, measured.memory.peak)
        self.smallest_peaks[plan_kind] = min(peak_bytes, measured.memory.peak)
        if self.smallest_measured is None or measured.memory.peak < self.smallest_measured[0].peak:
            self.smallest_measured = measured.memory, attempt

    def resume_postponed(self) -> bool:
        """Queue the postponed options; return whether any options were postponed."""
        postponed, self.postponed = self.postponed, []
        for queued in postponed:
            # Else the options would be postponed again.
            queued.stage_options.may_fit = True
            self.add(queued.stage_options.min_seconds, queued)
        return bool(postponed)

    def measure_dropped(self) -> None:
        """Measure dropped candidates that may need less memory than the smallest plan so far.

        A candidate that fits although an estimate was above the limit is queued again.
        """
        while self.dropped:
            # Not sorted once, as splitting an entry by depth adds entries.
            queued = min(self.dropped, key=lambda queued: queued.lower_bound)
            self.dropped.remove(queued)
            # Bounds ascend, so no other dropped candidate needs less.
            if not self._may_need_less_than_smallest_plan(queued.lower_bound):
                break
            if queued.block_depth is not None:
                self._measure_fully_recomputed(queued, queued.block_depth)
            elif (aligned := self._make_aligned_entry(queued)) is None:
                continue
            elif queued.attempt.recompute:
                self.dropped.extend(self._split_candidate_by_depth(aligned))
            else:
                self._measure_candidate_memory(aligned)

    def _may_need_less_than_smallest_plan(self, min_memory: int) -> bool:
        return self.smallest_measured is None or min_memory < self.smallest_measured[0].peak

    def _measure_fully_recomputed(self, queued: QueuedCandidate, depth: int) -> None:
        """Measure a candidate with all blocks at a depth recomputed, and queue it if it fits.

        If its largest stage needs more memory than the smallest plan so far, the other stages are
        not measured.
        """
        # An estimate has dropped the candidate, so that only a dry run can tell.
        measured = replace(queued, trust_estimate=False)
        search = self.recompute_cache.search(measured, depth, self.limit or 0)
        if search.can_fit:
            # Its own step is the only bound that a dropped candidate has.
            self.add(0.0, replace(queued, recompute_search=search), queued.candidate.seconds)
        elif self._may_need_less_than_smallest_plan(search.largest_stage.peak):
            self._record_smallest_peak(search.fully_recomputed, queued.attempt)

    def _split_candidate_by_depth(self, queued: QueuedCandidate) -> Iterator[QueuedCandidate]:
        """Yield a copy of `queued` for each depth of the module tree, with a lower bound on memory
        if all modules of that depth are recomputed."""
        recompute_levels = self.recompute_cache.recompute_levels(queued.candidate)
        for depth in (depth for depths in recompute_levels.depths for depth in depths):
            min_memory = max(recompute_levels.min_memory(depth, queued.min_memory))
            yield replace(queued, block_depth=depth, min_recomputed_memory=min_memory)

    def error(self) -> ShardwrightError:
        """Return a `MemoryLimitError` with the memory of the smallest measured plan, or the first
        error of the planner if no plan was measured."""
        # No plan was measured if the model cannot be planned with any options.
        if self.smallest_measured is None:
            return self.errors[0][1]
        memory, attempt = self.smallest_measured
        return memory_limit_error(attempt, self.limit or 0, memory)
