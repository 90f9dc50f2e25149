"""Softmax and its logarithm: the dimension that is normalised stays whole, all others are free."""

from __future__ import annotations

from shardwright.graph.graph import Op
from shardwright.rules.notation import argument, names, overloads, sharding_rule, without
from shardwright.rules.rule import ShardingRule, rule_for


@rule_for(*overloads("softmax", "_softmax", "log_softmax", "_log_softmax", "_safe_softmax"))
def softmax(op: Op) -> ShardingRule:
    dims = without(names(op.output), argument(op, "dim"))
    return sharding_rule(op, (dims,), (dims,))
