"""The cheapest choices that together free enough: of each block one option, or none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

MAX_STATES = 4000
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


class _States(NamedTuple):
    """Sums that are worth keeping, the one that frees most first.

    Args:
        freed, cost: of each.
        before: the state of the blocks before that it was made of.
        chosen: of the last block the index of the option, or -1.
    """

    freed: npt.NDArray[np.int64]
    cost: npt.NDArray[np.float64]
    before: npt.NDArray[np.intp]
    chosen: npt.NDArray[np.intp]


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
    none = np.full(1, -1)
    states = [_States(np.zeros(1, np.int64), np.zeros(1), none, none)]
    for block in blocks:
        states.append(_extended(states[-1], block, needed))
        if len(states[-1].freed) > MAX_STATES:
            return _by_ratio(blocks, needed)
    # Of those that free enough only the cheapest was kept.
    here, chosen = 0, []
    for each in reversed(states[1:]):
        chosen.append(int(each.chosen[here]))
        here = int(each.before[here])
    return chosen[::-1]


def _extended(states: _States, block: Sequence[KnapsackItem], needed: int) -> _States:
    """The sums with one block more that are worth keeping, the one that frees most first."""
    freed = np.array([0, *(option.freed for option in block)], np.int64)[:, None] + states.freed
    cost = np.array([0.0, *(option.cost for option in block)])[:, None] + states.cost
    freed, cost = np.minimum(freed, needed).reshape(-1), cost.reshape(-1)
    order = np.lexsort((cost, -freed))
    freed, cost = freed[order], cost[order]
    cheapest_before = np.minimum.accumulate(np.concatenate(([np.inf], cost[:-1])))
    kept = np.flatnonzero(cost < cheapest_before)
    options, before = np.divmod(order[kept], len(states.freed))
    return _States(freed[kept], cost[kept], before, options - 1)


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
