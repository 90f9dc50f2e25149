"""Decide whether candidates in the queue fit into memory, and with which recomputation.

A candidate gets an estimate of its memory, then a dry run, then the least recomputation with which
it fits. Each step costs more than the one before, and queues the candidate again with a tighter
bound.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

from shardwright.core.cost.memory import Memory, bytes_text
from shardwright.core.planner.candidate import Candidate
from shardwright.core.planner.queued_candidate import (
    QueuedCandidate,
)
from shardwright.core.planner.search_queue import SearchQueue
from shardwright.core.search.recompute.search import MeasuredDecisions, RecomputeSearch

log = logging.getLogger("shardwright.search")

RECOMPUTED_BOUND = 0.99
"""Assumed lower bound on the ratio of two step times of a candidate: with the recomputation that it
needs to fit, to with the recomputation that a memory estimate suggests."""

NEARLY_FASTEST = 0.99
"""Ratio of the step times of the fastest plan and of the answer at which the search ends.

Raising all bounds by the last percent takes long, and predictions are less accurate than that.
"""


class CandidateFitting(SearchQueue):
    """The part of the search that determines whether candidates fit into memory."""

    def _examine_candidate(self, queued: QueuedCandidate, bound: float) -> Candidate | None:
        """Take the next step to decide whether a queued candidate fits into memory.

        Args:
            bound: lower bound in seconds with which the candidate was queued.

        Returns:
            The candidate if it fits; None if it cannot fit, or was queued again with a tighter
            bound.
        """
        # Without a limit every candidate fits, and only aligning is left to do.
        if queued.fits or (self.limit is None and queued.is_aligned):
            return queued.candidate
        if queued.pending_bound is not None:
            tighter = queued.pending_bound.simulated
            if tighter > bound:
                self.add(bound, replace(queued, pending_bound=None), tighter)
                return None
            queued = replace(queued, pending_bound=None)
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
                self._queue_recompute_search(replace(queued, recompute_search=search), bound)
        return None

    def _queue_recompute_search(self, queued: QueuedCandidate, bound: float) -> None:
        """Queue `queued.recompute_search` with the step time that it expects."""
        assert queued.recompute_search is not None
        decisions = queued.recompute_search.expected_decisions()
        expected = replace(queued.candidate, decisions=decisions)
        self.add(bound, queued, RECOMPUTED_BOUND * expected.seconds)

    def _run_recompute_search(
        self, queued: QueuedCandidate, search: RecomputeSearch, bound: float
    ) -> None:
        """Find the least recomputation with which the candidate fits, and queue the result; or
        queue the search again if it expects more recomputation than before."""
        if self.recompute_cache.expects_more_recompute(queued.candidate, search):
            self._queue_recompute_search(queued, bound)
            return
        # Recomputation is searched for only under a limit, so the limit is never None here.
        result, limit = search.run(), self.limit or 0
        log.info("%s: %s of %s", queued.attempt, bytes_text(result.memory.peak), bytes_text(limit))
        if result.memory.peak > limit:
            # By an estimate the candidate should have fitted, so the next search makes dry runs.
            self.add(bound, replace(queued, recompute_search=None, trust_estimate=False))
            return
        self.recompute_cache.record_fitted(queued.candidate, search)
        fitted = replace(
            queued.candidate, decisions=result.decisions, measured_memory=result.memory
        )
        entry = replace(queued, candidate=fitted, fits=True)
        self.add(bound, entry, NEARLY_FASTEST * fitted.seconds)

    def _measure_without_recompute(self, queued: QueuedCandidate, bound: float) -> Candidate | None:
        """Return the candidate if it fits without recomputation; else None, after queueing it with
        the recomputation that it is expected to need."""
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
        aligned = self._make_queue_entry_of_aligned(queued)
        if aligned is None:
            return
        aligned = replace(aligned, is_aligned=True, must_recompute=queued.must_recompute)
        if self._may_fit_in_memory(aligned):
            # Aligning may shorten the step below the bound with which the candidate was queued.
            self.add(min(bound, aligned.candidate.seconds), aligned)
        else:
            self.dropped.append(aligned)

    def _make_queue_entry_of_aligned(self, queued: QueuedCandidate) -> QueuedCandidate | None:
        """Return a queue entry for `queued.candidate.aligned`, or None if an equal candidate was
        queued before."""
        aligned = queued.candidate.aligned
        return (
            queued
            if aligned is queued.candidate
            else self._make_queue_entry(aligned, queued.attempt)
        )

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

    def measure_dropped(self) -> None:
        """Measure dropped candidates that may need less memory than the smallest plan so far.

        A candidate that fits, although an estimate was above the limit, is queued again.
        """
        while self.dropped:
            # Not sorted once, as splitting an entry by depth adds entries.
            queued = min(self.dropped, key=lambda queued: queued.lower_bound)
            self.dropped.remove(queued)
            # Bounds ascend, so no other dropped candidate needs less.
            if not self._is_below_smallest_measured_peak(queued.lower_bound):
                break
            if queued.block_depth is not None:
                self._measure_fully_recomputed(queued, queued.block_depth)
            elif (aligned := self._make_queue_entry_of_aligned(queued)) is None:
                continue
            elif queued.attempt.recompute:
                self.dropped.extend(self._split_candidate_by_depth(aligned))
            else:
                self._measure_candidate_memory(aligned)

    def _is_below_smallest_measured_peak(self, min_memory: int) -> bool:
        return self.smallest_measured is None or min_memory < self.smallest_measured[0].peak

    def _measure_fully_recomputed(self, queued: QueuedCandidate, depth: int) -> None:
        """Measure a candidate with all modules at a depth of the model recomputed, and queue it if
        it fits.

        If its largest stage needs more memory than the smallest plan so far, the other stages are
        not measured.
        """
        # An estimate has dropped the candidate, so that only a dry run can tell.
        measured = replace(queued, trust_estimate=False)
        search = self.recompute_cache.search(measured, depth, self.limit or 0)
        if search.can_fit:
            # Its own step is the only bound that a dropped candidate has.
            self.add(0.0, replace(queued, recompute_search=search), queued.candidate.seconds)
        elif self._is_below_smallest_measured_peak(search.largest_stage.peak):
            self._record_smallest_peak(search.fully_recomputed, queued.attempt)

    def _split_candidate_by_depth(self, queued: QueuedCandidate) -> Iterator[QueuedCandidate]:
        """Yield an entry for each depth of the module tree, with a lower bound on the candidate's
        memory if all modules of that depth are recomputed."""
        recompute_levels = self.recompute_cache.recompute_levels(queued.candidate)
        for depth in (depth for depths in recompute_levels.depths for depth in depths):
            min_memory = max(recompute_levels.min_memory(depth, queued.min_memory))
            yield replace(queued, block_depth=depth, min_recomputed_memory=min_memory)
