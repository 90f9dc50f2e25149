"""Learning rates that rise and then fall."""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, pi

KINDS = ("constant", "cosine", "linear", "polynomial")


@dataclass(frozen=True)
class LRSchedule:
    """A learning rate that rises evenly from 0 to `peak` and then goes to `end`.

    Args:
        kind: `constant` stays at `peak`; `cosine` falls along half a wave, `linear` evenly, and
            `polynomial` as the rest of the way to the power of `power`.
        warmup_steps: steps in which it rises.
        warmup_ratio: the same as a share of all steps, where that is given.
        total_steps: steps after which it stays at `end`; None for those of the run.
    """

    kind: str
    peak: float
    end: float = 0.0
    warmup_steps: int = 0
    warmup_ratio: float | None = None
    total_steps: int | None = None
    power: float = 1.0

    def rate(self, step: int, run_steps: int) -> float:
        """The learning rate of a step, counted from 0, of a run of so many steps."""
        total = self.total_steps if self.total_steps is not None else run_steps
        warmup = self.warmup_steps
        if self.warmup_ratio is not None:
            warmup = int(self.warmup_ratio * total)
        if step < warmup:
            return self.peak * step / warmup
        if self.kind == "constant":
            return self.peak
        gone = min((step - warmup) / max(1, total - warmup), 1.0)
        return self.end + (self.peak - self.end) * self._left(gone)

    def _left(self, gone: float) -> float:
        """The share of the fall that is left when a share of the way is gone."""
        if self.kind == "cosine":
            return (1 + cos(pi * gone)) / 2
        return float((1 - gone) ** (1.0 if self.kind == "linear" else self.power))
