"""Decide when a long search reports its best plan so far."""

from __future__ import annotations

import time
from collections.abc import Callable

FIRST_REPORT_SECONDS = 120.0
"""Seconds after which a search first reports its best plan so far; further reports follow after
two, four, eight, ... times as many seconds."""


class ReportTimes:
    """The moments at which a search reports its best plan so far.

    Args:
        clock: function that returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        # A monotonic clock by default: the system time may be set during a search.
        self._clock, self._start = clock, clock()
        self._next_report_seconds = FIRST_REPORT_SECONDS

    def due(self) -> float | None:
        """Return the seconds that the search has taken if a report is due, else None."""
        seconds = self._clock() - self._start
        if seconds < self._next_report_seconds:
            return None
        # One step of the search may take longer than the time to several reports.
        while self._next_report_seconds <= seconds:
            self._next_report_seconds *= 2
        return seconds
