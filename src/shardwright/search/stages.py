"""Cuts a model into parts of nearly equal work, one after the other.

The work of a part is the multiply-adds of its main operators and the elements of its parameters.
Of the cuts whose largest part is at most a tenth above the least possible (a hundredth, where the
work is known in seconds), the one that lets the fewest bytes cross is taken: between two layers of
a transformer one value crosses, within one two.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import prod

from shardwright.errors import StrategyError
from shardwright.graph.graph import Graph, Kind, Op
from shardwright.rules import rule_of

TOLERANCE = 0.1
"""By how much the largest part may exceed the least possible, for fewer bytes that cross."""

TOLERANCE_OF_SECONDS = 0.01
"""Likewise where the work is known in seconds: all micro-batches wait for the slowest part, and
sending is short beside it."""


def balanced(graph: Graph, count: int, work: Sequence[float] | None = None) -> dict[str, int]:
    """For each operator the number of its part, of `count` parts of nearly equal work.

    Args:
        work: of each operator, in seconds; by default its multiply-adds and the elements of its
            parameters.

    Raises:
        StrategyError: if there are fewer operators that work than parts.
    """
    weights = list(work) if work is not None else operator_work(graph)
    able = sum(weight > 0 for weight in weights)
    if able < count:
        raise StrategyError(
            f"the model cannot be cut into {count} parts: only {able} of its operators have"
            f" parameters or multiply; use at most {able} stages, or name them with stage_config"
        )
    total = [0.0]
    for weight in weights:
        total.append(total[-1] + weight)
    tolerance = TOLERANCE if work is None else TOLERANCE_OF_SECONDS
    limit = (1 + tolerance) * _least_largest(total, weights, count)
    ends = _cheapest_ends(total, _crossing_bytes(graph), count, limit)
    return {op.name: bisect_left(ends, index + 1) for index, op in enumerate(graph.ops)}


def operator_work(graph: Graph) -> list[float]:
    """Multiply-adds of each main operator, and of any the parameters that it is first to read."""
    seen = set()
    found = []
    for op in graph.ops:
        fresh = {v for v in op.inputs if v.kind is Kind.PARAMETER and v not in seen}
        seen |= fresh
        found.append(float(_multiply_adds(op) + sum(value.numel for value in fresh)))
    return found


def _multiply_adds(op: Op) -> int:
    """The product of the sizes of all dimensions of a main operator, those it sums included."""
    rule = rule_of(op)
    if rule is None or rule.main is None:
        return 0
    sizes: dict[str, int] = {}
    for dims, value in zip((*rule.inputs, *rule.outputs), (*op.inputs, *op.outputs), strict=True):
        for factor, size in zip(dims, value.shape, strict=True):
            if factor is not None:
                sizes[factor] = max(sizes.get(factor, 1), size)
    return prod(sizes.values())


def _least_largest(total: Sequence[float], weights: Sequence[float], count: int) -> float:
    """The least weight of the heaviest of `count` contiguous parts, to one in a million."""
    low, high = max(max(weights), total[-1] / count), total[-1]
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        parts, filled = 1, 0.0
        for weight in weights:
            if filled + weight > middle:
                parts, filled = parts + 1, 0.0
            filled += weight
        low, high = (low, middle) if parts <= count else (middle, high)
    return high


def _crossing_bytes(graph: Graph) -> list[int]:
    """For each place between two operators (place `i` lies before operator `i`) the bytes of the
    values that are made before it and read after it."""
    numbers = {op.name: index for index, op in enumerate(graph.ops)}
    change = [0] * (len(graph.ops) + 2)
    for index, op in enumerate(graph.ops):
        for value in op.outputs:
            readers = [numbers[reader.name] for reader, _ in graph.consumers[value]]
            if readers:
                change[index + 1] += value.numel * value.itemsize
                change[max(readers) + 1] -= value.numel * value.itemsize
    bytes_at, here = [], 0
    for step in change[: len(graph.ops) + 1]:
        here += step
        bytes_at.append(here)
    return bytes_at


def _cheapest_ends(
    total: Sequence[float], crossing: Sequence[int], count: int, limit: float
) -> list[int]:
    """Where each of `count` parts ends, none heavier than `limit` and none without work, so that
    the fewest bytes cross."""
    places = len(total)
    never = float("inf")
    best: list[float] = [0.0] + [never] * (places - 1)
    back: list[list[int]] = []
    for part in range(count):
        reached, came = [never] * places, [0] * places
        for start in range(places):
            # What is left must fit into the parts that are left.
            left = total[-1] - total[start]
            if best[start] == never or left > (count - part) * limit * (1 + 1e-9):
                continue
            for end in range(start + 1, places):
                weight = total[end] - total[start]
                if weight > limit * (1 + 1e-9):
                    break
                cost = best[start] + (crossing[end] if part < count - 1 else 0)
                if weight > 0 and cost < reached[end]:
                    reached[end], came[end] = cost, start
        best = reached
        back.append(came)
    ends = [places - 1]
    for came in reversed(back[1:]):
        ends.append(came[ends[-1]])
    return ends[::-1]
