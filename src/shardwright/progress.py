"""The callback by which long calls report their progress."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol


class OnProgress(Protocol):
    """Called before each phase of a long call."""

    def __call__(self, doing: str, done: int = 0, of: int = 0) -> None:
        """
        Args:
            doing: a short description of the phase that begins.
            done: phases completed so far.
            of: phases in total; 0 if unknown.
        """


def silent(doing: str, done: int = 0, of: int = 0) -> None:
    """Reports nothing."""


class TimeLeft:
    """Estimates how long the phases take that are left, from those that are completed.

    A best-first search counts what waits so far: more may be added to it, and the search ends at
    the first that will do.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: tuple[int, float] | None = None

    def seconds(self, done: int, of: int) -> float | None:
        """Seconds; None as long as nothing is known, and where phases are not counted.

        Args:
            done, of: as `OnProgress` is told.
        """
        now = self._clock()
        if of == 0:
            self._first = None
            return None
        if self._first is None or done < self._first[0]:
            self._first = done, now
        first, since = self._first
        return None if done == first else (now - since) / (done - first) * (of - done)


def within(on_progress: OnProgress, part: str, done: int = 0, of: int = 0) -> OnProgress:
    """A callback for a call that is one phase of another; reports its phases as `part: doing`."""
    count = done, of

    def report(doing: str, done: int = 0, of: int = 0) -> None:
        on_progress(f"{part}: {doing}", *count)

    return report
