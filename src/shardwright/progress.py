"""The callback by which long calls report their progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")

OnShare = Callable[[float], None]
"""Called with the completed share of a phase, from 0 to 1."""

_PARTS = 100
# A callback may print a line for each report: a phase of an hour must not print thousands.
_SECONDS_BETWEEN_REPORTS = 1.0


class OnProgress(Protocol):
    """Called before each phase of a long call."""

    def __call__(self, doing: str, done: int = 0, of: int = 0) -> None:
        """
        Args:
            doing: a short description of the phase that begins.
            done: phases completed so far.
            of: phases in total; 0 if unknown.
        """


def ignore_progress(doing: str, done: int = 0, of: int = 0) -> None:
    """The `OnProgress` that does nothing."""


def ignore_share(share: float) -> None:
    """The `OnShare` that does nothing."""


def share_reporter(
    on_progress: OnProgress, doing: str, clock: Callable[[], float] = time.monotonic
) -> OnShare:
    """Report that a phase begins, and returns the callback for its completed share.

    The callback reports hundredths of the phase to `on_progress`, at most once a second.
    """
    on_progress(doing, 0, _PARTS)
    if on_progress is ignore_progress:
        return ignore_share
    reported, last = 0, clock()

    def report(share: float) -> None:
        nonlocal reported, last
        done = int(_PARTS * share)
        if reported < done < _PARTS and clock() - last >= _SECONDS_BETWEEN_REPORTS:
            reported, last = done, clock()
            on_progress(doing, done, _PARTS)

    return report


def subrange(on_share: OnShare, number: int, of: int, size: int = 1) -> OnShare:
    """Return the callback for the completed share of one part of a phase.

    Args:
        on_share: the callback of the phase.
        number: index of the part.
        of: the number of parts; each takes about as long as another.
        size: parts that the callback covers, from `number` on.
    """

    def report(share: float) -> None:
        on_share((number + size * share) / of)

    return report


def track(items: Sequence[T], on_share: OnShare) -> Iterator[T]:
    """Yield `items`, and reports the share of them that has been processed."""
    for number, item in enumerate(items):
        on_share(number / len(items))
        yield item
    on_share(1.0)


class RemainingTime:
    """Estimates the remaining time of a call from the phases completed so far.

    A best-first search counts the candidates in its queue, and may add more or end early, so the
    estimate of its time is rough.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: tuple[int, float] | None = None
        self._last = 0

    def seconds(self, done: int, of: int) -> float | None:
        """Return the estimated seconds, or None before a phase is completed and where phases are
        not counted.

        Args:
            done: phases completed so far.
            of: phases in total; 0 if unknown.
        """
        now = self._clock()
        if of == 0:
            self._first = None
            return None
        # A smaller count is that of another call, such as the next part of a nested one.
        if self._first is None or done < self._last:
            self._first = done, now
        self._last = done
        first, since = self._first
        return None if done == first else (now - since) / (done - first) * (of - done)


def nested_progress(
    on_progress: OnProgress, part: str = "", done: int = 0, of: int = 0
) -> OnProgress:
    """Return a callback for a call that is one phase of another.

    It reports each phase as `part: doing` with the outer count; with its own count if the outer
    call has one phase or an unknown number.

    Args:
        on_progress: the callback of the outer call.
        part: the name of the phase of the outer call.
        done: completed phases of the outer call.
        of: phases of the outer call; 0 if unknown.
    """
    count, prefix = (done, of), f"{part}: " if part else ""

    def report(doing: str, done: int = 0, of: int = 0) -> None:
        on_progress(prefix + doing, *(count if count[1] > 1 else (done, of)))

    return report
