"""Choose the number of micro-batches with the shortest predicted step time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from shardwright.core.micro_batches.batch_norms import takes_statistics
from shardwright.core.planner.candidate import Candidate
from shardwright.errors import (
    CaptureError,
    MemoryLimitError,
    MixedSamplesError,
    PlanError,
    ShardwrightError,
    StrategyError,
)

log = logging.getLogger("shardwright.search")


def with_best_micro_batches(
    counts: Sequence[int], plan_with: Callable[[int], Candidate]
) -> Candidate:
    """Return the candidate with the shortest predicted step; ties go to the fewest micro-batches.

    Skips numbers of micro-batches with which the model cannot be planned. Skips all numbers but 1
    if the loss cannot be computed by micro-batches (`core/micro_batches`), or depends on the number
    of micro-batches, as with batch norm in training.

    The model is planned independently for each number, which determines the graph, the memory of
    activations and the best number of stages. So the result is never slower than a plan with a
    fixed number of micro-batches.

    Args:
        counts: numbers of micro-batches to try, ascending.
        plan_with: function from a number of micro-batches to the best candidate.

    Raises:
        MemoryLimitError: if no plan with any number fits into the memory limit; the error is raised
            for the number with the least memory.
        StrategyError: if the model can only be trained with one micro-batch, and cannot be planned
            with one.
        ShardwrightError: if no number can be planned for another reason; the error is raised for
            the smallest number.
    """
    best: Candidate | None = None
    errors: list[ShardwrightError] = []
    for count in counts:
        if best is not None and any(takes_statistics(op) for op in best.model.graph.ops):
            break  # With another number, statistics would be of other samples.
        try:
            candidate = plan_with(count)
        except MixedSamplesError as error:
            if best is None:
                raise StrategyError(
                    f"micro_batches='auto': this model can be trained with one micro-batch only:"
                    f" {error}\nset micro_batches=1 and resolve its error: {errors[0]}"
                ) from error
            # The loss mixes samples, so every number but 1 raises this error.
            break
        except (CaptureError, MemoryLimitError, PlanError, StrategyError) as error:
            errors.append(error)
            log.info("%d micro-batches: %s", count, error)
            continue
        if best is not None and candidate.model.graph.loss is None:
            break  # Without a loss the model is not trained, so only one micro-batch is useful.
        log.info("%d micro-batches: %.4g s per step", count, candidate.seconds)
        # Numbers ascend, so that ties go to the fewest micro-batches.
        if best is None or candidate.seconds < best.seconds:
            best = candidate
    if best is None:
        over_limit = [error for error in errors if isinstance(error, MemoryLimitError)]
        raise min(over_limit, key=lambda error: error.needed) if over_limit else errors[0]
    return best
