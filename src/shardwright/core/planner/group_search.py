"""Search options in the queue for candidates, group by group of equal `mem_coeff`.

A group has one attempt without ZeRO and one for each ZeRO level. A larger `mem_coeff` saves
parameter memory and makes steps slower, so the step times of earlier groups give a lower bound for
the next group. Cuts that an earlier group has tried are skipped.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import inf

from shardwright.core.cost.memory_bounds import memory_lower_bounds
from shardwright.core.planner.attempts import Attempt
from shardwright.core.planner.candidate import Candidate
from shardwright.core.planner.candidate_bound import CandidateBound, min_simulated
from shardwright.core.planner.captured_model import SharedCuts
from shardwright.core.planner.queued_candidate import (
    QueuedCandidate,
)
from shardwright.core.planner.ranking import requested_kind
from shardwright.core.planner.search_queue import SearchQueue
from shardwright.core.planner.stage_options import LowestSeconds, QueuedOptions, StageOptions
from shardwright.core.planner.step_bound import SIMILAR_BOUND
from shardwright.errors import PlanError, StrategyError

log = logging.getLogger("shardwright.search")

MIN_INCREASE_RATIO = 2.0
"""Assumed minimum ratio between the increases of the step time by two consecutive steps of
`mem_coeff`, each a factor of 8.

