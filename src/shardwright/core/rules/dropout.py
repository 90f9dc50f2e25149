"""Dropout and other operators that draw random numbers in the shape of their input.

Lowering seeds each call by operator, step and shard: a plan draws the same numbers on every run,
and all devices with the same shard draw the same numbers. The numbers differ from the numbers that
a single device would draw for the full tensor.
"""

from __future__ import annotations

import torch

from shardwright.core.graph.graph import Op
from shardwright.core.rules.notation import (
    aligned_to_output,
    call_arguments,
    factor_names,
    overloads,
    sharding_rule,
)
from shardwright.core.rules.rule import Dims, ShardingRule, rule_for


@rule_for(*overloads("dropout", "native_dropout", "alpha_dropout"))
def dropout(op: Op) -> ShardingRule:
    """Dropout, `b s -> b s`: every dimension can be sharded."""
    # Without an effect nothing is drawn, and the program needs no seed.
    return _build_elementwise_random_rule(op, factor_names(op.output), is_active_dropout(op))


@rule_for(*overloads("feature_dropout", "feature_alpha_dropout"))
def feature_dropout(op: Op) -> ShardingRule:
    """Dropout of channels, `b s _ -> b s _`: only the dimensions of samples and channels, the first
    two, can be sharded.

    With another dimension sharded, devices would drop different channels of one sample.
    """
    free = factor_names(op.output)[:2]
    return _build_elementwise_random_rule(
        op, (*free, *(None,) * (len(op.output.shape) - len(free))), is_active_dropout(op)
    )


@rule_for(torch.ops.aten.normal.Tensor_Tensor, torch.ops.aten.normal.Tensor_float)
@rule_for(torch.ops.aten.normal.float_Tensor)
@rule_for(*overloads("bernoulli", "rand_like", "randn_like", "randint_like"))
@rule_for(*overloads("normal_functional", "uniform", "exponential", "cauchy", "log_normal"))
@rule_for(*overloads("geometric", "random", "poisson", "binomial", "_standard_gamma"))
def random_like(op: Op) -> ShardingRule:
    """Random tensors in the shape of an input, `b s -> b s`: every device draws the numbers of its
    shard."""
    return _build_elementwise_random_rule(op, factor_names(op.output), random=True)


@rule_for(*overloads("multinomial", "_sample_dirichlet"))
def random_rows(op: Op) -> ShardingRule:
    """Draws from the distribution of each row, `b n -> b k`: only rows can be sharded."""
    (rows,) = op.inputs
    dims = (*factor_names(op.output)[: len(rows.shape) - 1], None)
    return sharding_rule(op, (dims,), (dims,), random=True)


def is_active_dropout(op: Op) -> bool:
    """Whether a dropout operator drops elements: in training mode, with a probability above 0."""
    arguments = call_arguments(op)
    # `native_dropout` has train=None, which means that it drops.
    return arguments["train"] is not False and arguments["p"] > 0


def _build_elementwise_random_rule(op: Op, dims: Dims, random: bool) -> ShardingRule:
    return sharding_rule(op, aligned_to_output(op, dims), (dims,) * len(op.outputs), random=random)
