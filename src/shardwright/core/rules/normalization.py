"""Layer, instance, batch and weight normalization; softmax."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwright.core.graph.custom_ops import batch_norm_train, instance_norm_train
from shardwright.core.graph.graph import Op
from shardwright.core.rules.group_norm import (
    group_norm,
    image_factors,
    make_moment_all_gathers,
    normalize_shard,
)
from shardwright.core.rules.loss import accumulation_dtype
from shardwright.core.rules.notation import (
    argument,
    argument_binder,
    call_arguments,
    factor_names,
    input_factors,
    overloads,
    sharding_rule,
    unsharded_at,
)
from shardwright.core.rules.rule import Dims, LocalSharding, Reduction, ShardingRule, rule_for
from shardwright.core.rules.statistics import combination_of

aten = torch.ops.aten
CHANNEL_ARGUMENTS = ("weight", "bias", "running_mean", "running_var")


@rule_for(*overloads("layer_norm", "rms_norm"))
def feature_norm(op: Op) -> ShardingRule:
    """Layer or RMS norm, `b s t, t -> b s t`: with sharded features, the kernel combines the
    moments of the shards."""
    combination, dims = combination_of(op), factor_names(op.output)
    assert combination is not None
    count = len(call_arguments(op)["normalized_shape"])
    # Weight and bias have the normalized dimensions, the last ones.
    weights = dims[-count:]
    inputs = input_factors(op, {"input": dims, "weight": weights, "bias": weights})
    return combination.rule(op, inputs, (dims,), tuple(range(len(dims) - count, len(dims))))


@rule_for(*overloads("native_layer_norm", "_fused_rms_norm"))
def feature_norm_with_moments(op: Op) -> ShardingRule:
    """Layer or RMS norm that returns its moments, `b s _, _ -> b s _`: all but the normalized
    dimensions, the last ones, can be sharded.

    Mean and reciprocal standard deviation, if returned, have size 1 in the normalized dimensions.
    """
    arguments = call_arguments(op)
    count = len(arguments["normalized_shape"])
    dims = unsharded_at(factor_names(op.output), *range(-count, 0))
    weights: Dims = (None,) * count
    inputs = input_factors(op, {"input": dims, "weight": weights, "bias": weights})
    return sharding_rule(op, inputs, (dims,) * len(op.outputs))


@rule_for(aten._weight_norm.default)
def weight_norm(op: Op) -> ShardingRule:
    """Weight norm, `b _, b _ -> b _`: only `dim`, along which each slice has its own norm, can be
    sharded."""
    weight, norms = op.inputs
    slice_dim = call_arguments(op)["dim"]
    # Each slice along `dim` is scaled to its own norm, over all other dimensions.
    dims = tuple(name if d == slice_dim else None for d, name in enumerate(factor_names(weight)))
    return sharding_rule(op, (dims, dims[: len(norms.shape)]), (dims,))


@rule_for(aten.batch_norm.default)
def batch_norm(op: Op) -> ShardingRule | None:
    """Batch norm in evaluation mode, `b c s t, c, c, c, c -> b c s t`: with running statistics the
    operator is elementwise.

    Returns None in training mode, in which the operator updates inputs in place; capture replaces
    it by `batch_norm_train`.
    """
    return None if call_arguments(op)["training"] else _build_channel_norm_rule(op)


@rule_for(aten.instance_norm.default)
def instance_norm(op: Op) -> ShardingRule | None:
    """Instance norm, `b c s t, c, c -> b c s t`: a group norm with a group per channel. With
    running statistics the operator is elementwise.

    Returns None if the operator updates the running statistics in place; capture replaces it by
    `instance_norm_train`.
    """
    arguments = call_arguments(op)
    if not arguments["use_input_stats"]:
        return _build_channel_norm_rule(op)
    return group_norm(op) if arguments["running_mean"] is None else None


def _build_channel_norm_rule(op: Op) -> ShardingRule:
    """Build the rule of a normalization by statistics per channel that are inputs."""
    dims = image_factors(op)
    inputs = input_factors(op, {"input": dims, **dict.fromkeys(CHANNEL_ARGUMENTS, ("c",))})
    return sharding_rule(op, inputs, (dims,))


@rule_for(batch_norm_train)
def training_batch_norm(op: Op) -> ShardingRule:
    """Batch norm in training mode, `b c s t, c -> b c s t, c, c`; every device computes the
    statistics of the global batch.

    If batch or spatial dimensions are sharded, the kernel all-reduces the sums, then the sums of
    squared deviations from the mean. Two passes, as on one device, avoid the cancellation of
    E[x²] - E[x]². The new running statistics are replicated over batch and spatial shards.
    """
    dims = image_factors(op)
    inputs = input_factors(op, {"x": dims, **dict.fromkeys(CHANNEL_ARGUMENTS, ("c",))})
    outputs = (dims, ("c",), ("c",))[: len(op.outputs)]
    return sharding_rule(
        op,
        inputs,
        outputs,
        complete=frozenset(pooled_factors(op)),
        kernel=_build_batch_norm_kernel,
        reductions=_make_batch_norm_reductions,
    )


def pooled_factors(op: Op) -> tuple[str, ...]:
    """Return the factors over which batch statistics are computed: all but the channels."""
    return tuple(name for name in image_factors(op) if name not in (None, "c"))


def _make_batch_norm_reductions(op: Op, shard_counts: Mapping[str, int]) -> tuple[Reduction, ...]:
    sharded = tuple(f for f in pooled_factors(op) if shard_counts.get(f, 1) > 1)
    if not sharded:
        return ()
    x = op.inputs[0]
    channels = x.shape[1] // shard_counts.get("c", 1)
    # The result normalizes different shards, so its gradient is a sum over them.
    reduction = Reduction(
        *(sharded, "sum", (channels,), accumulation_dtype(x.dtype)),
        varying=True,
        differentiable=x.differentiable,
    )
    # The sum, and then the squared deviations from the mean that results from it.
    return (reduction, reduction)


def _build_batch_norm_kernel(op: Op, local: LocalSharding) -> Callable[..., Any]:
    if not local.reduce:
        return op.target
    reduce_sum, reduce_squares = local.reduce
    shape = op.inputs[0].shape
    count = prod(shape) // shape[1]
    # All but the channels, dimension 1.
    pooled_dims = (0, *range(2, len(shape)))
    channel = (1, -1, *(1,) * (len(shape) - 2))

    bind = argument_binder(op)

    def run(*args: Any, **kwargs: Any) -> Any:
        arguments = bind(args, kwargs)
        # A sum over a batch of images overflows float16 and loses digits in bfloat16.
        x = arguments["x"].to(accumulation_dtype(arguments["x"].dtype))
        # `count` is that of the global batch.
        mean = reduce_sum(x.sum(pooled_dims)) / count
        centered = x - mean.view(channel)
        variance = reduce_squares((centered * centered).sum(pooled_dims)) / count
        y = centered * torch.rsqrt(variance + arguments["eps"]).view(channel)
        if arguments["weight"] is not None:
            y = y * arguments["weight"].view(channel)
        if arguments["bias"] is not None:
            y = y + arguments["bias"].view(channel)
        y = y.to(arguments["x"].dtype)
        if arguments["running_mean"] is None:
            return y
        momentum = arguments["momentum"]
        # As in PyTorch: the batch is normalized by the biased variance, and the running one is
        # unbiased.
        unbiased = variance.detach() * (count / (count - 1))
        # Running statistics are buffers, without a gradient.
        new_mean = _update_running_average(arguments["running_mean"], mean.detach(), momentum)
        return y, new_mean, _update_running_average(arguments["running_var"], unbiased, momentum)

    return run


@rule_for(instance_norm_train)
def training_instance_norm(op: Op) -> ShardingRule:
    """Instance norm in training mode, `b c s t, c -> b c s t, c, c`; the new running statistics are
    means over the instances.

    With sharded spatial dimensions, the kernel combines the moments of the shards; with a sharded
    batch it all-reduces the running statistics.
    """
    dims = image_factors(op)
    return sharding_rule(
        op,
        input_factors(op, {"x": dims, **dict.fromkeys(CHANNEL_ARGUMENTS, ("c",))}),
        (dims, ("c",), ("c",)),
        complete=frozenset(pooled_factors(op)),
        kernel=_build_instance_norm_kernel,
        reductions=_make_instance_norm_reductions,
    )


def _make_instance_norm_reductions(
    op: Op, shard_counts: Mapping[str, int]
) -> tuple[Reduction, ...]:
    gathers = make_moment_all_gathers(op, shard_counts)
    if shard_counts.get("b", 1) == 1:
        return gathers
    channels = op.inputs[0].shape[1] // shard_counts.get("c", 1)
    means = (
        Reduction(("b",), "sum", (channels,), value.dtype, differentiable=False)
        for value in op.outputs[1:]
    )
    return (*gathers, *means)


def _build_instance_norm_kernel(op: Op, local: LocalSharding) -> Callable[..., Any]:
    if not local.reduce:
        return op.target
    shards = local.shard_counts.get("b", 1)
    gathers = local.reduce if shards == 1 else local.reduce[:-2]
    bind = argument_binder(op)

    def run(*args: Any, **kwargs: Any) -> Any:
        arguments = bind(args, kwargs)
        y, *statistics = (
            _normalize_instances(arguments, gathers[0]) if gathers else op.target(*args, **kwargs)
        )
        if shards == 1:
            return y, *statistics
        # Shards have equally many instances, so the mean of their means is that of the batch.
        reductions = zip(statistics, local.reduce[-2:], strict=True)
        return y, *(reduce(statistic / shards) for statistic, reduce in reductions)

    return run


def _normalize_instances(
    arguments: Mapping[str, Any], gather: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a normalized spatial shard, and the new running statistics of its instances."""
    x, momentum = arguments["x"], arguments["momentum"]
    shard = normalize_shard(
        x, x.shape[1], arguments["weight"], arguments["bias"], arguments["eps"], gather
    )
    # As in PyTorch, the running variance is unbiased.
    statistics = {"running_mean": shard.mean, "running_var": shard.squares / (shard.size - 1)}
    mean, variance = (
        _update_running_average(arguments[name], value.detach().mean(0), momentum)
        for name, value in statistics.items()
    )
    return shard.output, mean, variance


