"""FLOPs and bytes of one operator, forward and backward.

A matrix product takes two FLOPs (multiply and add) for each combination of its factors, and as many
for the gradient of each input. All other operators are memory-bound: forward reads inputs and
writes outputs; backward reads inputs and gradients of outputs and writes gradients of inputs. Views
move no bytes. For an operator without a rule, PyTorch's FLOP counter is used, with at least one
FLOP per element read or written.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Literal

import torch
from torch.utils.flop_counter import FlopCounterMode

from shardwright.core.graph.custom_ops import (
    embedding_bag,
    experts,
    masked_attention,
    padded_convolution,
    windowed_attention,
)
from shardwright.core.graph.graph import Op, Value
from shardwright.core.graph.local_map import LocalCall
from shardwright.core.rules import rule_of
from shardwright.core.rules.notation import call_arguments, overloads
from shardwright.core.rules.rule import ShardingRule
from shardwright.core.torch_internals.operators import OpOverload, schema_of

aten = torch.ops.aten

ATTENTION_BACKWARD = 2.5
"""FLOPs of the backward pass of fused attention per forward FLOP: five matrix products instead of
two, as scores are recomputed (Dao et al., "FlashAttention", 2022; `torch.utils.flop_counter` also
counts 2.5)."""


WorkCategory = Literal["attention", "matrix products", "other operators"]

MemoryTraffic = Literal["norm", "pointwise", "routing", "other"]
"""Types of kernels whose memory traffic depends on the software: a norm may be composed of several
operators, one kernel may compute several element-wise operators, and a kernel that sends tokens may
also sort them by expert."""


MovedBytes = tuple[tuple[MemoryTraffic, int, frozenset[str]], ...]
"""Memory traffic of an operator by type of kernel, as tuples of: the type, the bytes that kernels
of this type read and write, and the factors whose sharding divides these bytes."""


@dataclass(frozen=True)
class Work:
    """FLOPs and bytes of one unsharded operator.

    Args:
        dtype: dtype of the computation.
        forward_flops, backward_flops: FLOPs of matrix products; all FLOPs for an operator without a
            rule.
        forward_bytes, backward_bytes: (bytes, factors that shard the tensor) for each tensor that
            is read or written.
        forward_moved, backward_moved: bytes read and written by kernels beside the matrix products
            of the operator, such as kernels that sort tokens by expert.
        num_gradients: number of inputs whose gradients the backward pass computes.
        product_sizes: sizes m, n and k of a matrix product, each with the factors that shard it;
            empty for other operators. For attention, the mean number of keys of a query and the
            head size.
        category: type of operator, such as attention, under which reports list the FLOPs.
        traffic: type of kernel, which selects the `Device` field that scales the memory traffic.
    """

    dtype: torch.dtype
    forward_flops: float
    backward_flops: float
    forward_bytes: tuple[tuple[int, frozenset[str]], ...]
    backward_bytes: tuple[tuple[int, frozenset[str]], ...]
    num_gradients: int
    forward_moved: MovedBytes = ()
    backward_moved: MovedBytes = ()
    product_sizes: tuple[tuple[float, frozenset[str]], ...] = ()
    category: WorkCategory = "other operators"
    traffic: MemoryTraffic = "other"


def work_of(op: Op) -> Work:
    """Return the FLOPs and bytes of `op`, cached by rule and by the tensors with gradients."""
    rule = rule_of(op)
    cached: tuple[ShardingRule | None, Work] | None = op.cache.get("work_of")
    # The rule is another one after a user has registered it.
    if cached is None or cached[0] is not rule:
        needs_gradient = tuple(value.requires_grad for value in op.inputs)
        differentiable = any(value.requires_grad for value in op.outputs)
        if rule is None:
            work = _compute_work(op, None, needs_gradient, differentiable)
        else:
            work = _cached_work(_WorkCacheKey(id(rule), needs_gradient, differentiable, rule, op))
        cached = op.cache["work_of"] = rule, work
    return cached[1]


@dataclass(frozen=True, slots=True)
class _WorkCacheKey:
    """Cache key of an operator: the identity of its rule, and which of its tensors need
    gradients."""

    rule_id: int
    needs_gradient: tuple[bool, ...]
    differentiable: bool
    # Keeps the rule alive, so that its id is not reused while the cache has this key.
    rule: ShardingRule = field(compare=False)
    op: Op = field(compare=False)


@lru_cache(maxsize=1 << 14)
def _cached_work(key: _WorkCacheKey) -> Work:
    return _compute_work(key.op, key.rule, key.needs_gradient, key.differentiable)


def _compute_work(
    op: Op, rule: ShardingRule | None, needs_gradient: tuple[bool, ...], differentiable: bool
) -> Work:
    inputs, outputs = _tensor_bytes(op, rule)
    read = inputs
    # A lookup reads only the indexed rows of the table.
    if op.target in _LOOKUPS:
        (_, features), (_, index_factors) = inputs[:2]
        rows = op.inputs[1].numel * op.inputs[0].shape[1] * op.inputs[0].itemsize
        # Cutting features or indices divides the looked-up rows; cutting the vocabulary does not.
        read = [*inputs[1:], (rows, features & outputs[0][1] | index_factors)]
    forward = () if is_view(op) else (*read, *outputs)
    # Without a differentiable output, as under `no_grad`, autograd never reaches the inputs.
    num_gradients = sum(needs_gradient) if differentiable else 0
    backward: tuple[tuple[int, frozenset[str]], ...] = ()
    # The gradients of outputs have the sizes of the outputs.
    if num_gradients and not is_view(op):
        gradients = [tensor for tensor, needs in zip(inputs, needs_gradient, strict=True) if needs]
        backward = (*read, *outputs, *gradients)
    flops = forward_flops(op, rule)
    category: WorkCategory = "matrix products" if flops else "other operators"
    if rule is None and not is_view(op):
        flops = max(flops, float(sum(value.numel for value in (*op.inputs, *op.outputs))))
    # A product has one gradient product for each operand that needs a gradient. The gradients of
    # tensors that are added to the product are sums.
    operands = _operands_of_product(op)
    backward_ratio: float = sum(needs_gradient[operands]) if differentiable else 0
    moved: tuple[MovedBytes, MovedBytes] = (), ()
    if op.target in _ATTENTION:
        backward_ratio = ATTENTION_BACKWARD
    elif isinstance(op.target, LocalCall):
        # Each product has two gradients, whatever the number of parameters.
        backward_ratio = 2.0
    elif op.target is experts and rule is not None:
        # The gradients of tokens take as many FLOPs as those of the experts' matrices.
        backward_ratio = any(needs_gradient[:3]) + any(needs_gradient[3:])
        moved = _kernel_bytes_of_experts(op, rule)
    return Work(
        dtype=op.output.dtype if op.outputs else torch.float32,
        forward_flops=flops,
        backward_flops=backward_ratio * flops if num_gradients else 0.0,
        forward_bytes=forward,
        backward_bytes=backward,
        num_gradients=num_gradients,
        forward_moved=moved[0],
        backward_moved=moved[1] if num_gradients else (),
        product_sizes=_matmul_dims(op, rule, flops),
        category="attention" if op.target in _ATTENTION else category,
        traffic=_memory_traffic_type(op),
    )


def _operands_of_product(op: Op) -> slice:
    """Return the slice of `op.inputs` that a matrix product multiplies, without the addend of
    `addmm`."""
    return slice(int(op.target in _WITH_ADDED_TENSOR), None)


def _memory_traffic_type(op: Op) -> MemoryTraffic:
    if op.target in _NORMS:
        return "norm"
    is_pointwise = isinstance(op.target, OpOverload) and torch.Tag.pointwise in op.target.tags
    return "pointwise" if is_pointwise or op.target in _FUSED_WITH_POINTWISE else "other"


def _matmul_dims(
    op: Op, rule: ShardingRule | None, flops: float
) -> tuple[tuple[float, frozenset[str]], ...]:
    """Return the sizes m, n and k of a matrix product, each with the factors that shard it.

    A convolution counts as the product to which im2col lowers it. Attention has the mean number of
    keys of a query and the head size instead; other operators have no sizes.
    """
    if op.target in _ATTENTION:
        head_size = float(call_arguments(op)["query"].shape[-1])
        return (_mean_num_keys(op), frozenset()), (head_size, frozenset())
    # A recurrent layer has several products in each time step, with no common m, n and k.
    if rule is None or not flops or op.target in _RECURRENT or len(op.inputs) < 2:
        return ()
    # As many products as the user's code has.
    if isinstance(op.target, LocalCall):
        return ()
    if op.target is experts:
        expert_sizes = _expert_matmul_dims(op)
        return tuple(
            zip(
                expert_sizes,
                (_factors_of_first_input(rule), frozenset("i"), frozenset[str]()),
                strict=True,
            )
        )
    lhs_factors, rhs_factors, out = (
        frozenset(name for name in dims if name is not None)
        for dims in (*rule.inputs[_operands_of_product(op)][:2], rule.outputs[0])
    )
    # By einsum's roles: in all three tensors a batch of products, in the right and the result n.
    batch, columns = lhs_factors & rhs_factors & out, (rhs_factors & out) - lhs_factors
    batch_size, num_columns = (
        prod(rule.capacity[name] for name in names) for names in (batch, columns)
    )
    results = op.output.numel
    return (
        # m: results per product and column; k: multiplications per result, at two FLOPs each.
        (results / batch_size / num_columns, (lhs_factors & out) - rhs_factors),
        (float(num_columns), columns),
        (flops / 2 / results, (lhs_factors & rhs_factors) - out),
    )


def _tensor_bytes(
    op: Op, rule: ShardingRule | None
) -> tuple[list[tuple[int, frozenset[str]]], list[tuple[int, frozenset[str]]]]:
    """Return (bytes, factors that shard the tensor) of each input, and of each output, of `op`."""

    def tensor(value: Value, dims: tuple[str | None, ...]) -> tuple[int, frozenset[str]]:
        factors = rule.factors_of(dims) if rule is not None else frozenset[str]()
        return value.numel * value.itemsize, factors

    # Without a rule no factor shards a tensor: every device reads and writes all of it.
    no_dims: tuple[tuple[str | None, ...], ...] = ((),) * max(len(op.inputs), len(op.outputs))
    ins = rule.inputs if rule is not None else no_dims[: len(op.inputs)]
    outs = rule.outputs if rule is not None else no_dims[: len(op.outputs)]
    return (
        [tensor(v, d) for v, d in zip(op.inputs, ins, strict=True)],
        [tensor(v, d) for v, d in zip(op.outputs, outs, strict=True)],
    )


def is_view(op: Op) -> bool:
    """Whether the output of `op` is a view of an input, according to the ATen schema."""
    if not isinstance(op.target, OpOverload) or not op.inputs:
        return False
    # An operator that writes in place aliases an input too, but is no view.
    returns = schema_of(op.target).returns
    aliases = [r.alias_info is not None and not r.alias_info.is_write for r in returns]
    # `to` and similar operators share memory only where they do not change the dtype.
    return any(aliases) and op.output.dtype == op.inputs[0].dtype


def forward_flops(op: Op, rule: ShardingRule | None) -> float:
    """Return the forward FLOPs of the matrix products of `op`, unsharded.

    Args:
        rule: sharding rule of `op`; if None, PyTorch's counter counts all FLOPs of `op`.
    """
    if op.target in _RECURRENT:
        return _recurrent_layer_flops(op)
    if rule is None:
        return _count_flops_with_torch(op)
    if op.target in _ATTENTION:
        return _attention_flops(op)
    if op.target in _CONVOLUTIONS:
        return _convolution_flops(op)
    if op.target is experts:
        return _expert_flops(op)
    if op.target in _PRODUCTS or str(op.target) in _PRODUCTS_BY_NAME:
        factors = {d for dims in rule.inputs for d in dims if d is not None}
        return 2.0 * prod(rule.capacity[d] for d in factors)
    if isinstance(op.target, LocalCall):
        return _count_flops_with_torch(op) if op.target.flops is None else op.target.flops
    # Other ATen operators have no matrix products; users' own may have a registered formula.
    is_custom = isinstance(op.target, OpOverload) and op.target.namespace != "aten"
    return _count_flops_with_torch(op) if is_custom or op.target in _COUNTED_BY_PYTORCH else 0.0


def _count_flops_with_torch(op: Op) -> float:
    """Return the forward FLOPs of `op` by PyTorch's counter; 0 if `op` does not run on the meta
    device.

    The counter decomposes operators and uses the formulas that users register with
    `torch.utils.flop_counter.register_flop_formula`.
    """
    args, kwargs = op.arguments(lambda v: torch.empty(v.shape, dtype=v.dtype, device="meta"))
    counter = FlopCounterMode(display=False)
    try:
        with counter:
            op.target(*args, **kwargs)
    except (NotImplementedError, RuntimeError):
        # The operator has no kernel for the meta device, or its kernel reads values.
        return 0.0
    return float(counter.get_total_flops())


def _attention_flops(op: Op) -> float:
    """Return the forward FLOPs of attention, 2·b·h·s·t·(d + e), for batch size b, h heads, s
    queries, t keys per query on average, and head dimensions d of keys and e of values."""
    arguments = call_arguments(op)
    query, value = arguments["query"], arguments["value"]
    keys = _mean_num_keys(op)
    flops: float = 2.0 * query.numel * keys
    flops += 2.0 * (query.numel // query.shape[-1]) * keys * value.shape[-1]
    return flops


def _mean_num_keys(op: Op) -> float:
    """Return the mean number of keys that a query attends to: half of all keys if attention is
    causal."""
    arguments = call_arguments(op)
    rows, keys = arguments["query"].shape[-2], float(arguments["key"].shape[-2])
    if arguments.get("window") is None:
        causal = arguments.get("is_causal") or arguments.get("causal")
        return keys / 2 if causal else keys
    if not arguments.get("causal", True):
        return keys
    # The first rows see fewer keys than the window: row i sees min(i + 1, window).
    window = min(arguments["window"], rows)
    return float(window - window * (window - 1) / 2 / rows)


def _convolution_flops(op: Op) -> float:
    """Return the FLOPs of a convolution: one filter per output element, or per input element of a
    transposed convolution."""
    arguments = call_arguments(op)
    weight, transposed = arguments["weight"], arguments.get("transposed", op.target in _TRANSPOSED)
    elements = (op.inputs[0] if transposed else op.output).numel
    # Dimension 0 has one filter each: an output channel, or an input channel if transposed.
    filters: int = weight.numel // weight.shape[0]
    return 2.0 * elements * filters


def _expert_flops(op: Op) -> float:
    """Return the forward FLOPs of a mixture of experts: each token is multiplied by the matrices of
    its experts."""
    arguments = call_arguments(op)
    matrices = arguments["gate_up"].numel + arguments["down"].numel
    # Dimension 0 of the stacked matrices is the expert.
    expert_numel = matrices / arguments["down"].shape[0]
    return float(2.0 * arguments["ids"].numel * expert_numel)


def _expert_matmul_dims(op: Op) -> tuple[float, float, float]:
    """Return m, n and k of the first matrix product of one expert, with balanced routing."""
    arguments = call_arguments(op)
    num_experts, *_, hidden = arguments["gate_up"].shape
    return (
        arguments["ids"].numel / num_experts,
        arguments["gate_up"].numel / num_experts / hidden,
        hidden,
    )


def _kernel_bytes_of_experts(op: Op, rule: ShardingRule) -> tuple[MovedBytes, MovedBytes]:
    """Return the bytes that the kernels of a mixture of experts read and write to route tokens and
    to compute activation functions, as a (forward, backward) pair.

    A token has one copy per expert. For each element of a copy, forward sorts copies by expert (1
    read, 1 write), weights the outputs (1 read, 1 write) and adds them per token (2 reads, 1
    write); backward also computes the gradient of the weights (2 reads). Between the products,
    SwiGLU has 3 reads and 2 writes per element of the inner width, and its gradient 6 and 3.
    """
    arguments = call_arguments(op)
    itemsize, inner = op.output.itemsize, arguments["down"].shape[-1]
    # Sharding the experts divides the copies too, as routing is assumed to be balanced.
    copies, factors = arguments["ids"].numel * itemsize, _factors_of_first_input(rule) | {"e"}
    hidden = op.output.shape[-1]

    def moved_bytes(by_hidden: int, by_inner: int) -> MovedBytes:
        return (
            ("routing", by_hidden * copies * hidden, factors),
            ("pointwise", by_inner * copies * inner, factors | {"i"}),
        )

    return moved_bytes(7, 5), moved_bytes(9, 9)


def _factors_of_first_input(rule: ShardingRule) -> frozenset[str]:
    return frozenset(name for name in rule.inputs[0] if name is not None)


def _recurrent_layer_flops(op: Op) -> float:
    """Return the forward FLOPs of a recurrent layer, which multiplies each sample of each time step
    by every weight matrix."""
    x = op.inputs[0]
    # Without biases, of one dimension, and initial states, of three.
    matrices = sum(v.numel for v in op.inputs[1:] if len(v.shape) == 2)
    return 2.0 * (x.numel // x.shape[-1]) * matrices


_RECURRENT = {aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input}
_COUNTED_BY_PYTORCH = {aten.addbmm.default, aten.bilinear.default}
_LOOKUPS = {aten.embedding.default, embedding_bag}
_ATTENTION = {aten.scaled_dot_product_attention.default, masked_attention, windowed_attention}
_NORMS = {
    *(aten.layer_norm.default, aten.native_layer_norm.default, aten.rms_norm.default),
    *(aten.group_norm.default, aten.native_group_norm.default),
}
_FUSED_WITH_POINTWISE = {aten.cat.default, *overloads("to", "_to_copy")}
"""Operators without the tag `pointwise` that are fused with element-wise operators."""
_TRANSPOSED = set(overloads("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"))
_CONVOLUTIONS = {
    *_TRANSPOSED,
    *overloads("conv1d", "conv2d", "conv3d", "convolution"),
    padded_convolution,
}
# By name, as the operator is registered only when `transformers` is imported.
_PRODUCTS_BY_NAME = {"transformers.grouped_mm_fallback.default"}
_WITH_ADDED_TENSOR = {
    *(aten.addmm.default, aten.addmv.default, aten.addbmm.default, aten.baddbmm.default)
}
"""Operators whose first input is added to the product of the other two."""
_PRODUCTS = {
    *(aten.linear.default, aten.matmul.default, aten.mm.default, aten.bmm.default),
    *(aten.mv.default, aten.dot.default, aten.addmm.default, aten.addmv.default),
    *(aten.baddbmm.default, aten.outer.default, aten.ger.default, aten.inner.default),
    *(aten.tensordot.default, aten.einsum.default, aten._grouped_mm.default),
}
