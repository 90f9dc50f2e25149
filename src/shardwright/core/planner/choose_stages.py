"""The number of pipeline stages and their schedule, chosen."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

from shardwright.core.partition.decisions import OptimizerParallel
from shardwright.core.partition.pipeline_spec import AUTO, PipelineSpec
from shardwright.core.partition.schedules import SCHEDULES
from shardwright.core.plan.ranked import LeftOut
from shardwright.core.planner.candidate import Candidate, Decide
from shardwright.core.planner.fit_memory import Way, fastest_within_memory
from shardwright.core.planner.options import PlanOptions
from shardwright.core.planner.ranking import Ranking, requested_kind
from shardwright.errors import PlanError, PlanInterrupted, StrategyError
from shardwright.progress import nested_progress

log = logging.getLogger("shardwright.search")


def with_best_stages(
    options: PlanOptions,
    decide: Decide,
    best: Candidate | None = None,
    ranking: Ranking | None = None,
) -> Candidate:
    """The candidate whose step takes the least time, over all numbers of stages that divide the
    devices, are not more than the micro-batches, and that the schedule can run; and over all
    schedules, where that is to be chosen.

    Each way is planned by itself, with operator strategies of its own, and its stages are
    balanced by time. What does not fit into the memory limit does not count. All numbers are
    fitted into memory in one search, each from when the time that it would take if memory did not
    matter is less than that of what is known to fit.

    Args:
        best: what is known already, as the fastest with its stages and schedule.
        ranking: as `fastest_within_memory`.

    Raises:
        MemoryLimitError: if no number fits; the one that needs least says so.
        PlanError, StrategyError: if the model can be planned with no number of stages.
    """
    ways: list[Way] = []
    errors: list[PlanError | StrategyError] = []
    every = list(_ways(options))
    asked = [way for way in every if best is None or not _is_way_of(way, best)]
    numbers = sorted({_stages(way) for way in every})
    log.info("searching pipeline stages in 1 … %d: %s", max_stages(options), numbers)
    for number, way in enumerate(asked):
        report = nested_progress(options.on_progress, "", number, len(asked))
        try:
            decided = decide(replace(_free_of_limits(way), on_progress=report))
            bound = min(candidate.aligned.seconds for candidate in decided)
        except (PlanError, StrategyError) as error:
            errors.append(error)
            log.info("%s: %s", _named(way), error)
            if ranking is not None:
                ranking.leave_out(requested_kind(way), LeftOut.because(str(error)))
            continue
        ways.append(Way(way, bound))
        log.info("%s: at least %.4g s per step", _named(way), ways[-1].bound)
    if not ways and best is None:
        raise errors[0]
    below = float("inf") if best is None else best.seconds
    found = (fastest_within_memory(ways, decide, below, ranking) if ways else None) or best
    assert found is not None
    log.info("%s: %.4g s per step", _named(found.options), found.seconds)
    return found


def _ways(options: PlanOptions) -> Iterator[PlanOptions]:
    """Every number of stages with every schedule that is to be tried."""
    named = options.schedule != AUTO
    for schedule in (options.schedule,) if named else SCHEDULES:
        scheduled = replace(options, schedule=schedule)
        for stages in stage_counts(scheduled):
            if stages > 1 or named or schedule == next(iter(SCHEDULES)):
                yield replace(scheduled, stages=stages)


def _is_way_of(way: PlanOptions, best: Candidate) -> bool:
    pipeline = best.pipeline
    return (way.stages, way.schedule) == (pipeline.stages, pipeline.schedule)


def _stages(way: PlanOptions) -> int:
    assert isinstance(way.stages, int)
    return way.stages


def _named(way: PlanOptions) -> str:
    schedule = "" if way.schedule == "1f1b" or way.stages == 1 else f", {way.schedule}"
    return f"{way.stages} stages{schedule}"


def _free_of_limits(options: PlanOptions) -> PlanOptions:
    """Options with which a step takes the least time: what makes a plan fit only adds to it, but
    for sharing the optimizer's work."""
    coefficient = options.mem_coeffs[0] if options.has_auto_mem_coeff else options.mem_coeff
    sharding = options.sharding or OptimizerParallel()
    return replace(options, mem_coeff=coefficient, hsdp=sharding)


def stage_counts(options: PlanOptions) -> Iterator[int]:
    """The numbers of stages that are tried with the schedule; the requested one, if there is."""
    if isinstance(options.stages, int):
        yield options.stages
        return
    for stages in range(1, max_stages(options) + 1):
        fits = PipelineSpec(stages, options.num_micro_batches, options.schedule)
        if options.devices % stages == 0 and (
            stages == 1 or fits.can_run(options.num_micro_batches)
        ):
            yield stages


def max_stages(options: PlanOptions) -> int:
    """Up to how many stages there can be."""
    return min(options.devices, options.num_micro_batches, options.max_stages or options.devices)


def suggest_stages(options: PlanOptions, chosen: Candidate, decide: Decide) -> None:
    """Logs which number of stages would be chosen where the user's runs, if a cluster was named."""
    if options.cluster is None:
        log.info("suggest_stages has no effect without a cluster")
        return
    searched = replace(options, stages=AUTO)
    try:
        best = with_best_stages(searched, decide, chosen)
    except KeyboardInterrupt:
        raise PlanInterrupted(chosen.plan) from None
    if best.pipeline.stages != chosen.pipeline.stages:
        log.warning(
            "on %s %d pipeline stages have the shortest predicted step time, %.4g s, of 1 to %d"
            " stages; %s are requested",
            searched.known_cluster.name,
            best.pipeline.stages,
            best.seconds,
            max_stages(options),
            chosen.pipeline.stages,
        )
