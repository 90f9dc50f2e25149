"""Operators that treat every element alike: their inputs are broadcast to the shape of the output.

Most are found by ATen's own tag `pointwise`; those that lack it are registered here.
"""

from __future__ import annotations

from shardwright.graph.graph import Op
from shardwright.rules.notation import (
    aligned,
    argument,
    draws_random,
    names,
    overloads,
    sharding_rule,
    without,
)
from shardwright.rules.rule import ShardingRule, rule_for
from shardwright.torch_internals.operators import OpOverload, schema_of


@rule_for(
    *overloads("_to_copy", "alias", "clone", "contiguous", "detach", "lift_fresh_copy"),
    *overloads("fill", "zero", "masked_fill", "where", "isclose", "log_sigmoid", "hardswish"),
    *overloads("__and__", "__or__", "__xor__", "bitwise_and", "bitwise_or", "bitwise_xor"),
    *overloads("absolute", "multiply", "divide", "subtract", "negative", "rsub", "not_equal"),
    *overloads(
        "greater", "greater_equal", "less", "less_equal", "special_expit", "fix", "floor_divide"
    ),
    *overloads("arccos", "arcsin", "arctan", "arctan2", "complex", "polar", "conj", "real", "imag"),
)
def pointwise(op: Op) -> ShardingRule | None:
    """Every dimension of the output is a factor; an input lacks those along which it is broadcast.

    None where an output has another shape than the others or the operator writes into an input.
    """
    shape = op.outputs[0].shape
    if isinstance(op.target, OpOverload) and schema_of(op.target).is_mutable:
        return None
    if any(value.shape != shape for value in op.outputs):
        return None
    if any(len(value.shape) > len(shape) for value in op.inputs):
        return None
    dims = names(op.output)
    outputs = (dims,) * len(op.outputs)
    return sharding_rule(op, aligned(op, dims), outputs, random=draws_random(op))


@rule_for(*overloads("to", "type_as"))
def conversion_of_dtype(op: Op) -> ShardingRule:
    """Of a second tensor only dtype and device are read: it stays whole."""
    dims = names(op.output)
    others = [(None,) * len(value.shape) for value in op.inputs[1:]]
    return sharding_rule(op, (dims, *others), (dims,))


@rule_for(*overloads("prelu", "_prelu_kernel"))
def prelu(op: Op) -> ShardingRule:
    """The weight is one number, or one for each channel (dimension 1 of the input)."""
    x, weight = op.inputs
    dims = names(x)
    if len(weight.shape) == len(x.shape):
        return sharding_rule(op, (dims, dims), (dims,))
    channel = dims[1:2] if weight.numel > 1 else (None,) * len(weight.shape)
    return sharding_rule(op, (dims, channel), (dims,))


@rule_for(*overloads("glu"))
def glu(op: Op) -> ShardingRule:
    """Halves of one dimension meet: it stays whole."""
    dims = without(names(op.output), argument(op, "dim"))
    return sharding_rule(op, (dims,), (dims,))


@rule_for(*overloads("bucketize", "searchsorted"))
def bucketize(op: Op) -> ShardingRule | None:
    """Every element looks itself up in one sorted sequence, which stays whole."""
    dims = names(op.output)
    whole = argument(op, "boundaries", argument(op, "sorted_sequence"))
    if len(whole.shape) != 1:
        return None
    inputs = [(None,) if value is whole else dims for value in op.inputs]
    return sharding_rule(op, inputs, (dims,))
