"""Dropout and the other operators that draw random numbers shaped like their input.

The lowering seeds them by operator, step and shard: the same plan draws the same numbers on each
run, and devices that hold the same shard draw the same. Where a dimension is cut, the numbers are
not those that one device would draw for the whole tensor.
"""

from __future__ import annotations

from shardwright.graph.graph import Op
from shardwright.rules.notation import aligned, call_arguments, names, overloads, sharding_rule
from shardwright.rules.rule import Dims, ShardingRule, rule_for


@rule_for(*overloads("dropout", "native_dropout", "alpha_dropout"))
def dropout(op: Op) -> ShardingRule:
    return _drawing(op, names(op.output), drops_elements(op))


@rule_for(*overloads("feature_dropout", "feature_alpha_dropout"))
def feature_dropout(op: Op) -> ShardingRule:
    """One number for each row and channel, the first two dimensions; the others stay whole."""
    free = names(op.output)[:2]
    return _drawing(op, (*free, *(None,) * (len(op.output.shape) - len(free))), drops_elements(op))


@rule_for(*overloads("bernoulli", "rand_like", "randn_like", "randint_like"))
def draw(op: Op) -> ShardingRule:
    return _drawing(op, names(op.output), random=True)


def drops_elements(op: Op) -> bool:
    """Whether a dropout drops anything: it does not in evaluation and with probability 0."""
    given = call_arguments(op)
    return given["train"] is not False and given["p"] > 0


def _drawing(op: Op, dims: Dims, random: bool) -> ShardingRule:
    return sharding_rule(op, aligned(op, dims), (dims,) * len(op.outputs), random=random)
