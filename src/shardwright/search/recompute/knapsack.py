"""The cheapest choices that together free enough: of each block one option, or none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

MOST_STATES = 4000
"""So many states of the exact search; with more, choices are made by their ratio."""


@dataclass(frozen=True)
class KnapsackItem:
    """Memory that can be freed at a cost.

    Args:
        freed: bytes.
        cost: of whatever unit; less is better.
    """

    freed: int
    cost: float


class _State(NamedTuple):
    freed: int
    cost: float
    before: _State | None
    chosen: int


def cheapest(blocks: Sequence[Sequence[KnapsackItem]], needed: int) -> list[int] | None:
    """For each block the index of the option that is taken, or -1.

    Exact as long as few sums are worth keeping, which is so where blocks repeat: of two sums one is
    dropped if the other frees no less and costs no more. Else options are taken by the least cost
    per byte, and those that turn out not to be needed are given back.

    Returns:
        None if all together do not free `needed` bytes.
    """
    most = sum(max((option.freed for option in block), default=0) for block in blocks)
    if most < needed:
        return None
    states = [_State(0, 0.0, None, -1)]
    for block in blocks:
        states = _extended(states, block, needed)
        if len(states) > MOST_STATES:
            return _by_ratio(blocks, needed)
    best: _State | None = min((s for s in states if s.freed >= needed), key=lambda s: s.cost)
    chosen = []
    while best is not None and best.before is not None:
        chosen.append(best.chosen)
        best = best.before
    return chosen[::-1]


def _extended(states: list[_State], block: Sequence[KnapsackItem], needed: int) -> list[_State]:
    """The sums with one block more that are worth keeping, the one that frees most first."""
    sums = [_State(state.freed, state.cost, state, -1) for state in states]
    for index, option in enumerate(block):
        sums += [
            _State(min(needed, s.freed + option.freed), s.cost + option.cost, s, index)
            for s in states
        ]
    sums.sort(key=lambda state: (-state.freed, state.cost))
    efficient: list[_State] = []
    for state in sums:
        if not efficient or state.cost < efficient[-1].cost:
            efficient.append(state)
    return efficient


def _by_ratio(blocks: Sequence[Sequence[KnapsackItem]], needed: int) -> list[int]:
    chosen = [-1] * len(blocks)
    none = KnapsackItem(0, 0.0)
    freed = 0

    def now(number: int) -> KnapsackItem:
        return none if chosen[number] < 0 else blocks[number][chosen[number]]

    while freed < needed:
        steps = [
            ((option.cost - now(number).cost) / (option.freed - now(number).freed), number, index)
            for number, block in enumerate(blocks)
            for index, option in enumerate(block)
            if option.freed > now(number).freed
        ]
        _, number, index = min(steps)
        freed += blocks[number][index].freed - now(number).freed
        chosen[number] = index
    for number in sorted(range(len(blocks)), key=lambda n: -now(n).cost):
        if freed - now(number).freed >= needed:
            freed -= now(number).freed
            chosen[number] = -1
    return chosen
