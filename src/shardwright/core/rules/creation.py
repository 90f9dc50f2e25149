"""Operators that create tensors: constants and random tensors are sharded, others replicated."""

from __future__ import annotations

import torch

from shardwright.core.graph.graph import Op
from shardwright.core.rules.notation import (
    draws_random,
    factor_names,
    overloads,
    schema_parameters,
    sharding_rule,
)
from shardwright.core.rules.rule import ShardingRule, rule_for


@rule_for(*overloads("zeros", "ones", "full", "empty", "rand", "randn", "randint"))
@rule_for(*overloads("new_zeros", "new_ones", "new_full", "new_empty"))
@rule_for(torch.ops.aten.normal.float_float)
def sharded_creation(op: Op) -> ShardingRule:
    """Constant and random tensors, `-> b s`: every device creates its shard; a tensor input, which
    only supplies the dtype, is replicated."""
    size_index = list(schema_parameters(op.target)).index("size")
    # Lowering replaces the sizes only where they are a positional argument.
    by_position = size_index < len(op.args)
    dims = factor_names(op.output) if by_position else (None,) * len(op.output.shape)
    return sharding_rule(
        op,
        [(None,) * len(value.shape) for value in op.inputs],
        (dims,),
        sizes=size_index if by_position else None,
        random=draws_random(op),
    )


@rule_for(*overloads("zeros_like", "ones_like", "full_like", "empty_like"))
def creation_like(op: Op) -> ShardingRule:
    """Tensors with the shape of another tensor, `b s -> b s`: every device creates a tensor with
    the shape of its shard."""
    dims = factor_names(op.output)
    return sharding_rule(op, (dims,), (dims,))


@rule_for(*overloads("arange", "linspace", "logspace", "eye", "randperm", "scalar_tensor"))
@rule_for(*overloads("tril_indices", "triu_indices", "hann_window", "hamming_window"))
def replicated_creation(op: Op) -> ShardingRule:
    """Sequences, windows and permutations, `-> _ _`: every device creates the full tensor;
    consumers slice it without communication.

    A shard of `arange` or `eye` is not a shorter `arange` or `eye`.
    """
    inputs = [(None,) * len(value.shape) for value in op.inputs]
    replicated = (None,) * len(op.output.shape)
    return sharding_rule(op, inputs, (replicated,), random=draws_random(op))
