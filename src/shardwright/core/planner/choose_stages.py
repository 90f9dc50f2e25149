"""Choice of the number of pipeline stages and the schedule."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

from shardwright.core.partition.decisions import OptimizerParallel
from shardwright.core.partition.pipeline_spec import AUTO, PipelineSpec
from shardwright.core.partition.schedules import SCHEDULES
from shardwright.core.plan.ranked import LeftOut
from shardwright.core.planner.candidate import Candidate, Decide
from shardwright.core.planner.fit_memory import StageOptions, fastest_within_memory
from shardwright.core.planner.options import PlanOptions
from shardwright.core.planner.ranking import Ranking, requested_kind
from shardwright.errors import PlanError, PlanInterrupted, StrategyError, one_line
from shardwright.progress import nested_progress

log = logging.getLogger("shardwright.search")


def with_best_stages(
    options: PlanOptions,
    decide: Decide,
    best: Candidate | None = None,
    ranking: Ranking | None = None,
) -> Candidate:
    """Return the fastest candidate that fits into memory, over all numbers of stages that divide
    the devices, are at most the number of micro-batches and can run with the schedule; and over all
    schedules with `schedule="auto"`.

    Each number of stages has its own operator strategies, and its stages are balanced by time. All
    are fitted into memory in a single best-first search, in which the step time without a memory
    limit is the lower bound of each.

    Args:
        best: fastest candidate with its number of stages and schedule, if that is known already.
        ranking: receives the fastest candidate of each kind; see `fastest_within_memory`.

    Raises:
        MemoryLimitError: no number of stages fits; the error of the number that needs least.
        PlanError, StrategyError: the model cannot be planned with any number of stages.
    """
    bounded_options: list[StageOptions] = []
    errors: list[PlanError | StrategyError] = []
    all_options = list(_with_stages(options))
    open_options = [each for each in all_options if best is None or not _is_planned(each, best)]
    numbers = sorted({_fixed_stages(each) for each in all_options})
    log.info("searching pipeline stages in 1 … %d: %s", max_stages(options), numbers)
    # First one search for each, without fitting it into memory: a lower bound of its step time.
    for number, with_stages in enumerate(open_options):
        report = nested_progress(options.on_progress, "", number, len(open_options))
        try:
            decided_candidates = decide(replace(_fastest_options(with_stages), on_progress=report))
            min_seconds = min(candidate.aligned.seconds for candidate in decided_candidates)
        except (PlanError, StrategyError) as error:
            errors.append(error)
            log.info("%s: %s", _stages_text(with_stages), error)
            if ranking is not None:
                ranking.leave_out(requested_kind(with_stages), LeftOut.because(one_line(error)))
            continue
        bounded_options.append(StageOptions(with_stages, min_seconds))
        log.info(
            "%s: at least %.4g s per step",
            _stages_text(with_stages),
            bounded_options[-1].min_seconds,
        )
    if not bounded_options and best is None:
        raise errors[0]
    below = float("inf") if best is None else best.seconds
    fastest = (
        fastest_within_memory(bounded_options, decide, below, ranking) if bounded_options else None
    ) or best
    assert fastest is not None
    log.info("%s: %.4g s per step", _stages_text(fastest.options), fastest.seconds)
    return fastest


def _with_stages(options: PlanOptions) -> Iterator[PlanOptions]:
    """Options with each number of stages and each schedule to try."""
    has_schedule = options.schedule != AUTO
    for schedule in (options.schedule,) if has_schedule else SCHEDULES:
        scheduled = replace(options, schedule=schedule)
        for stages in stage_counts(scheduled):
            # A single stage is the same with every schedule, so it is tried with the first only.
            if stages > 1 or has_schedule or schedule == next(iter(SCHEDULES)):
                yield replace(scheduled, stages=stages)


def _is_planned(options: PlanOptions, best: Candidate) -> bool:
    """Whether `best` has the stages and the schedule of `options`."""
    pipeline = best.pipeline
    return (options.stages, options.schedule) == (pipeline.stages, pipeline.schedule)


def _fixed_stages(options: PlanOptions) -> int:
    assert isinstance(options.stages, int)
    return options.stages


def _stages_text(options: PlanOptions) -> str:
    schedule = "" if options.schedule == "1f1b" or options.stages == 1 else f", {options.schedule}"
    return f"{options.stages} stages{schedule}"


def _fastest_options(options: PlanOptions) -> PlanOptions:
    """Options whose step time is a lower bound under any memory limit."""
    # All changes that save memory slow a step down, except sharding the optimizer: each device then
    # updates fewer parameters. So that one is made here.
    coefficient = options.mem_coeffs[0] if options.has_auto_mem_coeff else options.mem_coeff
    sharding = options.sharding or OptimizerParallel()
    return replace(options, mem_coeff=coefficient, hsdp=sharding)


def stage_counts(options: PlanOptions) -> Iterator[int]:
    """Numbers of stages to try with the schedule; only the requested one unless it is 'auto'."""
    if isinstance(options.stages, int):
        yield options.stages
        return
    for stages in range(1, max_stages(options) + 1):
        pipeline = PipelineSpec(stages, options.num_micro_batches, options.schedule)
        if options.devices % stages == 0 and (
            stages == 1 or pipeline.can_run(options.num_micro_batches)
        ):
            yield stages


def max_stages(options: PlanOptions) -> int:
    """Largest number of stages to try."""
    return min(options.devices, options.num_micro_batches, options.max_stages or options.devices)


def suggest_stages(options: PlanOptions, chosen: Candidate, decide: Decide) -> None:
    """Warn if another number of stages is predicted to be faster than the requested one. Has no
    effect without a cluster."""
    if options.cluster is None:
        log.info("suggest_stages has no effect without a cluster")
        return
    auto_options = replace(options, stages=AUTO)
    try:
        best = with_best_stages(auto_options, decide, chosen)
    except KeyboardInterrupt:
        raise PlanInterrupted(chosen.plan) from None
    if best.pipeline.stages != chosen.pipeline.stages:
        log.warning(
            "on %s %d pipeline stages have the shortest predicted step time, %.4g s, of 1 to %d"
            " stages; %s are requested",
            auto_options.resolved_cluster.name,
            best.pipeline.stages,
            best.seconds,
            max_stages(options),
            chosen.pipeline.stages,
        )
