"""Symbolic cost of the double recursion: relative costs that need no hardware data or profile.

For `C[i, j] = sum over k of A[i, k] · B[k, j]` (sizes of the current shard, B the weight) the
published table is

| choice | operator cost |
|---|---|
| cut I | mem_coeff · j·k / 2 |
| cut J | i·k / 2 |
| cut K | i·j / 2 |
| no cut | (least cost of the possible cuts)² / 25 |

This table generalizes to any operator with named factors: a cut costs half of the elements of the
tensors that it leaves unsharded, and `mem_coeff` multiplies the elements of the weight.
Redistribution costs 16 for each element of the current shard.
Source: the double recursion of MindSpore's `recursive_programming`, reconstructed from its logs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

IMPOSSIBLE = sys.float_info.max
"""Cost of an impossible cut, as in MindSpore's log."""

REDISTRIBUTION_PER_ELEMENT = 16
"""Redistribution cost per element of the current shard of a tensor."""

NO_CUT_DIVISOR = 25
"""The cost of no cut is the squared cost of the cheapest cut divided by this number, from published
logs."""


def cut_cost(
    elements: Sequence[int], is_sharded: Sequence[bool], weight: int | None, mem_coeff: float
) -> float:
    """Return the cost of cutting one factor: half of the elements that the cut leaves unsharded.

    Args:
        elements: number of elements of the current shard of each input, then of each output.
        is_sharded: for each tensor whether the cut shards the tensor.
        weight: index of the tensor whose elements `mem_coeff` multiplies; None without a weight.
        mem_coeff: weight of parameter memory: values below 1 favor data parallelism, values above 1
            model parallelism.

    >>> cut_cost((32 * 784, 784 * 512, 32 * 512), (True, False, True), 1, 0.1)
    20070.4
    """
    unsharded = sum(
        mem_coeff * size if index == weight else size
        for index, (size, cut) in enumerate(zip(elements, is_sharded, strict=True))
        if not cut
    )
    return unsharded / 2


def no_cut_cost(costs: Iterable[float]) -> float:
    """Return the cost of replicating an operator.

    Args:
        costs: costs of the possible cuts, whose sizes are divisible.

    >>> round(no_cut_cost((20.48, 4096.0)), 4)
    16.7772
    """
    # A cut of cost 0, as of an element-wise operator, would make replication free as well.
    smallest = min((cost for cost in costs if cost > 0), default=0.0)
    return smallest * smallest / NO_CUT_DIVISOR


def redistribution_cost(elements: int) -> float:
    """Return the cost of redistributing a tensor between two layouts.

    Args:
        elements: number of elements of the current shard.
    """
    return float(REDISTRIBUTION_PER_ELEMENT * elements)


def break_even(cost_i: float, mem_coeff: float, cost_no_cut: float) -> float:
    """Return the `mem_coeff` above which cutting the batch of a matrix product (factor I) is
    cheaper than replicating it.

    Valid if I is the cheapest factor to cut, and neither choice needs a redistribution: the cost of
    cutting I is then proportional to `mem_coeff`, the cost of no cut to its square.

    Args:
        cost_i: total cost of cutting I in the log.
        mem_coeff: `mem_coeff` of the logged search.
        cost_no_cut: total cost of no cut in the log.

    >>> round(break_even(20.48, 0.01, 16.7772), 6)
    0.012207
    """
    return cost_i * mem_coeff / cost_no_cut
