"""Operators that make tensors: those filled with one number are made in parts, others whole."""

from __future__ import annotations

from shardwright.graph.graph import Op
from shardwright.rules.notation import (
    draws_random,
    names,
    overloads,
    schema_parameters,
    sharding_rule,
)
from shardwright.rules.rule import ShardingRule, rule_for


@rule_for(*overloads("zeros", "ones", "full", "empty", "rand", "randn", "randint"))
@rule_for(*overloads("new_zeros", "new_ones", "new_full", "new_empty"))
def filled(op: Op) -> ShardingRule:
    """Every device makes its part; a tensor given for its dtype is not cut."""
    place = list(schema_parameters(op.target)).index("size")
    by_position = place < len(op.args)
    dims = names(op.output) if by_position else (None,) * len(op.output.shape)
    return sharding_rule(
        op,
        [(None,) * len(value.shape) for value in op.inputs],
        (dims,),
        sizes=place if by_position else None,
        random=draws_random(op),
    )


@rule_for(*overloads("zeros_like", "ones_like", "full_like", "empty_like"))
def filled_like(op: Op) -> ShardingRule:
    dims = names(op.output)
    return sharding_rule(op, (dims,), (dims,))


@rule_for(*overloads("arange", "linspace", "logspace", "eye", "randperm", "scalar_tensor"))
@rule_for(*overloads("tril_indices", "triu_indices", "hann_window", "hamming_window"))
def made_whole(op: Op) -> ShardingRule:
    """Every device makes all of it; a consumer that is cut takes its part without communication."""
    inputs = [(None,) * len(value.shape) for value in op.inputs]
    whole = (None,) * len(op.output.shape)
    return sharding_rule(op, inputs, (whole,), random=draws_random(op))
