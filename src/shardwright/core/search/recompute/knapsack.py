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
"""Maximum number of undominated states of the exact search; with more, options are chosen
greedily."""


@dataclass(frozen=True)
class KnapsackItem:
    """Memory that can be freed at a cost.

    Args:
        freed: bytes freed.
        cost: cost of freeing them, in the same unit for all items.
    """

    freed: int
    cost: float


class _States(NamedTuple):
    """Undominated choices of options for the first blocks, by freed bytes in descending order.

    Args:
        freed, cost: for each state the sums over its blocks.
        previous: for each state the index of the state before its last block.
        chosen: for each state the index of its last block's option, or -1 for none.
    """

    freed: npt.NDArray[np.int64]
    cost: npt.NDArray[np.float64]
    previous: npt.NDArray[np.intp]
    chosen: npt.NDArray[np.intp]


def cheapest(blocks: Sequence[Sequence[KnapsackItem]], needed: int) -> list[int] | None:
    """Return for each block the index of the option to take, or -1 for none.

    The result is optimal if at most `MAX_STATES` states remain after each block, as with repeated
    blocks; a state is dropped if another frees as much at no more cost. Otherwise options are taken
    greedily by cost per byte, and those that turn out to be unnecessary are dropped at the end.

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
        states.append(_states_with_block(states[-1], block, needed))
        # Different blocks have different sums, so that states multiply; equal blocks give few
        # distinct sums.
        if len(states[-1].freed) > MAX_STATES:
            return _choose_greedily(blocks, needed)
    # Freed bytes are capped at `needed`, so the first state is the cheapest that frees enough.
    state, chosen = 0, []
    for block_states in reversed(states[1:]):
        chosen.append(int(block_states.chosen[state]))
        state = int(block_states.previous[state])
    return chosen[::-1]


def _states_with_block(states: _States, block: Sequence[KnapsackItem], needed: int) -> _States:
    """Return the undominated states after one more block."""
    freed = np.array([0, *(option.freed for option in block)], np.int64)[:, None] + states.freed
    cost = np.array([0.0, *(option.cost for option in block)])[:, None] + states.cost
    # Capped: states that free enough differ only in cost, and all but the cheapest are dominated.
    freed, cost = np.minimum(freed, needed).reshape(-1), cost.reshape(-1)
    order = np.lexsort((cost, -freed))
    freed, cost = freed[order], cost[order]
    least_cost_before = np.minimum.accumulate(np.concatenate(([np.inf], cost[:-1])))
    # A state is dominated if one that frees as much costs no more.
    undominated = np.flatnonzero(cost < least_cost_before)
    # Row 0 of the sums is no option, hence `options - 1`.
    options, previous = np.divmod(order[undominated], len(states.freed))
    return _States(freed[undominated], cost[undominated], previous, options - 1)


def _choose_greedily(blocks: Sequence[Sequence[KnapsackItem]], needed: int) -> list[int]:
    """Return for each block the index of an option, or -1, by the least added cost per added byte.

    Args:
        needed: bytes to free; all blocks together free at least as many.
    """
    chosen = [-1] * len(blocks)
    no_option = KnapsackItem(0, 0.0)
    freed = 0

    def current_option(block: int) -> KnapsackItem:
        return no_option if chosen[block] < 0 else blocks[block][chosen[block]]

    while freed < needed:
        # From one option of a block to a larger one counts as well.
        improvements = [
            (
                (option.cost - current_option(block).cost)
                / (option.freed - current_option(block).freed),
                block,
                index,
            )
            for block, options in enumerate(blocks)
            for index, option in enumerate(options)
            if option.freed > current_option(block).freed
        ]
        _, block, index = min(improvements)
        freed += blocks[block][index].freed - current_option(block).freed
        chosen[block] = index
    # The last step may free far more than was missing: options that turn out to be unnecessary are
    # dropped, the most expensive first.
    for block in sorted(range(len(blocks)), key=lambda n: -current_option(n).cost):
        if freed - current_option(block).freed >= needed:
            freed -= current_option(block).freed
            chosen[block] = -1
    return chosen
