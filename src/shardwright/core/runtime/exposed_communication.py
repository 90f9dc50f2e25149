"""Measure the exposed communication of a rank: the seconds for which its computation waits.

All code that waits for a collective does so within `WaitTimer.measure`: a wait blocks the thread on
a CPU, and the compute stream on an accelerator. `Devices` and its groups share one timer, so waits
of all programs and of autograd's threads add up. In a pipeline schedule, all time outside chunks
counts as waiting, including the time until another stage's micro-batch arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.core.runtime.accelerator import Intervals


@dataclass
class WaitTimer:
    """Total time for which one rank waits for communication; disabled by default, at no cost.

    Args:
        intervals: waits since the last `take_seconds`; None while disabled.
    """

    intervals: Intervals | None = None

    @contextmanager
    def enable(self, device: torch.device) -> Iterator[None]:
        """Context that measures, by the clock of `device`, how long it waits for communication."""
        self.intervals = Intervals(device)
        try:
            yield
        finally:
            self.intervals = None

    def take_seconds(self) -> float | None:
        """Return the seconds of waiting since the last call; None while disabled.

        Does not synchronize: waits that an accelerator has not completed count in the next call.
        """
        return None if self.intervals is None else self.intervals.take_seconds()

    @contextmanager
    def measure(self, sign: int = 1) -> Iterator[None]:
        """Context whose duration counts as waiting for communication.

        Args:
            sign: -1 to subtract the duration, for computation within a measured wait.
        """
        # Read once, as `enable` may end within the wait.
        intervals = self.intervals
        if intervals is None:
            yield
            return
        # Events on the compute stream, which a wait blocks; the host may be far ahead.
        start = intervals.timestamp()
        try:
            yield
        finally:
            intervals.add(start, intervals.timestamp(), sign)

    def exclude(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `function`, which computes within a measured wait, to subtract its time."""

        def call(*args: Any, **kwargs: Any) -> Any:
            # Waits of collectives within the function count themselves.
            with self.measure(-1):
                return function(*args, **kwargs)

        return call
