"""Find the cheapest options, at most one per block, that free a given number of bytes in total.

This is a multiple-choice knapsack problem, solved by dynamic programming over Pareto-optimal
states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

MAX_STATES = 4000
"""Maximum number of Pareto-optimal states of the exact search; if there are more, options are
chosen greedily."""


@dataclass(frozen=True)
class KnapsackItem:
    """An option that frees memory at a cost.

    Args:
        freed: bytes that the option frees.
        cost: cost of the option, in the same unit for all items.
    """

    freed: int
    cost: float


class _ParetoFrontier(NamedTuple):
    """Pareto-optimal choices of options for a prefix of the blocks, by freed bytes, descending.

    Args:
        freed, cost: freed bytes and cost of each state, as sums over its blocks.
        previous: index of the state without the last block, for each state.
        chosen: index of the option of the last block, for each state; -1 for none.
    """

    freed: npt.NDArray[np.int64]
    cost: npt.NDArray[np.float64]
    previous: npt.NDArray[np.intp]
    chosen: npt.NDArray[np.intp]


def cheapest(blocks: Sequence[Sequence[KnapsackItem]], needed: int) -> list[int] | None:
    """Return for each block the index of its option, or -1 for none, with the least total cost.

    The result is optimal if at most `MAX_STATES` states remain after each block, as with repeated
    blocks; a state is dropped if another state frees as much at no more cost. Otherwise options are
    taken greedily by cost per byte, and options that turn out to be unnecessary are dropped at the
    end.

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
    states = [_ParetoFrontier(np.zeros(1, np.int64), np.zeros(1), no_choice, no_choice)]
    for block in blocks:
        states.append(_add_block_to_frontier(states[-1], block, needed))
        # The number of states multiplies with each different block; equal blocks give few distinct
        # sums.
        if len(states[-1].freed) > MAX_STATES:
            return _choose_greedily(blocks, needed)
    # Freed bytes are capped at `needed`, so the first state is the cheapest that frees enough.
    state, chosen = 0, []
    for block_states in reversed(states[1:]):
        chosen.append(int(block_states.chosen[state]))
        state = int(block_states.previous[state])
    return chosen[::-1]


def _add_block_to_frontier(
    states: _ParetoFrontier, block: Sequence[KnapsackItem], needed: int
) -> _ParetoFrontier:
    """Return the Pareto-optimal states of `states` combined with the options of one more block."""
    freed = np.array([0, *(option.freed for option in block)], np.int64)[:, None] + states.freed
    cost = np.array([0.0, *(option.cost for option in block)])[:, None] + states.cost
    # Capped: states that free enough differ only in cost, and all but the cheapest are dominated.
    freed, cost = np.minimum(freed, needed).reshape(-1), cost.reshape(-1)
    # `lexsort` sorts by its last key first: by freed bytes, descending, then by cost.
    order = np.lexsort((cost, -freed))
    freed, cost = freed[order], cost[order]
    least_cost_before = np.minimum.accumulate(np.concatenate(([np.inf], cost[:-1])))
    # A state is dominated if another state that frees as much costs no more.
    undominated = np.flatnonzero(cost < least_cost_before)
    # Row 0 of the sums is no option, hence `options - 1`.
    options, previous = np.divmod(order[undominated], len(states.freed))
    return _ParetoFrontier(freed[undominated], cost[undominated], previous, options - 1)


def _choose_greedily(blocks: Sequence[Sequence[KnapsackItem]], needed: int) -> list[int]:
    """Return for each block the index of its option, or -1 for none, chosen greedily.

    The next option taken has the least added cost per added freed byte.

    Args:
        needed: bytes to free; all blocks together free at least as many.
    """
    chosen = [-1] * len(blocks)
    no_option = KnapsackItem(0, 0.0)
    freed = 0

    def current_option(block: int) -> KnapsackItem:
        return no_option if chosen[block] < 0 else blocks[block][chosen[block]]

    while freed < needed:
        # An option of a block may also be replaced by one that frees more.
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
    # The last option may free far more than was missing: options that turn out to be unnecessary
    # are dropped, the most expensive first.
    for block in sorted(range(len(blocks)), key=lambda n: -current_option(n).cost):
        if freed - current_option(block).freed >= needed:
            freed -= current_option(block).freed
            chosen[block] = -1
    return chosen
