"""Choice of the number of micro-batches."""

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
    """Return the candidate with the shortest step of the whole batch; of equals, the one with the
    fewest micro-batches. Numbers with which the model cannot be planned are skipped, as are all
    but 1 if the loss is no weighted sum of those of micro-batches (`mean_of_samples.py`).

    Each number is planned independently, as if it were requested, because the graph, the memory of
    activations and the number of stages that can be kept busy depend on it. So the result is never
    slower than a plan with any fixed number.

    Args:
        numbers: numbers of micro-batches to try, ascending.
        planned: returns the best candidate with a number of micro-batches.

    Raises:
        MemoryLimitError: no number fits into the memory limit; the error of the number that needs
            least.
        StrategyError: the model can only be trained with one micro-batch, and cannot be planned
            with one.
        ShardwrightError: no number can be planned for another reason; the error of the smallest.
    """
    best: Candidate | None = None
    errors: list[ShardwrightError] = []
    for number in numbers:
        try:
            candidate = planned(number)
        except MixedSamplesError as error:
            if best is None:
                raise StrategyError(
                    f"micro_batches='auto' leaves this model one micro-batch: {error}\n"
                    f"and with one it cannot be planned: {errors[0]}"
                ) from error
            break
        except (CaptureError, MemoryLimitError, PlanError, StrategyError) as error:
            errors.append(error)
            log.info("%d micro-batches: %s", number, error)
            continue
        if best is not None and candidate.model.graph.loss is None:
            break  # Without a loss nothing is trained, so that only one micro-batch makes sense.
        log.info("%d micro-batches: %.4g s per step", number, candidate.seconds)
        # Numbers ascend, so that the fewest of equally fast ones stay.
        if best is None or candidate.seconds < best.seconds:
            best = candidate
    if best is None:
        over_limit = [error for error in errors if isinstance(error, MemoryLimitError)]
        raise min(over_limit, key=lambda error: error.needed) if over_limit else errors[0]
    return best
