"""Elementwise operators, whose inputs are broadcast to the shape of the output.

Most are recognized by ATen's tag `pointwise`; operators without the tag are registered here.
"""

from __future__ import annotations

import torch

from shardwright.core.graph.custom_ops import assigned
from shardwright.core.graph.graph import Op
from shardwright.core.rules.notation import (
    aligned_to_output,
    argument,
    draws_random,
    factor_names,
    overloads,
    sharding_rule,
)
from shardwright.core.rules.rule import ShardingRule, rule_for
from shardwright.core.torch_internals.operators import OpOverload, schema_of

aten = torch.ops.aten


@rule_for(
    assigned,
    *overloads("_to_copy", "alias", "clone", "contiguous", "detach", "lift_fresh_copy"),
    *overloads("fill", "zero", "masked_fill", "where", "isclose", "log_sigmoid", "hardswish"),
    *overloads("__and__", "__or__", "__xor__", "bitwise_and", "bitwise_or", "bitwise_xor"),
    *overloads("absolute", "multiply", "divide", "subtract", "negative", "rsub", "not_equal"),
    *overloads(
        "greater", "greater_equal", "less", "less_equal", "special_expit", "fix", "floor_divide"
    ),
    *overloads("arccos", "arcsin", "arctan", "arctan2", "complex", "polar", "conj", "real", "imag"),
    *overloads("_conj", "resolve_conj", "_neg_view", "resolve_neg"),
    *overloads("fake_quantize_per_tensor_affine"),
    # Gradients in `forward` call these; ATen tags only some operators of a backward pass.
    *overloads("elu_backward", "hardswish_backward", "hardtanh_backward"),
    *overloads("leaky_relu_backward", "softplus_backward"),
)
def pointwise(op: Op) -> ShardingRule | None:
    """Elementwise operator, `b s, s -> b s`: every dimension of the output can be sharded.

    Returns None if the operator mutates an input, if outputs differ in shape, or if an input has
    more dimensions than the output.
    """
    shape = op.outputs[0].shape
    if isinstance(op.target, OpOverload) and schema_of(op.target).is_mutable:
        return None
    if any(value.shape != shape for value in op.outputs):
        return None
    if any(len(value.shape) > len(shape) for value in op.inputs):
        return None
    dims = factor_names(op.output)
    outputs = (dims,) * len(op.outputs)
    return sharding_rule(op, aligned_to_output(op, dims), outputs, random=draws_random(op))


@rule_for(*overloads("to", "type_as"))
def dtype_cast(op: Op) -> ShardingRule:
    """Cast to the dtype and device of another tensor, `b s, _ _ -> b s`: the other tensor is
    replicated."""
    dims = factor_names(op.output)
    others = [(None,) * len(value.shape) for value in op.inputs[1:]]
    return sharding_rule(op, (dims, *others), (dims,))


@rule_for(*overloads("prelu", "_prelu_kernel"))
def prelu(op: Op) -> ShardingRule:
    """PReLU, `b c s, c -> b c s`: the weight has one element per channel (dimension 1), or a single
    element."""
    x, weight = op.inputs
    dims = factor_names(x)
    # `_prelu_kernel` receives a weight that is already reshaped to broadcast.
    if len(weight.shape) == len(x.shape):
        return sharding_rule(op, (dims, dims), (dims,))
    # A single weight is broadcast to all channels.
    channel = dims[1:2] if weight.numel > 1 else (None,) * len(weight.shape)
    return sharding_rule(op, (dims, channel), (dims,))


@rule_for(*overloads("fake_quantize_per_channel_affine"))
def fake_quantize(op: Op) -> ShardingRule:
    """Rounding to quantized values, `b c s, c, c -> b c s`: scale and zero point have one element
    per channel."""
    dims = factor_names(op.output)
    channel = (dims[argument(op, "axis")],)
    return sharding_rule(op, (dims, channel, channel), (dims,))


@rule_for(aten.isin.Tensor_Tensor)
def is_in(op: Op) -> ShardingRule:
    """Membership in a set, `b s, _ -> b s`: elements can be sharded; the set cannot."""
    dims = factor_names(op.output)
    return sharding_rule(op, (dims, (None,) * len(op.inputs[1].shape)), (dims,))


@rule_for(*overloads("bucketize", "searchsorted"))
def bucketize(op: Op) -> ShardingRule:
    """Search in sorted boundaries, `b s, _ -> b s`: elements can be sharded; boundaries cannot.

    `searchsorted` with one sequence per row is `b _, b s -> b s`.
    """
    dims = factor_names(op.output)
    searched = argument(op, "self")
    rows = argument(op, "boundaries", argument(op, "sorted_sequence")).shape[:-1]
    sequence = (*dims[: len(rows)], None)
    inputs = [dims if value is searched else sequence for value in op.inputs]
    return sharding_rule(op, inputs, (dims,))
