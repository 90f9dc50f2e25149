"""Callbacks through which long calls report their progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

Item = TypeVar("Item")

OnShare = Callable[[float], None]
"""Callback for the completed share of a phase, from 0 to 1."""

_REPORTS_PER_PHASE = 100
"""Maximum number of progress reports per phase, each after an equal share of the phase."""

# A callback may print a line for each report: a phase of an hour must not print thousands.
_SECONDS_BETWEEN_REPORTS = 1.0


class OnProgress(Protocol):
    """Progress callback of a long call, called before each phase of the call."""

    def __call__(self, phase: str, done: int = 0, total: int = 0, /) -> None:
        """Report the phase that begins.

        Args:
            phase: a short description of the phase.
            done: number of phases completed so far.
            total: number of phases in total; 0 if unknown.
        """


def ignore_progress(phase: str, done: int = 0, total: int = 0) -> None:
    """Ignore the report of a phase; an `OnProgress` callback that does nothing."""


def ignore_share(share: float) -> None:
    """Ignore the completed share of a phase; an `OnShare` callback that does nothing."""


def share_reporter(
    on_progress: OnProgress, phase: str, clock: Callable[[], float] = time.monotonic
) -> OnShare:
    """Report the start of a phase, and return a callback for its completed share.

    The callback reports hundredths of the phase to `on_progress`, at most once a second.

    Args:
        phase: a short description of the phase.
        clock: function that returns the time in seconds.
    """
    on_progress(phase, 0, _REPORTS_PER_PHASE)
    # No clock is read for reports that are ignored.
    if on_progress is ignore_progress:
        return ignore_share
    last_reported, last_time = 0, clock()

    def report(share: float) -> None:
        nonlocal last_reported, last_time
        done = int(_REPORTS_PER_PHASE * share)
        is_due = clock() - last_time >= _SECONDS_BETWEEN_REPORTS
        # 0 was reported at the start of the phase; the next phase reports its own.
        if last_reported < done < _REPORTS_PER_PHASE and is_due:
            last_reported, last_time = done, clock()
            on_progress(phase, done, _REPORTS_PER_PHASE)

    return report


def subrange(on_share: OnShare, index: int, num_parts: int, size: int = 1) -> OnShare:
    """Return a callback for the completed fraction of one part of a phase.

    Args:
        on_share: callback for the completed fraction of the full phase.
        index: index of the part, or of the first of `size` parts.
        num_parts: number of parts of the phase, which take about the same time.
        size: number of parts that the returned callback covers.
    """

    def report(share: float) -> None:
        on_share((index + size * share) / num_parts)

    return report


def track(items: Sequence[Item], on_share: OnShare) -> Iterator[Item]:
    """Yield `items`, and report the share of items that the caller has processed."""
    for index, item in enumerate(items):
        # Before `yield`, after which the caller processes the item.
        on_share(index / len(items))
        yield item
    on_share(1.0)


class RemainingTime:
    """Estimator of the remaining time of a call, from the phases completed so far.

    The estimate is rough for a best-first search, whose phases are the candidates in its queue: the
    search may add candidates, or end before the queue is empty.

    Args:
        clock: function that returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: tuple[int, float] | None = None
        self._last = 0

    def seconds(self, done: int, total: int) -> float | None:
        """Return the estimated remaining seconds; None before the first phase is completed.

        Args:
            done: number of phases completed so far.
            total: number of phases in total; 0 if unknown, for which None is returned.
        """
        now = self._clock()
        if total == 0:
            self._first = None
            return None
        # A smaller count is that of another call, such as the next inner call.
        if self._first is None or done < self._last:
            self._first = done, now
        self._last = done
        first_done, start = self._first
        # The rate is unknown until another phase is completed.
        if done == first_done:
            return None
        return (now - start) / (done - first_done) * (total - done)


def nested_progress(
    on_progress: OnProgress, outer_phase: str = "", done: int = 0, total: int = 0
) -> OnProgress:
    """Return a callback for an inner call that is one phase of an outer call.

    The callback reports each phase as `outer_phase: phase`, with the numbers of phases of the outer
    call; if the outer call has at most one phase, with the numbers of phases of the inner call.

    Args:
        on_progress: callback of the outer call.
        outer_phase: description of the phase of the outer call; empty for no prefix.
        done: number of completed phases of the outer call.
        total: number of phases of the outer call; 0 if unknown.
    """
    outer_count, prefix = (done, total), f"{outer_phase}: " if outer_phase else ""

    def report(phase: str, done: int = 0, total: int = 0) -> None:
        # An outer call of one phase would report no progress until its end.
        on_progress(prefix + phase, *(outer_count if outer_count[1] > 1 else (done, total)))

    return report
