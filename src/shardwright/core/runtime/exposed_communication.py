"""Measure the exposed communication of a rank: the seconds that its computation waits.

What waits for a collective does so within `counted`: on the CPU its thread is blocked there, on an
accelerator the stream that computes. `Devices` and their groups share one `Waits`, so that all
programs, backward passes on threads of autograd's included, count into the same. In a pipeline's
schedule all counts in which no chunk is at work: the wait for another stage's micro-batch too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.core.runtime.accelerator import Intervals


@dataclass
class Waits:
    """The waits of one rank; none are counted by itself, and then they cost nothing.

    Args:
        intervals: those that are counted since the last `taken`.
    """

    intervals: Intervals | None = None

    @contextmanager
    def counting(self, device: torch.device) -> Iterator[None]:
        """Measure waits of `device` in this context, by the device's clock."""
        self.intervals = Intervals(device)
        try:
            yield
        finally:
            self.intervals = None

    def taken(self) -> float | None:
        """The seconds since it was last asked; None if none are counted. Nothing waits for an
        accelerator: what it has not come to yet counts the next time."""
        return None if self.intervals is None else self.intervals.taken()

    @contextmanager
    def counted(self, sign: int = 1) -> Iterator[None]:
        """Measure the wait in this context.

        Args:
            sign: -1 around what does not, within what does.
        """
        intervals = self.intervals
        if intervals is None:
            yield
            return
        began = intervals.mark()
        try:
            yield
        finally:
            intervals.add(began, intervals.mark(), sign)

    def apart(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Exclude the time of a function that computes within a measured wait."""

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.counted(-1):
                return function(*args, **kwargs)

        return call
