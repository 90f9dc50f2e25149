"""Describe how the losses of micro-batches add up to the loss of the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SampleReduction = Literal["mean", "sum"]
"""Reduction of a value over the samples of a batch."""


@dataclass(frozen=True)
class LossWeighting:
    """The form N or N / D of the loss of a micro-batch.

    N is a mean or a sum over the samples, and D a function of means and sums over samples that
    depend on the inputs alone. The loss of the batch is then a weighted sum of the losses of its
    `n` micro-batches: each has the weight 1 / n if N is a mean, or 1 if it is a sum, times
    (D of the micro-batch) / (D of the batch).

    Args:
        reduction: how N reduces samples.
        counted: name of the operator, a mean over targets such as cross entropy, whose number of
            targets, or sum of the targets' class weights, is D; empty if D is another value.
        denominator: name of the value D; empty without D, or with `counted`.
        totals: names of the means and sums over samples that D is computed from, each with its
            reduction.
    """

    reduction: SampleReduction = "mean"
    counted: str = ""
    denominator: str = ""
    totals: tuple[tuple[str, SampleReduction], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the operators and values of the graph from which weights are computed."""
        denominators = (self.counted, self.denominator, *(name for name, _ in self.totals))
        return tuple(name for name in denominators if name)
