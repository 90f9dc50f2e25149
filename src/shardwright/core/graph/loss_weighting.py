"""How the losses of micro-batches add up to the loss of the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SampleReduction = Literal["mean", "sum"]


@dataclass(frozen=True)
class LossWeighting:
    """The loss of a micro-batch is N or N / D, where N is a mean or a sum over its samples, and D
    is a function of means and sums over samples that follow from the inputs alone.

    The loss of the batch is then a weighted sum of the losses of its `n` micro-batches: each has
    the weight 1 / n if N is a mean, 1 if it is a sum, times D of the micro-batch / D of the batch.

    Args:
        reduction: how N reduces samples.
        counted: name of the operator, a mean over targets such as cross entropy, whose number of
            targets, or sum of their classes' weights, is D. Empty if there is none.
        denominator: name of the value D. Empty if there is none.
        totals: names of the means and sums over samples from which D follows, each with its
            reduction.
    """

    reduction: SampleReduction = "mean"
    counted: str = ""
    denominator: str = ""
    totals: tuple[tuple[str, SampleReduction], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Operators and values of the graph that weights are computed from."""
        denominators = (self.counted, self.denominator, *(name for name, _ in self.totals))
        return tuple(name for name in denominators if name)
