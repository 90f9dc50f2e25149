"""The callback by which long calls report their progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")

OnShare = Callable[[float], None]
"""Is told the share of a phase that is done, from 0 to 1, as often as that is known."""

_PARTS = 100
_SECONDS = 1.0
"""Between two reports of one phase, where each may be a line."""


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


def unheard(share: float) -> None:
    """Reports nothing."""


def in_shares(
    on_progress: OnProgress, doing: str, clock: Callable[[], float] = time.monotonic
) -> OnShare:
    """Reports that a phase begins, in 100 parts. Returns what reports the share of it that is done,
    at most once a second."""
    on_progress(doing, 0, _PARTS)
    if on_progress is silent:
        return unheard
    reported, last = 0, clock()

    def report(share: float) -> None:
        nonlocal reported, last
        done = int(_PARTS * share)
        if reported < done < _PARTS and clock() - last >= _SECONDS:
            reported, last = done, clock()
            on_progress(doing, done, _PARTS)

    return report


def part_of(on_share: OnShare, number: int, of: int, size: int = 1) -> OnShare:
    """What is told the share of a part of a phase.

    Args:
        number, of: which of how many parts, that take about as long each; of `size` the first.
    """

    def report(share: float) -> None:
        on_share((number + size * share) / of)

    return report


def counted(items: Sequence[T], on_share: OnShare) -> Iterator[T]:
    """Each of `items`, of which the share is reported that was gone through."""
    for number, item in enumerate(items):
        on_share(number / len(items))
        yield item
    on_share(1.0)


class TimeLeft:
    """Estimates how long the phases take that are left, from those that are completed.

    A best-first search counts what waits so far: more may be added to it, and the search ends at
    the first that will do.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: tuple[int, float] | None = None
        self._last = 0

    def seconds(self, done: int, of: int) -> float | None:
        """Seconds; None as long as nothing is known, and where phases are not counted.

        Args:
            done, of: as `OnProgress` is told.
        """
        now = self._clock()
        if of == 0:
            self._first = None
            return None
        if self._first is None or done < self._last:
            self._first = done, now
        self._last = done
        first, since = self._first
        return None if done == first else (now - since) / (done - first) * (of - done)


def within(on_progress: OnProgress, part: str = "", done: int = 0, of: int = 0) -> OnProgress:
    """A callback for a call that is one phase of another; reports its phases as `part: doing`, with
    the count of the whole, or, where there is one phase or their number is unknown, with its own.
    """
    count, prefix = (done, of), f"{part}: " if part else ""

    def report(doing: str, done: int = 0, of: int = 0) -> None:
        on_progress(prefix + doing, *(count if count[1] > 1 else (done, of)))

    return report
