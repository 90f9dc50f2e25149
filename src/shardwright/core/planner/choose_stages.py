"""Choose the number of pipeline stages and the schedule with the shortest predicted step time."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from shardwright.core.partition.decisions import OptimizerParallel
from shardwright.core.partition.pipeline_spec import AUTO
from shardwright.core.partition.schedules import SCHEDULES
from shardwright.core.planner.candidate import Candidate, FindCandidates
from shardwright.core.planner.fit_memory import fastest_within_memory
from shardwright.core.planner.options import PlanOptions
from shardwright.core.planner.ranking import Ranking
from shardwright.core.planner.sharding_overhead import ShardingOverheads
from shardwright.core.planner.stage_options import StageOptions
from shardwright.core.planner.step_bound import ShardingOverhead, StepBounds
from shardwright.errors import PlanInterrupted

log = logging.getLogger("shardwright.search")


def fastest_over_stages(
    requested: Sequence[PlanOptions],
    find_candidates: FindCandidates,
    bounds: StepBounds | None = None,
    best: Candidate | None = None,
    ranking: Ranking | None = None,
) -> Candidate:
    """Return the fastest candidate that fits into memory, over numbers of micro-batches and of
    stages, and over schedules.

    A number of stages must divide the number of devices, be at most the number of micro-batches,
    and be possible with the schedule. Several schedules are tried only with `schedule="auto"`. Each
    number of stages has its own search for the sharding, and its stages are balanced by time.

    One best-first search under the memory limit covers all combinations. The lower bound on the
    step time of a combination is its computation at first, then includes the recomputation that
    memory requires, then becomes the step time without a memory limit.

    Args:
        requested: options for each number of micro-batches, which differ in this number only.
        find_candidates: function that searches with given options and returns candidates.
        bounds: lower bounds on step times; None for no bounds.
        best: fastest candidate of one combination of stages and schedule, which is then not
            searched again; None to search all combinations.
        ranking: records the fastest candidate of each kind of plan; see `fastest_within_memory`.

    Raises:
        MemoryLimitError: if no plan with any number of stages fits; contains the smallest memory
            limit with which a plan fits.
        PlanError, StrategyError: if the model cannot be planned with any number of stages.
    """
    all_options = [
        each for options in requested for each in _options_by_schedule_and_stages(options)
    ]
    searched = [
        each for each in all_options if best is None or not _has_requested_stages(best, each)
    ]
    stage_options = _build_stage_options(searched, find_candidates, bounds)
    if len(stage_options) == 1:
        # Nothing to compare the bound with.
        stage_options[0].relaxed_options = None
    log.info(
        "searching stages in %s with micro-batches in %s",
        sorted({_fixed_num_stages(each) for each in all_options}),
        [options.num_micro_batches for options in requested],
    )
    # Candidates slower than `best` are not needed.
    below = float("inf") if best is None else best.seconds
    # If no combination is left, `best` has the only one.
    fastest = best
    if stage_options:
        fastest = fastest_within_memory(stage_options, find_candidates, below, ranking) or best
    assert fastest is not None
    log.info("%s: %.4g s per step", fastest.options.describe(), fastest.seconds)
    return fastest


def _build_stage_options(
    all_options: Sequence[PlanOptions], find_candidates: FindCandidates, bounds: StepBounds | None
) -> list[StageOptions]:
    relaxed = [_relax_options_for_lower_bound(options) for options in all_options]
    if bounds is None:
        return [
            StageOptions(options, relaxed_options=each)
            for options, each in zip(all_options, relaxed, strict=True)
        ]
    overheads = ShardingOverheads(filter(None, relaxed), find_candidates, bounds)

    def balanced_bound(options: PlanOptions) -> float:
        return bounds.balanced_seconds(options, overheads.of(options))

    def stage_recompute(
        candidate: Candidate, stage_memory: Sequence[int] | None, counts_overhead: bool
    ) -> Sequence[float]:
        overhead = overheads.of_candidate(candidate) if counts_overhead else ShardingOverhead()
        return bounds.stage_recompute_seconds(
            candidate.options, candidate.pipeline, overhead, stage_memory
        )

    return [
        StageOptions(
            options,
            bounds.min_seconds(options),
            each,
            balanced_bound=partial(balanced_bound, options),
            stage_recompute=stage_recompute if options.limit is not None else None,
        )
        for options, each in zip(all_options, relaxed, strict=True)
    ]


def _options_by_schedule_and_stages(options: PlanOptions) -> Iterator[PlanOptions]:
    """Yield `options` with each combination of a schedule and a number of stages to try."""
    # `SCHEDULES` has the default first, with which a single stage is tried.
    has_schedule = options.schedule != AUTO
    for schedule in (options.schedule,) if has_schedule else SCHEDULES:
        scheduled = replace(options, schedule=schedule)
        for stages in stage_counts(scheduled):
            # A single stage is the same with every schedule, so it is tried with one schedule only.
            if stages > 1 or has_schedule or schedule == next(iter(SCHEDULES)):
                yield replace(scheduled, stages=stages)


def _has_requested_stages(candidate: Candidate, options: PlanOptions) -> bool:
    """Whether a candidate has the number of stages and the schedule of `options`."""
    pipeline = candidate.pipeline
    return (options.stages, options.schedule) == (pipeline.stages, pipeline.schedule)


def _fixed_num_stages(options: PlanOptions) -> int:
    assert isinstance(options.stages, int)
    return options.stages


def _relax_options_for_lower_bound(options: PlanOptions) -> PlanOptions | None:
    """Return `options` with the smallest `mem_coeff` and the optimizer state sharded, the fastest
    choices.

    The step time of their plan without a limit is a lower bound under any memory limit. Returns
    None without a limit, as computing the bound would take as long as the search itself.
    """
    if options.limit is None:
        return None
    # All changes that save memory slow a step down, except sharding the optimizer state, with which
    # each device updates fewer parameters. So the optimizer state is sharded here.
    coefficient = options.mem_coeffs[0] if options.has_auto_mem_coeff else options.mem_coeff
    sharding = options.sharding or OptimizerParallel()
    return replace(options, mem_coeff=coefficient, hsdp=sharding)


def stage_counts(options: PlanOptions) -> Iterator[int]:
    """Yield the numbers of stages to try with the schedule of `options`: the requested number, or
    all that are valid if `stages` is 'auto'."""
    if isinstance(options.stages, int):
        yield options.stages
        return
    schedule, count = SCHEDULES[options.schedule], options.num_micro_batches
    for stages in range(1, max_stages(options) + 1):
        can_run = count >= schedule.min_micro_batches(stages) and schedule.can_run(count, stages)
        # A single stage runs without a schedule.
        if options.devices % stages == 0 and (stages == 1 or can_run):
            yield stages


def max_stages(options: PlanOptions) -> int:
    """Return the largest number of pipeline stages that the planner tries."""
    # With fewer micro-batches than stages, some stage is always idle.
    return min(options.devices, options.num_micro_batches, options.max_stages or options.devices)


def suggest_stages(
    options: PlanOptions, chosen: Candidate, find_candidates: FindCandidates
) -> None:
    """Warn if another number of stages is predicted to be faster than the requested number.

    Without a cluster no step time is predicted, so that there is no warning.

    Args:
        chosen: best candidate with the requested number of stages.
        find_candidates: function that searches with given options and returns candidates.
    """
    if options.cluster is None:
        log.info("`suggest_stages` has no effect without a cluster: name one with `cluster`")
        return
    searched = replace(options, stages=AUTO)
    try:
        best = fastest_over_stages([searched], find_candidates, best=chosen)
    except KeyboardInterrupt:
        # Only the comparison was stopped; the requested plan is complete.
        raise PlanInterrupted(chosen.plan) from None
    if best.pipeline.stages != chosen.pipeline.stages:
        log.warning(
            "on cluster %s %d pipeline stages have the shortest predicted step time of 1 to %d"
            " stages, %.4g s; %s are requested",
            searched.resolved_cluster.name,
            best.pipeline.stages,
            max_stages(options),
            best.seconds,
            chosen.pipeline.stages,
        )
