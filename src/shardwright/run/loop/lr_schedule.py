"""Learning rate schedules with a linear warmup."""

from __future__ import annotations

from dataclasses import dataclass
from math import cos, pi

KINDS = ("constant", "cosine", "linear", "polynomial")


@dataclass(frozen=True)
class LRSchedule:
    """Linear warmup from `start` to `peak`, followed by decay to `end`.

    Args:
        kind: the decay: `constant` (none), `cosine`, `linear` or `polynomial`.
        peak: learning rate at the end of the warmup.
        start: learning rate at the beginning of the warmup.
        end: learning rate at the end of the decay.
        warmup_steps: number of warmup steps.
        warmup_ratio: warmup steps as a fraction of `total_steps`; overrides `warmup_steps`.
        total_steps: steps after which the rate stays at `end`; None for the length of the run.
        power: exponent of the decay `polynomial`.
    """

    kind: str
    peak: float
    start: float = 0.0
    end: float = 0.0
    warmup_steps: int = 0
    warmup_ratio: float | None = None
    total_steps: int | None = None
    power: float = 1.0

    def rate(self, step: int, run_steps: int) -> float:
        """Return the learning rate of `step`, counted from 0, in a run of `run_steps` steps."""
        total = self.total_steps if self.total_steps is not None else run_steps
        warmup = self.warmup_steps
        if self.warmup_ratio is not None:
            warmup = int(self.warmup_ratio * total)
        if step < warmup:
            return self.start + (self.peak - self.start) * step / warmup
        if self.kind == "constant":
            return self.peak
        # No step decays if the warmup is as long as the run.
        progress = min((step - warmup) / max(1, total - warmup), 1.0)
        return self.end + (self.peak - self.end) * self._compute_decay_factor(progress)

    def _compute_decay_factor(self, progress: float) -> float:
        """Return (rate - end) / (peak - end) at `progress` of the decay, from 0 to 1."""
        if self.kind == "cosine":
            # Half a period of a cosine, from 1 to 0 (Loshchilov and Hutter, "SGDR", 2017).
            return (1 + cos(pi * progress)) / 2
        return float((1 - progress) ** (1.0 if self.kind == "linear" else self.power))
