"""Find the fastest candidate that fits into the memory limit, by a best-first search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from math import inf

from shardwright.core.planner.attempts import attempt_phases
from shardwright.core.planner.candidate import Candidate, FindCandidates
from shardwright.core.planner.memory_search import MemorySearch
from shardwright.core.planner.options import PlanOptions
from shardwright.core.planner.ranking import Ranking
from shardwright.core.planner.stage_options import QueuedOptions, StageOptions
from shardwright.errors import PlanInterrupted


def candidate_within_memory(
    options: PlanOptions, find_candidates: FindCandidates, ranking: Ranking | None = None
) -> Candidate:
    """Return a candidate that fits into the memory limit, with `options` changed where necessary.

    Without a cluster the result is the first candidate that fits, as requested or after these
    changes, each on top of the earlier ones: ZeRO `level1` to `level3`, recomputation, a larger
    `mem_coeff`, more stages. With `recompute="auto"`, recomputation comes first.

    On a cluster the number of stages is fixed. The result is the fastest candidate that fits, over
    all ZeRO levels and values of `mem_coeff`, each with the recomputation that it needs; so a lower
    limit never gives a faster plan. `mem_coeff="auto"` takes the smallest value with which the plan
    fits without other changes; if no value does, changes start from the smallest value.

    Args:
        find_candidates: function that searches with given options and returns candidates.
        ranking: records the fastest candidate of each kind of plan; see `fastest_within_memory`.

    Raises:
        MemoryLimitError: if no plan fits; contains the smallest memory limit with which a plan
            fits.
    """
    candidate = fastest_within_memory([StageOptions(options)], find_candidates, ranking=ranking)
    assert candidate is not None
    return candidate


def fastest_within_memory(
    stage_options: Sequence[StageOptions],
    find_candidates: FindCandidates,
    below: float = float("inf"),
    ranking: Ranking | None = None,
) -> Candidate | None:
    """Return the fastest candidate that fits, over several numbers of stages and schedules.

    Args:
        find_candidates: function that searches with given options and returns candidates.
        below: upper limit of the step time of the result in seconds, exclusive.
        ranking: records the fastest candidate of each kind of plan until there are enough kinds,
            and the reasons why other kinds have no candidate.

    Returns:
        None if no candidate with a step time below `below` fits.

    Raises:
        MemoryLimitError: if `below` is infinite and no plan fits; contains the smallest memory
            limit with which a plan fits.
        PlanInterrupted: on Ctrl-C, if a candidate is already known to fit.
    """
    # Several numbers of stages: those with which the model cannot be planned raise no error.
    search = MemorySearch(stage_options[0].options.limit, find_candidates, len(stage_options) == 1)
    try:
        return _run_search_phases(search, stage_options, below, ranking)
    except KeyboardInterrupt:
        fitting = search.fitting_candidates()
        if not fitting:
            raise
        best = min(fitting, key=lambda candidate: candidate.seconds)
        raise PlanInterrupted(best.plan, best) from None


def _run_search_phases(
    search: MemorySearch,
    stage_options: Sequence[StageOptions],
    below: float,
    ranking: Ranking | None,
) -> Candidate | None:
    on_progress = search.count_attempts(stage_options[0].options.on_progress)
    phases_by_stages = [
        attempt_phases(replace(each.options, on_progress=on_progress)) for each in stage_options
    ]
    search.num_attempts = sum(
        len(group) for phases in phases_by_stages for groups in phases for group in groups
    )
    for each in stage_options:
        if each.relaxed_options is not None:
            each.relaxed_options = replace(each.relaxed_options, on_progress=on_progress)
    # Phase by phase, so that all numbers of stages compete in each phase.
    for phase in zip_longest(*phases_by_stages, fillvalue=()):
        for each, groups in zip(stage_options, phase, strict=True):
            # Infinite where the model cannot be planned with these stages.
            if groups and each.min_seconds < inf:
                search.add(each.min_seconds, QueuedOptions(each, groups))
        fitted = search.run(below)
        if fitted is not None and ranking is not None:
            search.rank(fitted, ranking)
        # A queue that is not empty has only bounds of at least `below`, so no later phase matters.
        if fitted is not None or search.queue:
            return fitted
    # With a finite `below` the caller has a plan already, so that no error is needed.
    if below < float("inf"):
        return None
    # Nothing fits: first postponed options, then candidates that estimates have ruled out.
    fitted = search.run(below) if search.resume_postponed() else None
    if fitted is None:
        search.measure_dropped()
        fitted = search.run(below)
    if fitted is not None and ranking is not None:
        search.rank(fitted, ranking)
    if fitted is not None or search.queue:
        return fitted
    raise search.error()
