"""Correct the strategy of an operator that requests two different shard counts of one factor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import gcd

from shardwright.core.constraints.strategy import Entry, OperatorStrategy
from shardwright.core.rules import ShardingRule


def strategies_with_equal_counts(
    rule: ShardingRule, inputs: Sequence[Entry], devices: int
) -> Iterator[OperatorStrategy]:
    """Yield three strategies in which all dimensions of a factor have the same shard count.

    The count of a factor is the largest requested count in the first strategy, the smallest in the
    second, and the greatest common divisor in the third. Layouts and None are not changed.

    Args:
        rule: sharding rule of the operator.
        inputs: the entries of the strategy to correct.
        devices: number of devices.
    """
    requested: dict[str, list[int]] = {}
    # Not strict: a `local_map` has no entries for its parameters and buffers.
    for entry, dims in zip(inputs, rule.inputs, strict=False):
        if isinstance(entry, tuple):
            for count, factor in zip(entry, dims, strict=False):
                if factor in rule.factors:
                    # The largest divisor of the requested count that is a valid count.
                    valid_count = gcd(count, rule.capacity[factor], devices)
                    requested.setdefault(factor, []).append(valid_count)
    # In this order, as an error shows the first of them that is valid.
    choices: tuple[Callable[[list[int]], int], ...] = (max, min, lambda counts: gcd(*counts))
    for choose in choices:
        counts = {factor: choose(options) for factor, options in requested.items()}
        # `outer` shards the dimensions of `inner` too: its shard count must divide theirs.
        for outer, inner in rule.joined.items():
            if outer in counts and inner in counts:
                counts[outer] = gcd(counts[outer], counts[inner])
        entries = (
            tuple(1 if factor is None else counts.get(factor, 1) for factor in dims)
            if isinstance(entry, tuple)
            else entry
            for entry, dims in zip(inputs, rule.inputs, strict=False)
        )
        yield OperatorStrategy(tuple(entries))
