"""Find ranks that wait for each other in different calls, from what each rank is doing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise

WAITING = "the ranks wait for each other"
"""Beginning of the error of ranks that are all there."""

REMEDY = (
    "make the same calls in the same order on all ranks: train, evaluate, save and gather on all of"
    " them, and only then let rank 0 write or print"
)


@dataclass(frozen=True)
class RankState:
    """The calls and the position of a rank that has made no call for some seconds.

    Args:
        rank: the rank.
        count: number of collective calls that it has begun.
        calls: the last of them, by kind and number, such as "backward pass 12".
        is_inside: whether it is inside the last of them.
        waits_in: the collective of all ranks in which its own code waits, such as "barrier"; empty
            without one.
        line: the line of the user's program from which it waits; empty if it does not.
        exception: the exception that ended the rank; empty if it runs, or has ended without one.
    """

    rank: int
    count: int
    calls: tuple[str, ...]
    is_inside: bool
    waits_in: str = ""
    line: str = ""
    exception: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> RankState:
        fields = json.loads(text)
        return RankState(**{**fields, "calls": tuple(fields["calls"])})

    def call(self, number: int) -> str | None:
        """The call of this number, from 1; None if it is not begun or forgotten."""
        position = len(self.calls) - 1 - (self.count - number)
        return self.calls[position] if 0 <= position < len(self.calls) else None

    def __str__(self) -> str:
        line = f" ({self.line})" if self.line else ""
        if self.is_inside:
            return f"in {self.calls[-1]}{line}"
        if self.waits_in:
            return f"in `{self.waits_in}`{line}"
        return f"after {self.calls[-1]}" if self.calls else "before its first call"


def difference_of_calls(states: Sequence[RankState]) -> str:
    """Describe ranks that can never meet; empty if all may only be slow.

    They cannot if two have made different calls, or if one is inside a call that another has not
    begun, which itself waits in a collective of all ranks.
    """
    if not any(_made_other_calls(*pair) or _wait_apart(*pair) for pair in _pairs(states)):
        return ""
    ordered = sorted(states, key=lambda state: (str(state), state.rank))
    groups = [([state.rank for state in group], text) for text, group in groupby(ordered, key=str)]
    places = [f"{_name_ranks(ranks)} {text}" for ranks, text in sorted(groups)]
    return f"{WAITING}: {', '.join(places)}\n{REMEDY}"


def ended_too_early(waiting: RankState, ended: Sequence[RankState]) -> str:
    """Describe ranks that have ended before a call in which another waits; empty without any.

    Args:
        waiting: the rank that waits.
        ended: the last states of ranks that have ended.
    """
    missing = [state for state in ended if state.count < waiting.count]
    if not missing:
        return ""
    count = min(state.count for state in missing)
    first = [state for state in missing if state.count == count]
    exception = next((state.exception for state in first if state.exception), "")
    calls = f"after {first[0].calls[-1]}" if first[0].calls else "before its first call"
    has_ended = f"{_name_ranks([state.rank for state in first])} ended {calls}"
    if exception:
        has_ended += f" with {exception}"
    remedy = (
        "see the log of that rank for its error"
        if exception
        else "make the same calls on all ranks: as many batches and evaluations on each, and saving"
        " and gathering on all"
    )
    return f"{has_ended}, but rank {waiting.rank} waits {waiting}\n{remedy}"


def _pairs(states: Sequence[RankState]) -> list[tuple[RankState, RankState]]:
    """Every state with one of each kind of others: all pairs of a large run would take long."""
    different = list({(s.count, s.calls, s.is_inside, s.waits_in): s for s in states}.values())
    return [(a, b) for a in different for b in different if a is not b]


def _made_other_calls(a: RankState, b: RankState) -> bool:
    numbers = range(1, min(a.count, b.count) + 1)
    both = ((a.call(n), b.call(n)) for n in numbers[-len(a.calls) :])
    return any(x is not None and y is not None and x != y for x, y in both)


def _wait_apart(a: RankState, b: RankState) -> bool:
    return a.is_inside and bool(b.waits_in) and not b.is_inside and b.count < a.count


def _name_ranks(ranks: Sequence[int]) -> str:
    """
    >>> _name_ranks([0]), _name_ranks([1, 2, 3, 5])
    ('rank 0', 'ranks 1-3, 5')
    """
    starts = [ranks[0], *(b for a, b in pairwise(ranks) if b != a + 1)]
    ends = [*(a for a, b in pairwise(ranks) if b != a + 1), ranks[-1]]
    spans = [str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(spans)}"
