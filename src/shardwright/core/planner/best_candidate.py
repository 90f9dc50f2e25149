"""Find the best candidate for a captured model, over numbers of stages and under a memory limit."""

from __future__ import annotations

from collections.abc import Sequence

from shardwright.core.planner.candidate import Candidate, CapturedModel, candidates
from shardwright.core.planner.choose_stages import suggest_stages, with_best_stages
from shardwright.core.planner.device_limit import within_device_memory
from shardwright.core.planner.fit_memory import within_memory
from shardwright.core.planner.options import PlanOptions
from shardwright.core.planner.ranking import Ranking


def best_candidate(
    model: CapturedModel, options: PlanOptions, ranking: Ranking | None = None
) -> Candidate:
    """Return the fastest candidate that fits into memory; without a cluster, the first that fits.

    Args:
        ranking: records the fastest candidate of each kind of plan.

    Raises:
        StrategyError: if no operator can be sharded, or the requested stages are invalid.
        MemoryLimitError: if no plan fits; contains the smallest memory limit with which a plan
            fits.
    """

    def decide(options: PlanOptions) -> Sequence[Candidate]:
        return candidates(model, options)

    def best(options: PlanOptions) -> Candidate:
        if options.chooses_pipeline:
            return with_best_stages(options, decide, ranking=ranking)
        return within_memory(options, decide, ranking)

    # Memory is that of a training step, which a model in eval mode does not run.
    candidate = within_device_memory(options, best) if model.training else best(options)
    # With `auto` the best number of stages has been chosen already.
    if options.suggest_stages and not options.chooses_pipeline:
        suggest_stages(options, candidate, decide)
    return candidate
