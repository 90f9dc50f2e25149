"""The best plan of a captured model: what is left open of stages, then what fits into memory."""

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
    """The fastest candidate that fits into memory.

    Args:
        ranking: receives the fastest of each kind.

    Raises:
        StrategyError: nothing can be cut, or stages cannot be as requested.
        MemoryLimitError: nothing fits; says what would.
    """

    def decide(options: PlanOptions) -> Sequence[Candidate]:
        return candidates(model, options)

    def best(options: PlanOptions) -> Candidate:
        if options.chooses_pipeline:
            return with_best_stages(options, decide, ranking=ranking)
        return within_memory(options, decide, ranking)

    # The memory of a training step says nothing about a model in eval mode.
    candidate = within_device_memory(options, best) if model.training else best(options)
    if options.suggest_stages and not options.chooses_pipeline:
        suggest_stages(options, candidate, decide)
    return candidate
