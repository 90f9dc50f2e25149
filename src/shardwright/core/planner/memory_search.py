"""The best-first search under a memory limit.

The queue contains attempts (options to plan with) and candidates (decisions with a predicted step
time), ordered by a lower bound on their step time in seconds. The search takes the first entry,
examines it and queues it again with a tighter bound; each examination costs more than the previous
one. Attempts are searched for candidates. A candidate gets an estimate of its memory, then a dry
run, then the least recomputation with which it fits. The first entry that is a candidate proven to
fit is the result, as no later entry can be faster. docs/architecture.md, "Candidates", has the
table of these steps.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from heapq import heapify, heappop, heappush

from shardwright.core.plan.ranked import LeftOut, PlanKind
from shardwright.core.planner.attempts import memory_limit_error
from shardwright.core.planner.candidate import Candidate
from shardwright.core.planner.candidate_fitting import CandidateFitting
from shardwright.core.planner.group_search import GroupSearch
from shardwright.core.planner.queued_candidate import QueuedCandidate
from shardwright.core.planner.ranking import Ranking, requested_kind
from shardwright.core.planner.search_queue import QueueEntry
from shardwright.errors import ShardwrightError, one_line
from shardwright.progress import OnProgress, nested_progress

log = logging.getLogger("shardwright.search")

MAX_EXAMINATIONS = 32
"""Maximum number of examinations of candidates for a first plan that is known to fit; a candidate
takes about five."""


class MemorySearch(GroupSearch, CandidateFitting):
    """A best-first search: examines queue entries in ascending order of their lower bounds."""

    def count_attempts(self, on_progress: OnProgress) -> OnProgress:
        """Return a progress callback that reports the number of searched attempts to `on_progress`.

        The reported total may not be reached, as attempts that cannot be faster are skipped.
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
            fitted = self._examine(heappop(self.queue))
            if fitted is not None:
                return fitted
            seconds = self.report_times.due()
            if seconds is not None:
                self._log_best_candidate(seconds)
        return None

    def _examine(self, front: QueueEntry) -> Candidate | None:
        """Examine an entry that was taken from the queue; return the candidate if it fits."""
        bound, _, _, entry = front
        try:
            if isinstance(entry, QueuedCandidate):
                return self._examine_candidate(entry, bound)
            self._examine_options(bound, entry)
        except KeyboardInterrupt:
            # `fitting_candidates` reads the queue after Ctrl-C.
            heappush(self.queue, front)
            raise
        return None

    def _fit_fastest_candidate(self) -> None:
        """Examine the fastest queued candidates until one is known to fit, or enough were tried."""
        for _ in range(MAX_EXAMINATIONS):
            candidates = [front for front in self.queue if isinstance(front[-1], QueuedCandidate)]
            if not candidates:
                return
            front = min(candidates)
            self.queue.remove(front)
            heapify(self.queue)
            fitted = self._examine(front)
            if fitted is not None:
                bound, seconds, _, queued = front
                assert isinstance(queued, QueuedCandidate)
                self.add(bound, replace(queued, candidate=fitted, fits=True), seconds)
            if any(isinstance(e, QueuedCandidate) and e.fits for *_, e in self.queue):
                return

    def _log_best_candidate(self, seconds: float) -> None:
        """Log the fastest candidate that is known to fit.

        Args:
            seconds: elapsed seconds of the search.
        """
        fitting = self.fitting_candidates()
        if not fitting:
            # Candidates are fitted in the order of their bounds, so that the first may come late.
            self._fit_fastest_candidate()
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
        """Yield (lower bound in seconds, requested `PlanKind`) for each attempt, and each attempt
        that a queued candidate comes from."""
        for bound, _, _, entry in self.queue:
            attempts = (
                [entry.attempt]
                if isinstance(entry, QueuedCandidate)
                else [attempt for group in entry.groups for attempt in group]
            )
            for attempt in attempts:
                yield bound, requested_kind(attempt.options)

    def resume_postponed(self) -> bool:
        """Queue the postponed options; return whether any options were postponed."""
        postponed, self.postponed = self.postponed, []
        for queued in postponed:
            # Else the options would be postponed again.
            queued.stage_options.may_fit = True
            self.add(queued.stage_options.min_seconds, queued)
        return bool(postponed)

    def error(self) -> ShardwrightError:
        """Return a `MemoryLimitError` with the memory of the smallest measured plan, or the first
        error of the planner if no plan was measured."""
        # No plan was measured if the model cannot be planned with any options.
        if self.smallest_measured is None:
            return self.errors[0][1]
        memory, attempt = self.smallest_measured
        return memory_limit_error(attempt, self.limit or 0, memory)