def _update_running_average(running: Tensor, new: Tensor, momentum: float) -> Tensor:
    """Return the exponential moving average, in which `momentum` weighs `new`, as in PyTorch."""
    return running.detach() * (1 - momentum) + new.to(running.dtype) * momentum


@rule_for(*overloads("softmax", "_softmax", "log_softmax", "_log_softmax"))
def softmax(op: Op) -> ShardingRule:
    """Softmax, `b s t -> b s t`: the kernel combines the maxima and the sums of exponentials of
    shards."""
    combination, dims, dim = combination_of(op), factor_names(op.output), argument(op, "dim")
    assert combination is not None
    return combination.rule(op, (dims,), (dims,), (dim % len(dims),) if dims else ())


@rule_for(*overloads("_safe_softmax"))
def safe_softmax(op: Op) -> ShardingRule:
    """Softmax of rows that may be fully masked, `b s _ -> b s _`: all but the normalized
    dimension can be sharded."""
    # Statistics of shards would give NaN for a row that is masked in full, where this operator
    # gives 0.
    dims = unsharded_at(factor_names(op.output), argument(op, "dim"))
    return sharding_rule(op, (dims,), (dims,))


@rule_for(*overloads("_softmax_backward_data", "_log_softmax_backward_data"))
def softmax_backward(op: Op) -> ShardingRule:
    """Gradient of softmax, `b s _, b s _ -> b s _`: all but the normalized dimension can be
    sharded."""
    dims = unsharded_at(factor_names(op.output), argument(op, "dim"))
    return sharding_rule(op, (dims, dims), (dims,))
