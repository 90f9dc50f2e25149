"""The symbolic cost of the double recursion: relative costs, without hardware or a profile.

For `C[i, j] = sum over k of A[i, k] · B[k, j]` (sizes of the current shard, B the weight) the
published table is

| choice | operator cost |
|---|---|
| cut I | mem_coeff · j·k / 2 |
| cut J | i·k / 2 |
| cut K | i·j / 2 |
| no cut | (least of the costs above that is possible)² / 25 |

which is one statement for any operator with named factors: a cut costs half of what it leaves
whole, and `mem_coeff` weighs the weight. Redistribution costs 16 for each element of the current
shard.
Formulas: the double recursion of MindSpore's `recursive_programming`, as its logs show them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

IMPOSSIBLE = sys.float_info.max
"""The cost of a cut that cannot be made, as it is written in the log."""

REDISTRIBUTION_PER_ELEMENT = 16
"""Cost of each element of a tensor that is left in one way and read in another."""

NO_CUT_DIVISOR = 25


def cut_cost(
    elements: Sequence[int], carries: Sequence[bool], weight: int | None, mem_coeff: float
) -> float:
    """The operator cost of cutting one factor: half of what the cut leaves whole.

    Args:
        elements: elements of the current shard of every tensor, inputs, then outputs.
        carries: for each tensor whether the factor cuts it.
        weight: index of the tensor that `mem_coeff` weighs, or None.
        mem_coeff: below 1 it favors data parallelism, above 1 model parallelism.

    >>> cut_cost((32 * 784, 784 * 512, 32 * 512), (True, False, True), 1, 0.1)
    20070.4
    """
    whole = sum(
        mem_coeff * size if index == weight else size
        for index, (size, cut) in enumerate(zip(elements, carries, strict=True))
        if not cut
    )
    return whole / 2


def no_cut_cost(costs: Iterable[float]) -> float:
    """The operator cost of computing everything on every device.

    Args:
        costs: operator costs of the cuts for which the sizes divide.

    >>> round(no_cut_cost((20.48, 4096.0)), 4)
    16.7772
    """
    least = min((cost for cost in costs if cost > 0), default=0.0)
    return least * least / NO_CUT_DIVISOR


def redistribution_cost(elements: int) -> float:
    """The cost of converting a tensor between two ways of cutting it.

    Args:
        elements: elements of the current shard.
    """
    return float(REDISTRIBUTION_PER_ELEMENT * elements)


def break_even(cost_i: float, mem_coeff: float, cost_no_cut: float) -> float:
    """The `mem_coeff` above which cutting I becomes cheaper than not cutting.

    Holds where the I cut is the least of the operator costs and neither choice redistributes: the
    cost of the I cut grows with `mem_coeff`, that of no cut with its square.

    Args:
        cost_i: total cost of cutting I in the log.
        mem_coeff: the coefficient with which the log was made.
        cost_no_cut: total cost of not cutting in the log.

    >>> round(break_even(20.48, 0.01, 16.7772), 6)
    0.012207
    """
    return cost_i * mem_coeff / cost_no_cut
