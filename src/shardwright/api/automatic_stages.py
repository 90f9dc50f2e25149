"""The number of pipeline stages, chosen."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

from shardwright.api.options import Options
from shardwright.errors import MemoryLimitError, ShardwrightError, StrategyError
from shardwright.pipelining import AUTO, Pipelining
from shardwright.plan import Plan

log = logging.getLogger("shardwright.search")

Decide = Callable[[Options], Plan]


def with_best_stages(options: Options, decide: Decide) -> Plan:
    """The plan whose step takes the least time, over all numbers of stages that divide the devices,
    are not more than the micro-batches, and that the schedule can run.

    Each is planned by itself, with operator strategies of its own, and its stages are balanced by
    time. What does not fit into the memory limit does not count.

    Raises:
        MemoryLimitError: if no number fits; the one that needs least says so.
        StrategyError: if the model can be planned with no number of stages.
    """
    found: list[Plan] = []
    failed: list[ShardwrightError] = []
    numbers = list(candidates(options))
    log.info("pipeline stages are searched in 1 … %d: %s", most_stages(options), numbers)
    for stages in numbers:
        try:
            plan = decide(replace(options, asked=replace(options.asked, stages=stages)))
        except (MemoryLimitError, StrategyError) as error:
            failed.append(error)
            log.info("%d stages: %s", stages, error)
            continue
        assert plan.step is not None
        log.info(
            "%d stages: %.4g s a step, %.1f%% of it in bubbles",
            stages,
            plan.step.seconds,
            100 * plan.step.bubble,
        )
        found.append(plan)
    if found:
        return min(found, key=lambda plan: (plan.step_time or 0.0, plan.pipeline.stages))
    too_large = [error for error in failed if isinstance(error, MemoryLimitError)]
    raise min(too_large, key=lambda error: error.needed) if too_large else failed[0]


def candidates(options: Options) -> Iterator[int]:
    """The numbers of stages that are tried."""
    asked = options.asked
    for stages in range(1, most_stages(options) + 1):
        fits = Pipelining(stages, asked.micro_batches, asked.schedule)
        if options.devices % stages == 0 and (stages == 1 or fits.can_run(asked.micro_batches)):
            yield stages


def most_stages(options: Options) -> int:
    """Up to how many stages there can be."""
    asked = options.asked
    return min(options.devices, asked.micro_batches, asked.max_stages or options.devices)


def suggest_stages(options: Options, decide: Decide) -> None:
    """Logs which number of stages would be chosen where the user's runs."""
    searched = replace(options, asked=replace(options.asked, stages=AUTO))
    best = with_best_stages(searched, decide)
    chosen = best.pipeline.stages
    if chosen != options.asked.stages:
        log.warning(
            "%d pipeline stages would take %.4g s a step on %s by the prediction, of 1 … %d that"
            " were searched; %s are asked for",
            chosen,
            best.step_time,
            searched.on.name,
            most_stages(options),
            options.asked.stages,
        )
