"""The cheapest options, at most one for each block, that together free enough memory.

A multiple-choice knapsack, by dynamic programming over states that are not dominated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

MAX_STATES = 4000
"""States after which the exact search gives up in favor of the greedy one."""


@dataclass(frozen=True)
class KnapsackItem:
    """Memory that can be freed at a cost.

    Args:
        freed: bytes.
        cost: in any unit.
    """

    freed: int
    cost: float


class _States(NamedTuple):
    """The states after some blocks that no other dominates, in order of freed bytes, most first.

    Args:
        freed, cost: sums over the blocks so far.
        previous: the index of the state before the last block.
        chosen: the index of the last block's option, or -1.
    """

    freed: npt.NDArray[np.int64]
    cost: npt.NDArray[np.float64]
    previous: npt.NDArray[np.intp]
    chosen: npt.NDArray[np.intp]


def cheapest(blocks: Sequence[Sequence[KnapsackItem]], needed: int) -> list[int] | None:
    """Return for each block the index of the option to take, or -1 for none.

    Exact while there are few states that no other dominates by freeing as much at no more cost; so
    it is where blocks repeat. Else options are taken greedily by cost per byte, and those that turn
    out to be unnecessary are returned.

    Args:
        blocks: the options of each block.
        needed: bytes to free.

    Returns:
        None if all blocks together free fewer than `needed` bytes.
    """
    freeable = sum(max((option.freed for option in block), default=0) for block in blocks)
    if freeable < needed:
        return None
    no_choice = np.full(1, -1)
    states = [_States(np.zeros(1, np.int64), np.zeros(1), no_choice, no_choice)]
    for block in blocks:
        states.append(_extended(states[-1], block, needed))
        # Different blocks have different sums, so that states multiply; equal blocks give few
        # distinct sums.
        if len(states[-1].freed) > MAX_STATES:
            return _by_ratio(blocks, needed)
    # Freed bytes are capped at `needed`, so the first state is the cheapest that frees enough.
    state, chosen = 0, []
    for block_states in reversed(states[1:]):
        chosen.append(int(block_states.chosen[state]))
        state = int(block_states.previous[state])
    return chosen[::-1]


def _extended(states: _States, block: Sequence[KnapsackItem], needed: int) -> _States:
    """The states after one more block."""
    freed = np.array([0, *(option.freed for option in block)], np.int64)[:, None] + states.freed
    cost = np.array([0.0, *(option.cost for option in block)])[:, None] + states.cost
    # Capped: states that free enough differ only in cost, and all but the cheapest are dominated.
    freed, cost = np.minimum(freed, needed).reshape(-1), cost.reshape(-1)
    order = np.lexsort((cost, -freed))
    freed, cost = freed[order], cost[order]
    cheapest_before = np.minimum.accumulate(np.concatenate(([np.inf], cost[:-1])))
    # A state is dominated if one that frees as much costs no more.
    worthwhile = np.flatnonzero(cost < cheapest_before)
    options, previous = np.divmod(order[worthwhile], len(states.freed))
    return _States(freed[worthwhile], cost[worthwhile], previous, options - 1)


def _by_ratio(blocks: Sequence[Sequence[KnapsackItem]], needed: int) -> list[int]:
    chosen = [-1] * len(blocks)
    no_option = KnapsackItem(0, 0.0)
    freed = 0

    def current(number: int) -> KnapsackItem:
        return no_option if chosen[number] < 0 else blocks[number][chosen[number]]

    while freed < needed:
        improvements = [
            (
                (option.cost - current(number).cost) / (option.freed - current(number).freed),
                number,
                index,
            )
            for number, block in enumerate(blocks)
            for index, option in enumerate(block)
            if option.freed > current(number).freed
        ]
        # The least added cost per added byte, also from one option of a block to a larger one.
        _, number, index = min(improvements)
        freed += blocks[number][index].freed - current(number).freed
        chosen[number] = index
    # The last step may free far more than was missing: options that turn out unnecessary are
    # returned, the most expensive first.
    for number in sorted(range(len(blocks)), key=lambda n: -current(n).cost):
        if freed - current(number).freed >= needed:
            freed -= current(number).freed
            chosen[number] = -1
    return chosen
