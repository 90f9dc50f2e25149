"""Normalization over features, groups of channels, images and batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwright.graph.custom_ops import batch_norm_train
from shardwright.graph.graph import Op
from shardwright.rules.loss import accumulated
from shardwright.rules.notation import (
    argument,
    binder,
    call_arguments,
    input_dims,
    names,
    overloads,
    sharding_rule,
    with_arguments,
    without,
)
from shardwright.rules.rule import Dims, Local, Reduction, ShardingRule, rule_for

aten = torch.ops.aten
CHANNELS = ("weight", "bias", "running_mean", "running_var")


@rule_for(*overloads("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm"))
def norm_of_features(op: Op) -> ShardingRule:
    """The normalized dimensions, which are the last ones, stay whole; all others may be cut.

    Where mean and reciprocal deviation are returned, they have size 1 in those dimensions.
    """
    given = call_arguments(op)
    count = len(given["normalized_shape"])
    dims = without(names(op.output), *range(-count, 0))
    weights: Dims = (None,) * count
    inputs = input_dims(op, {"input": dims, "weight": weights, "bias": weights})
    return sharding_rule(op, inputs, (dims,) * len(op.outputs))


@rule_for(aten.group_norm.default)
def group_norm(op: Op) -> ShardingRule:
    """The batch may be cut, and the channels between two groups."""
    groups = call_arguments(op)["num_groups"]
    dims: Dims = ("b", "c", *(None,) * (len(op.output.shape) - 2))

    def kernel(op: Op, local: Local) -> Callable[..., Any]:
        return with_arguments(op, num_groups=groups // local.parts.get("c", 1))

    inputs = input_dims(op, {"input": dims, "weight": ("c",), "bias": ("c",)})
    return sharding_rule(op, inputs, (dims,), capacity={"c": groups}, kernel=kernel)


@rule_for(aten.batch_norm.default)
def batch_norm(op: Op) -> ShardingRule | None:
    """With running statistics every element is treated alike: all dimensions may be cut.

    With statistics of the batch this operator writes into its inputs; see `batch_norm_train`.
    """
    return None if call_arguments(op)["training"] else _by_channel(op)


@rule_for(aten.instance_norm.default)
def instance_norm(op: Op) -> ShardingRule | None:
    """Batch and channels may be cut; with running statistics in place of the image's, space too.

    None where it normalizes by the image and writes running statistics into its inputs.
    """
    given = call_arguments(op)
    if given["use_input_stats"] and given["running_mean"] is not None:
        return None
    return _by_channel(op, whole=range(2, len(op.output.shape)) if given["use_input_stats"] else ())


def _by_channel(op: Op, whole: Any = ()) -> ShardingRule:
    dims = without(_image(op), *whole)
    inputs = input_dims(op, {"input": dims, **dict.fromkeys(CHANNELS, ("c",))})
    return sharding_rule(op, inputs, (dims,))


def _image(op: Op) -> Dims:
    """`b c`, then one name for each dimension of space."""
    return ("b", "c", *("s", "t", "u")[: len(op.output.shape) - 2])


@rule_for(batch_norm_train)
def batch_norm_of_training(op: Op) -> ShardingRule:
    """All dimensions may be cut: the statistics are those of the whole batch on every device.

    Where batch or space are cut, a kernel of our own all-reduces first the sums, then the squared
    deviations from the mean, as one device does it in two passes: nothing cancels. The new running
    statistics are complete on every device.
    """
    dims = _image(op)
    inputs = input_dims(op, {"x": dims, **dict.fromkeys(CHANNELS, ("c",))})
    outputs = (dims, ("c",), ("c",))[: len(op.outputs)]
    return sharding_rule(
        op,
        inputs,
        outputs,
        complete=frozenset(pooled_factors(op)),
        kernel=_pooled_kernel,
        reductions=_pooled_statistics,
    )


def pooled_factors(op: Op) -> tuple[str, ...]:
    """The factors over which the statistics are taken: all but the channels."""
    return tuple(str(name) for name in _image(op) if name != "c")


def _pooled_statistics(op: Op, parts: Mapping[str, int]) -> tuple[Reduction, ...]:
    cut = tuple(f for f in pooled_factors(op) if parts.get(f, 1) > 1)
    if not cut:
        return ()
    x = op.inputs[0]
    channels = x.shape[1] // parts.get("c", 1)
    # Differing shards are normalized by the result: its gradient is a sum over them.
    once = Reduction(cut, "sum", (channels,), accumulated(x.dtype), varying=True)
    return (once, once)


def _pooled_kernel(op: Op, local: Local) -> Callable[..., Any]:
    if not local.reduce:
        return op.target
    reduce_sum, reduce_squares = local.reduce
    shape = op.inputs[0].shape
    count = prod(shape) // shape[1]
    over = (0, *range(2, len(shape)))
    channel = (1, -1, *(1,) * (len(shape) - 2))

    bind = binder(op)

    def run(*args: Any, **kwargs: Any) -> Any:
        given = bind(args, kwargs)
        whole = given["x"].to(accumulated(given["x"].dtype))
        mean = reduce_sum(whole.sum(over)) / count
        centered = whole - mean.view(channel)
        variance = reduce_squares((centered * centered).sum(over)) / count
        y = centered * torch.rsqrt(variance + given["eps"]).view(channel)
        if given["weight"] is not None:
            y = y * given["weight"].view(channel)
        if given["bias"] is not None:
            y = y + given["bias"].view(channel)
        y = y.to(given["x"].dtype)
        if given["running_mean"] is None:
            return y
        momentum = given["momentum"]
        unbiased = variance.detach() * (count / (count - 1))
        new_mean = _moved(given["running_mean"], mean.detach(), momentum)
        return y, new_mean, _moved(given["running_var"], unbiased, momentum)

    return run


def _moved(running: Tensor, new: Tensor, momentum: float) -> Tensor:
    """The running average of torch: it gives `momentum` to the new value."""
    return running.detach() * (1 - momentum) + new.to(running.dtype) * momentum


@rule_for(*overloads("softmax", "_softmax", "log_softmax", "_log_softmax", "_safe_softmax"))
def softmax(op: Op) -> ShardingRule:
    dims = without(names(op.output), argument(op, "dim"))
    return sharding_rule(op, (dims,), (dims,))
