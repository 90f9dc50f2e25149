"""Find the best candidate for a captured model under a memory limit.

Numbers of stages and of micro-batches compete if the options leave them open.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

from shardwright.core.planner.candidate import Candidate, PlanTask, candidates
from shardwright.core.planner.choose_stages import fastest_over_stages, suggest_stages
from shardwright.core.planner.device_limit import candidate_within_device_memory
from shardwright.core.planner.fit_memory import candidate_within_memory
from shardwright.core.planner.options import PlanOptions
from shardwright.core.planner.ranking import Ranking
from shardwright.core.planner.recompute_bound import RecomputeOptions
from shardwright.core.planner.step_bound import StepBounds

GC_THRESHOLD = 20_000
"""Threshold of Python's garbage collector during a search: new objects per collection of the
youngest generation. A search creates millions of objects and hardly any cycles. The default
threshold spends a seventh of the search time on garbage collection."""


@contextmanager
def raised_gc_threshold() -> Iterator[None]:
    """Context in which Python's garbage collector runs at most once per `GC_THRESHOLD` objects."""
    before = gc.get_threshold()
    if before[0]:  # 0 means that the caller has disabled the collector.
        gc.set_threshold(max(GC_THRESHOLD, before[0]), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@raised_gc_threshold()
def best_candidate(tasks: Sequence[PlanTask], ranking: Ranking | None = None) -> Candidate:
    """Return the fastest candidate that fits into memory; without a cluster, the first that fits.

    Args:
        tasks: the model captured for one or more numbers of micro-batches, each with options that
            differ in this number only; several numbers require a cluster.
        ranking: records the fastest candidate of each `PlanKind`.

    Raises:
        StrategyError: if no operator can be sharded, or the requested stages are invalid.
        MemoryLimitError: if no plan fits; contains the smallest memory limit with which a plan
            fits.
    """
    models = {task.options.num_micro_batches: task.model for task in tasks}
    options = tasks[0].options

    def find_candidates(options: PlanOptions) -> Sequence[Candidate]:
        return candidates(models[options.num_micro_batches], options)

    # Numbers of micro-batches ascend, so the first graph has the largest micro-batch.
    largest = tasks[0].model

    @cache
    def recompute_options() -> RecomputeOptions:
        # The graphs of all numbers of micro-batches have the same blocks.
        return RecomputeOptions.of(largest.graph, largest.recompute)

    graphs = {count: model.graph for count, model in models.items()}
    bounds = StepBounds(graphs, recompute_options)

    def best_within_limit(limited: PlanOptions) -> Candidate:
        """Return the best candidate of all tasks that fits into `limited.memory_limit`."""
        limit = limited.memory_limit
        requested = [replace(task.options, memory_limit=limit) for task in tasks]
        if len(tasks) > 1 or options.chooses_pipeline:
            return fastest_over_stages(requested, find_candidates, bounds, ranking=ranking)
        return candidate_within_memory(requested[0], find_candidates, ranking)

    # Memory is that of a training step, which a model in eval mode does not run.
    is_trained = tasks[0].model.training
    candidate = (
        candidate_within_device_memory(options, best_within_limit)
        if is_trained
        else best_within_limit(options)
    )
    # With `auto` the best number of stages has been chosen already.
    if options.suggest_stages and not options.chooses_pipeline:
        chosen = candidate.options.num_micro_batches
        suggest_stages(replace(options, micro_batches=chosen), candidate, find_candidates)
    return candidate
