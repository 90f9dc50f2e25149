"""Predict the next collective call of a rank from its call history."""

from __future__ import annotations

CONTEXTS = (8, 4, 2, 1)
"""Lengths of the call sequences that predict the next call, the longest first.

The longest sequence that has occurred before decides.
"""

MAX_CONTEXTS = 4096
"""Maximum number of call sequences in the history, which is cleared if it grows larger."""


class ExpectedCalls:
    """Predictor of the next collective call: the call that earlier followed the same calls.

    Ranks with equal call histories expect the same next call. If two ranks then make different
    calls, at least one of the two calls is unexpected. So if unexpected calls wait for all ranks
    before they communicate, collectives of different calls are never matched with each other, and a
    training loop waits only where its pattern changes.

    >>> calls = ExpectedCalls()
    >>> [calls.begin(kind) for kind in 10 * ["step"] + ["evaluation"]][-3:]
    [True, True, False]
    """

    def __init__(self) -> None:
        # At most `CONTEXTS[0]` calls, the latest last.
        self._last: tuple[str, ...] = ()
        # From a sequence of calls to the call that followed it most recently.
        self._next: dict[tuple[str, ...], str] = {}
        # The state before the last call, for `undo`.
        self._before: tuple[str, ...] = ()
        self._replaced: dict[tuple[str, ...], str | None] = {}

    def begin(self, call_name: str) -> bool:
        """Record a collective call, and return whether the history predicted this call.

        Args:
            call_name: name of the call, such as "step".
        """
        # The size depends on the history only, so ranks with equal histories clear at the same
        # call.
        if len(self._next) > MAX_CONTEXTS:
            self._next.clear()
        last, expected, self._replaced = self._last, None, {}
        # The longest context comes first and decides; the shorter ones learn from the call too.
        for length in CONTEXTS:
            if length <= len(last):
                context = last[-length:]
                previous = self._next.get(context)
                expected = previous if expected is None else expected
                self._replaced[context], self._next[context] = previous, call_name
        self._before, self._last = last, (*last[1 - CONTEXTS[0] :], call_name)
        return call_name == expected

    def undo(self) -> None:
        """Remove the latest collective call from the history.

        The call raised an error on this rank before it communicated.
        """
        self._last = self._before
        for context, previous in self._replaced.items():
            if previous is None:
                self._next.pop(context, None)
            else:
                self._next[context] = previous
        self._replaced = {}
