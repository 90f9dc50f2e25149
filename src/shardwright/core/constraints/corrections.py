"""Strategies that an error names in place of one whose entries contradict each other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import gcd

from shardwright.core.constraints.strategy import Entry, OperatorStrategy
from shardwright.core.rules import ShardingRule


def with_equal_counts(
    rule: ShardingRule, inputs: Sequence[Entry], devices: int
) -> Iterator[OperatorStrategy]:
    """The entries of `inputs` with one count for each factor: the largest that is requested, the
    smallest, or what divides all. Layouts stay as they are."""
    requested: dict[str, list[int]] = {}
    for entry, dims in zip(inputs, rule.inputs, strict=False):
        if isinstance(entry, tuple):
            for count, factor in zip(entry, dims, strict=False):
                if factor in rule.factors:
                    possible = gcd(count, rule.capacity[factor], devices)
                    requested.setdefault(factor, []).append(possible)
    choices: tuple[Callable[[list[int]], int], ...] = (max, min, lambda counts: gcd(*counts))
    for choose in choices:
        counts = {factor: choose(each) for factor, each in requested.items()}
        for factor, further in rule.joined.items():
            if factor in counts and further in counts:
                counts[factor] = gcd(counts[factor], counts[further])
        entries = (
            tuple(1 if factor is None else counts.get(factor, 1) for factor in dims)
            if isinstance(entry, tuple)
            else entry
            for entry, dims in zip(inputs, rule.inputs, strict=False)
        )
        yield OperatorStrategy(tuple(entries))