A search pays `mem_coeff` seconds for each unit of parameter memory that it saves. The ratio is 2 if
the second step saves a fourth of the memory that the first saved, at 8 times the price per unit. A
step that saves less hardly makes the plan smaller.
"""

UNSHARDED_BOUND = 0.99
"""Assumed lower bound on the step time without ZeRO, as a fraction of the step time that is
predicted, also without ZeRO, for the cuts of the first ZeRO level."""


def next_mem_coeff_bound(lowest: float, previous: float) -> float:
    """Return an assumed lower bound in seconds on the step time with the next larger `mem_coeff`.

    Args:
        lowest: fastest step time with the current `mem_coeff`; infinite if it is unknown.
        previous: fastest step time with the next smaller `mem_coeff`; infinite if it is unknown.
    """
    if lowest == inf:
        return 0.0
    increase = lowest - previous if previous < lowest else 0.0
    return SIMILAR_BOUND * (lowest + MIN_INCREASE_RATIO * increase)


class GroupSearch(SearchQueue):
    """The part of the search that turns options into candidates."""

    def _examine_options(self, bound: float, queued: QueuedOptions) -> None:
        """Tighten the lower bound of queued options, or search them; each call costs more than the
        one before.

        The first call balances the stages and adds the recomputation that memory requires, the
        second searches without a memory limit, the third simulates the pipeline of this search. The
        last call searches the first group of attempts, or postpones the options if they need too
        much memory.

        Args:
            bound: lower bound in seconds on the step time of all attempts.
        """
        stage_options = queued.stage_options
        # From the cheapest look to the most expensive: a formula, a search for a bound, all
        # attempts.
        if not stage_options.was_balanced:
            stage_options.balance_stages()
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

        A higher ZeRO level only adds communication. So higher levels are queued again as one entry,
        and the other groups as another entry.

        Args:
            bound: lower bound in seconds on the step time of all attempts.
        """
        stage_options, groups = queued.stage_options, queued.groups
        attempts, lowest, may_fit = list(groups[0]), LowestSeconds(), False
        # In a group that was begun before, the attempt without ZeRO has been queued or searched.
        if not queued.continues_group:
            attempts = self._queue_attempt_without_zero(bound, queued, attempts, lowest)
        has_sharded, sharded_cuts = False, queued.earlier_cuts
        while attempts and not may_fit:
            attempt = attempts.pop(0)
            # Up to the lowest level, as higher levels are slower.
            entries, new_cuts = self._search_attempt(
                bound, queued, attempt, None if has_sharded else lowest
            )
            if attempt.options.sharding is not None:
                has_sharded, sharded_cuts = True, (*sharded_cuts, *(new_cuts or ()))
                # No new cuts: the earlier groups that found them have queued their higher levels.
                if new_cuts == ():
                    attempts.clear()
            # Not before a ZeRO level: sharding the optimizer state can make the step faster too.
            may_fit = bool(entries and has_sharded)
        level_bound = bound if lowest.of_group == inf else max(bound, lowest.of_group)
        log.debug(
            "%s, %s: at least %.4g s per step",
            *(stage_options.options.describe_pipeline(), groups[0][0], level_bound),
        )
        # The attempts that are left are higher levels, none of which is faster than the lowest.
        if attempts:
            self.add(level_bound, replace(queued, groups=[attempts], continues_group=True))
        if len(groups) > 1 and not queued.continues_group:
            # Searched only if no candidate that is clearly faster fits.
            next_bound = next_mem_coeff_bound(lowest.searched, queued.previous_lowest)
            remaining = replace(
                queued,
                groups=groups[1:],
                previous_lowest=lowest.searched,
                earlier_cuts=sharded_cuts,
            )
            self.add(max(bound, next_bound), remaining)

    def _search_attempt(
        self, bound: float, queued: QueuedOptions, attempt: Attempt, lowest: LowestSeconds | None
    ) -> tuple[list[QueuedCandidate], tuple[SharedCuts, ...] | None]:
        """Search an attempt, and queue its candidates that may fit and are new.

        Args:
            bound: lower bound in seconds on the step time of all attempts.
            lowest: lowest step times of the group, updated with those of the attempt; None if they
                are not needed.

        Returns:
            The queued candidates; and all cuts that no earlier group has tried, or None if the
            model cannot be planned with these options.
        """
        stage_options, num_dropped = queued.stage_options, len(self.dropped)
        entries: list[QueuedCandidate] = []
        repeated: Sequence[Candidate] = ()
        new_cuts: tuple[SharedCuts, ...] | None = None
        self.num_searched += 1
        # Dividing the model into stages may turn out to be impossible.
        with self._record_planning_errors(attempt):
            all_candidates = self.find_candidates(attempt.options)
            # Without ZeRO the search is another one, which may find cuts of earlier groups.
            is_sharded = attempt.options.sharding is not None
            new_candidates = (
                queued.without_earlier_cuts(all_candidates) if is_sharded else all_candidates
            )
            new_cuts = tuple(each.cuts for each in new_candidates)
            new_ids = set(map(id, new_candidates))
            repeated = [each for each in all_candidates if id(each) not in new_ids]
            entries.extend(self._make_queue_entries(new_candidates, attempt))
        for each in entries:
            seconds = self._bound_of(each.candidate, stage_options, each.min_memory)
            self.add(bound, replace(each, pending_bound=seconds), seconds.unsimulated)
        if lowest is not None:
            new_entries = *entries, *self.dropped[num_dropped:]
            lowest.lower([self._bound_of(each.candidate, stage_options) for each in new_entries])
            # Where the search found earlier cuts again, the last group says how fast they are.
            if any(not each.is_baseline for each in repeated):
                lowest.searched = min(lowest.searched, queued.previous_lowest)
        stage_options.may_fit = stage_options.may_fit or bool(entries)
        # ZeRO-3 over all replicas needs the least memory: what is too large here fits at no level.
        if attempt.options.shards_all and new_cuts:
            stage_options.is_too_large = len(self.dropped) > num_dropped
        return entries, new_cuts

    def _bound_of(
        self,
        candidate: Candidate,
        stage_options: StageOptions,
        min_memory: Sequence[int] | None = None,
        counts_overhead: bool = True,
    ) -> CandidateBound:
        """Return a lower bound on the step time of `candidate` with the recomputation that the
        memory limit requires.

        Args:
            min_memory: minimum bytes per device of each stage, without activations; by default the
                minimum over all plans with `stage_options`.
            counts_overhead: whether to count the overhead of the candidate's sharding; otherwise
                the bound holds with all activations sharded over all devices of their stage.
        """
        # Without a cluster no seconds are predicted, and the order of the phases decides.
        needed = [0.0] * candidate.pipeline.stages
        if stage_options.stage_recompute is not None:
            needed = [*stage_options.stage_recompute(candidate, min_memory, counts_overhead)]
        return CandidateBound(candidate, needed)

    def _queue_attempt_without_zero(
        self, bound: float, queued: QueuedOptions, attempts: list[Attempt], lowest: LowestSeconds
    ) -> list[Attempt]:
        """Queue the attempt without ZeRO on its own, and return the attempts with ZeRO.

        The attempt is postponed if no candidate of the first ZeRO level may fit, since a device
        stores at least as much without ZeRO. Otherwise its lower bound is the step time of the
        first level's cuts without ZeRO, so that it is searched only if nothing faster fits. Returns
        `attempts` unchanged if ZeRO makes no difference.

        Args:
            bound: lower bound in seconds on the step time of all attempts.
            lowest: lowest step times of the group, updated with those without ZeRO.
        """
        stage_options, (first, *sharded) = queued.stage_options, attempts
        # Nothing to separate: every plan fits, the user requested ZeRO, or no level of it is tried.
        if self.limit is None or first.options.sharding is not None or not sharded:
            return attempts
        try:
            # The model caches the search, so the attempt itself gets this result without searching
            # again.
            candidates = self.find_candidates(sharded[0].options)
        except (PlanError, StrategyError):
            # Recorded when the attempts themselves are searched.
            return attempts
        # Where ZeRO shards nothing, the attempt without it goes first, as it needs no change.
        if not any(each.shards_storage for each in candidates):
            return attempts
        # The first group has queued a baseline without ZeRO.
        candidates = [each for each in candidates if not (each.is_baseline and queued.earlier_cuts)]
        optimizer = first.options.optimizer
        memory = [memory_lower_bounds(each.partitioned, optimizer) for each in candidates]
        # Of each candidate the largest stage, of all candidates the smallest.
        needed = min(map(max, memory))
        if needed <= self.limit:
            unsharded = [each.with_sharding_of(first.options) for each in candidates]
            lowest.lower([self._bound_of(each, stage_options) for each in unsharded])
            # Only candidates whose least memory is within the limit; the others cannot fit.
            lowest_that_fits = min_simulated(
                self._bound_of(each, stage_options, stages)
                for each, stages in zip(unsharded, memory, strict=True)
                if max(stages) <= self.limit
            )
            without_zero = QueuedOptions(stage_options, [[first]], continues_group=True)
            self.add(bound, without_zero, UNSHARDED_BOUND * lowest_that_fits)
            return sharded
        self.postponed.append(QueuedOptions(stage_options, [[first]]))
        plan_kind = requested_kind(first.options)
        lowest_memory = self.postponed_memory.get(plan_kind, needed)
        self.postponed_memory[plan_kind] = min(needed, lowest_memory)
        return sharded

    def _tighten_step_time_bound(self, stage_options: StageOptions) -> bool:
        """Raise `stage_options.min_seconds` to the step time without a memory limit plus the
        recomputation that every plan needs.

        Returns:
            False if the model cannot be planned with these options.
        """
        relaxed = stage_options.relaxed_options
        assert relaxed is not None
        # First without simulating the pipeline, which tells most options apart.
        simulates_pipeline = stage_options.was_relaxed or relaxed.stages == 1
        stage_options.was_relaxed = True
        if simulates_pipeline:
            stage_options.relaxed_options = None
        try:
            relaxed_candidates = self.find_candidates(relaxed)
            seconds, counts_overhead = self._bound_relaxed(relaxed_candidates, stage_options)
            if simulates_pipeline:
                seconds, _ = self._bound_relaxed(
                    relaxed_candidates, stage_options, [counts_overhead], simulates_pipeline
                )
        except (PlanError, StrategyError) as error:
            self.errors.append((relaxed, error))
            # Infinite, so that later phases do not add these options again.
            stage_options.min_seconds = inf
            return False
        stage_options.min_seconds = max(stage_options.min_seconds, seconds)
        log.info("%s: at least %.4g s per step", relaxed.describe_pipeline(), seconds)
        return True

    def _bound_relaxed(
        self,
        relaxed_candidates: Sequence[Candidate],
        stage_options: StageOptions,
        choices: Sequence[bool] = (False, True),
        simulates_pipeline: bool = False,
    ) -> tuple[float, bool]:
        """Return the largest lower bound in seconds that follows from plans without a memory limit,
        and whether it counts the overhead of their sharding.

        Args:
            choices: whether to count the overhead.
            simulates_pipeline: whether to simulate the passes of all stages.
        """
        bounds = []
        for counts_overhead in choices:
            # Other values of `mem_coeff` may give other overheads on activations.
            ratio = SIMILAR_BOUND if counts_overhead else 1.0
            candidate_bounds = [
                self._bound_of(each, stage_options, None, counts_overhead)
                for each in relaxed_candidates
            ]
            seconds = (
                min_simulated(candidate_bounds)
                if simulates_pipeline
                else min(each.unsimulated for each in candidate_bounds)
            )
            bounds.append((ratio * seconds, counts_overhead))
        return max(bounds)

    @contextmanager
    def _record_planning_errors(self, attempt: Attempt) -> Iterator[None]:
        """Context that records the error if the model cannot be planned with the options of
        `attempt`."""
        # Before any candidate the options are those that the user requested.
        is_first = not self.entry_keys
        try:
            yield
        except (PlanError, StrategyError) as error:
            if self.raises_first_error and is_first:
                raise
            self.errors.append((attempt.options, error))

    def _make_queue_entries(
        self, candidates: Iterable[Candidate], attempt: Attempt
    ) -> Iterator[QueuedCandidate]:
        """Yield entries for new candidates that may fit; record candidates that cannot fit."""
        for candidate in candidates:
            queued = self._make_queue_entry(candidate, attempt)
            if queued is None:
                continue
            if self._may_fit_in_memory(queued):
                yield queued
            else:
                self.dropped.append(queued)
