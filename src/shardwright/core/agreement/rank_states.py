"""Detect deadlocks: ranks that wait for each other in different collective calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise

WAITING = "the ranks wait for each other"
"""Beginning of the deadlock error message if no rank has exited."""

TWO_THREADS = "two threads of a rank make collective calls at once"
"""Beginning of the error message if a thread begins a call while another is inside one."""

REMEDY = (
    "make the same calls in the same order on all ranks: train, evaluate, save and gather on all of"
    " them, and only then let rank 0 write or print"
)


@dataclass(frozen=True)
class RankState:
    """The call history and the current call of a rank that has made no call for some seconds.

    Args:
        rank: the global rank.
        count: number of collective calls that the rank has begun.
        calls: the last collective calls of the rank, such as "backward pass 12".
        is_inside: whether the last of `calls` has not returned.
        waits_in: the collective of all ranks that user code has called and that has not returned,
            such as "barrier"; empty if the rank is in no collective.
        line: the line of the user's program in which the rank waits; empty if it does not wait.
        is_retry: whether the rank repeats a call that raised an error on this rank, while other
            ranks may still wait in the first call.
        exception: the exception with which the rank exited; empty if the rank runs or has exited
            without an exception.
    """

    rank: int
    count: int
    calls: tuple[str, ...]
    is_inside: bool
    waits_in: str = ""
    line: str = ""
    exception: str = ""
    is_retry: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> RankState:
        fields = json.loads(text)
        return RankState(**{**fields, "calls": tuple(fields["calls"])})

    def call(self, number: int) -> str | None:
        """Return collective call `number` of the rank, counted from 1.

        Returns None if the call has not begun, or is older than `calls`.
        """
        # `calls` ends with call number `count`.
        position = len(self.calls) - 1 - (self.count - number)
        return self.calls[position] if 0 <= position < len(self.calls) else None

    @property
    def call_with_line(self) -> str:
        """The current collective call with its line; empty outside of a call."""
        line = f" ({self.line})" if self.line else ""
        return f"{self.calls[-1]}{line}" if self.is_inside else ""

    def __str__(self) -> str:
        line = f" ({self.line})" if self.line else ""
        if self.is_inside:
            return f"in {self.call_with_line}" + self.is_retry * ", after one that was refused"
        if self.waits_in:
            return f"in `{self.waits_in}`{line}"
        return f"after {self.calls[-1]}" if self.calls else "before its first call"


def difference_of_calls(states: Sequence[RankState]) -> str:
    """Return an error message if ranks wait for each other forever; empty if they may only be slow.

    Ranks are deadlocked if

    - two ranks have made different calls;
    - one rank waits in a call, and another in a collective of user code before that call; or
    - one rank repeats a call that raised an error on it, while another still waits in that call.

    Args:
        states: the last known state of each rank.
    """
    checks = _made_different_calls, _are_deadlocked, _is_second_retrying_alone
    if not any(check(*pair) for pair in _pair_distinct_states(states) for check in checks):
        return ""
    # `groupby` joins neighbors only, and within a group ranks are formatted in ascending order.
    ordered = sorted(states, key=lambda state: (str(state), state.rank))
    groups = [([state.rank for state in group], each) for each, group in groupby(ordered, key=str)]
    positions = [f"{_format_ranks(ranks)} {position}" for ranks, position in sorted(groups)]
    # All ranks are in a call of one name, so the message names the earlier calls that differ.
    if len(positions) == 1:
        positions.append(_format_first_difference(states))
    return f"{WAITING}: {', '.join(positions)}\n{REMEDY}"


def _format_first_difference(states: Sequence[RankState]) -> str:
    """Describe the first collective call in which the histories of ranks differ, as a clause.

    Called for ranks whose current calls have equal names.
    """
    for number in range(1, min(state.count for state in states) + 1):
        # Reversed, so that each call is mapped to its lowest rank.
        calls = {state.call(number): state.rank for state in reversed(states)}
        # None stands for a call that a rank no longer remembers, which proves no difference.
        if len(calls) > 1 and None not in calls:
            made = (f"rank {rank} made {call}" for call, rank in calls.items())
            return f"but {' where '.join(sorted(made)[:2])}"
    return "after other calls"


def exited_too_early(waiting: RankState, exited: Sequence[RankState]) -> str:
    """Return an error message if ranks exited before the call in which `waiting` waits, else "".

    Args:
        waiting: the state of the rank that waits.
        exited: the last states of ranks that have exited.
    """
    # A rank that exited after as many calls has taken part in the call that `waiting` is in.
    missing = [state for state in exited if state.count < waiting.count]
    if not missing:
        return ""
    # The rank that exited after the fewest calls is the cause; others may have failed because of
    # it.
    count = min(state.count for state in missing)
    first = [state for state in missing if state.count == count]
    exception = next((state.exception for state in first if state.exception), "")
    calls = f"after {first[0].calls[-1]}" if first[0].calls else "before its first call"
    has_ended = f"{_format_ranks([state.rank for state in first])} ended {calls}"
    if exception:
        has_ended += f" with {exception}"
    remedy = (
        "see the log of that rank for its error"
        if exception
        else "make the same calls on all ranks: as many batches and evaluations on each, and saving"
        " and gathering on all"
    )
    return f"{has_ended}, but rank {waiting.rank} waits {waiting}\n{remedy}"


def calls_of_two_threads(inside: RankState, name: str, thread: str, line: str) -> str:
    """Return the error message of a rank whose threads are inside two collective calls.

    Args:
        inside: the state of the rank, with the first call.
        name: name of the second call.
        thread: name of the thread of the second call.
        line: the line of the user's program of the second call.
    """
    suffix = f" ({line})" if line else ""
    return (
        f"{TWO_THREADS}: rank {inside.rank} is in {inside.call_with_line}, and thread {thread!r}"
        f" begins {name}{suffix}\nmake the calls of all models in one thread, in the same order on"
        " all ranks; a thread beside it may use copies that one call has made, as those of"
        " `with sw.whole(net): copy = deepcopy(net.state_dict())`"
    )


def store_has_ended(waiting: RankState) -> str:
    """Return the error message of a rank that waits in a call after the rendezvous store has
    ended."""
    return (
        "rank 0, or the launcher that serves the store of the process group, has ended, but rank"
        f" {waiting.rank} waits {waiting}\nsee the log of rank 0 for its error"
    )


def _pair_distinct_states(states: Sequence[RankState]) -> list[tuple[RankState, RankState]]:
    """Return all ordered pairs of distinct states; ranks with equal states count once."""
    keys = [(s.count, s.calls, s.is_inside, s.waits_in, s.is_retry) for s in states]
    different = list(dict(zip(keys, states, strict=True)).values())
    # Both (a, b) and (b, a), as two of the checks are not symmetric.
    return [(a, b) for a in different for b in different if a is not b]


def _made_different_calls(a: RankState, b: RankState) -> bool:
    numbers = range(1, min(a.count, b.count) + 1)
    # The calls that both ranks have begun and that `a` still remembers.
    call_pairs = ((a.call(n), b.call(n)) for n in numbers[-len(a.calls) :])
    return any(x is not None and y is not None and x != y for x, y in call_pairs)


def _are_deadlocked(a: RankState, b: RankState) -> bool:
    # `a` waits for `b` to begin its call, and `b` waits for `a` in an earlier collective of user
    # code.
    return a.is_inside and bool(b.waits_in) and not b.is_inside and b.count < a.count


def _is_second_retrying_alone(a: RankState, b: RankState) -> bool:
    # `a` is in the collectives of the first attempt, which the collectives of `b` do not match.
    return a.is_inside and b.is_inside and a.count == b.count and b.is_retry and not a.is_retry


def _format_ranks(ranks: Sequence[int]) -> str:
    """Format ranks for a message, consecutive ranks as a range.

    >>> _format_ranks([0]), _format_ranks([1, 2, 3, 5])
    ('rank 0', 'ranks 1-3, 5')
    """
    starts = [ranks[0], *(b for a, b in pairwise(ranks) if b != a + 1)]
    ends = [*(a for a, b in pairwise(ranks) if b != a + 1), ranks[-1]]
    spans = [str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(spans)}"
