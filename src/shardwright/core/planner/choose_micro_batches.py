"""The number of micro-batches, chosen."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

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
    numbers: Sequence[int], planned: Callable[[int], Candidate]
) -> Candidate:
    """The candidate whose step of the whole batch takes the least time; of equals the one of the
    fewest micro-batches. A number with which the model cannot be planned is left out, and so is
    every other than 1 if the loss is not known to be the mean over samples (`mean_of_samples.py`).

    Each number is planned by itself, as if it were the requested one: the graph is another, as
    are the memory of activations and the stages that can be kept busy. So the result is never
    slower than what any of the numbers gives.

    Args:
        numbers: to be tried, from the smallest on.
        planned: the best candidate with a number.

    Raises:
        MemoryLimitError: if no number fits into the memory limit; that of the one that needs least.
        StrategyError: if one is too few for a model whose results depend on the number.
        ShardwrightError: if none can be planned for another reason; that of the smallest.
    """
    best: Candidate | None = None
    errors: list[ShardwrightError] = []
    for number in numbers:
        try:
            candidate = planned(number)
        except MixedSamplesError as error:
            if best is None:
                raise StrategyError(
                    f"micro_batches='auto' leaves this model one micro-batch: {error}; but"
                    f" {errors[0]}"
                ) from error
            break
        except (CaptureError, MemoryLimitError, PlanError, StrategyError) as error:
            errors.append(error)
            log.info("%d micro-batches: %s", number, error)
            continue
        if best is not None and candidate.model.graph.loss is None:
            break  # Nothing is trained in micro-batches.
        log.info("%d micro-batches: %.4g s per step", number, candidate.seconds)
        if best is None or candidate.seconds < best.seconds:
            best = candidate
    if best is None:
        too_large = [error for error in errors if isinstance(error, MemoryLimitError)]
        raise min(too_large, key=lambda error: error.needed) if too_large else errors[0]
    return best
