"""Predict the next collective call of a rank from its last ones, identically on all ranks."""

from __future__ import annotations

CONTEXTS = (8, 4, 2, 1)
"""Numbers of last calls from which the next is predicted; the most that occurred before count."""

MAX_CONTEXTS = 4096
"""Largest number of contexts that are remembered."""


class ExpectedCalls:
    """The call that a rank expects next: the one that followed the same calls the last time.

    Ranks that have made the same calls expect the same next call. If two of them then make
    different calls, at least one makes a call that it does not expect. So if unexpected calls wait
    for all ranks before they communicate, collectives of different calls never meet, and a loop
    waits only where its pattern changes.

    >>> calls = ExpectedCalls()
    >>> [calls.begin(kind) for kind in 10 * ["step"] + ["evaluation"]][-3:]
    [True, True, False]
    """

    def __init__(self) -> None:
        self._last: tuple[str, ...] = ()
        self._next: dict[tuple[str, ...], str] = {}
        self._before: tuple[str, ...] = ()
        self._replaced: dict[tuple[str, ...], str | None] = {}

    def begin(self, kind: str) -> bool:
        """Add a call, and return whether it was expected."""
        if len(self._next) > MAX_CONTEXTS:
            self._next.clear()
        last, expected, self._replaced = self._last, None, {}
        for length in CONTEXTS:
            if length <= len(last):
                context = last[-length:]
                previous = self._next.get(context)
                expected = previous if expected is None else expected
                self._replaced[context], self._next[context] = previous, kind
        self._before, self._last = last, (*last[1 - CONTEXTS[0] :], kind)
        return kind == expected

    def undo(self) -> None:
        """Remove the last call, which was refused on this rank; others may not have made it."""
        self._last = self._before
        for context, previous in self._replaced.items():
            if previous is None:
                self._next.pop(context, None)
            else:
                self._next[context] = previous
        self._replaced = {}
