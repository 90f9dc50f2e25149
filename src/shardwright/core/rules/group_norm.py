"""Group normalization of images whose batch, groups of channels and space can be sharded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch

from shardwright.core.graph.graph import Op
from shardwright.core.rules.loss import accumulation_dtype
from shardwright.core.rules.notation import (
    WithArguments,
    argument_binder,
    call_arguments,
    input_factors,
    sharding_rule,
)
from shardwright.core.rules.rule import (
    GATHER,
    Dims,
    LocalSharding,
    Reduction,
    ShardingRule,
    rule_for,
)
from shardwright.core.rules.statistics import combine_moments
from shardwright.core.rules.windowed import SPACE

aten = torch.ops.aten


@rule_for(aten.group_norm.default)
def group_norm(op: Op) -> ShardingRule:
    """Group norm, `b c s t, c, c -> b c s t`: channels can be sharded between groups; with sharded
    spatial dimensions, the kernel combines the moments of the shards."""
    dims: Dims = ("b", "c", *SPACE[: len(op.output.shape) - 2])
    # Spatial dimensions beyond the third have no factor.
    dims = (*dims, *(None,) * (len(op.output.shape) - len(dims)))
    return sharding_rule(
        op,
        input_factors(op, {"input": dims, "weight": ("c",), "bias": ("c",)}),
        (dims,),
        capacity={"c": call_arguments(op)["num_groups"]},
        kernel=_build_group_norm_kernel,
        reductions=_make_moment_all_gathers,
    )


@rule_for(aten.native_group_norm.default)
def group_norm_with_moments(op: Op) -> ShardingRule:
    """Group norm that returns its moments, `b c _ _, c, c -> b c _ _, b c, b c`: the batch can be
    sharded, and channels between groups."""
    groups = call_arguments(op)["group"]
    dims: Dims = ("b", "c", *(None,) * (len(op.output.shape) - 2))

    def kernel(op: Op, local: LocalSharding) -> Callable[..., Any]:
        batch, channels, *_ = local.output_shapes[0]
        group = groups // local.shard_counts.get("c", 1)
        # `HxW`, the number of pixels, stays that of the call, as space is not sharded.
        return WithArguments(op, N=batch, C=channels, group=group)

    return sharding_rule(
        op,
        input_factors(op, {"input": dims, "weight": ("c",), "bias": ("c",)}),
        (dims, ("b", "c"), ("b", "c"))[: len(op.outputs)],
        capacity={"c": groups},
        kernel=kernel,
    )


def _make_moment_all_gathers(op: Op, shard_counts: Mapping[str, int]) -> tuple[Reduction, ...]:
    sharded = tuple(factor for factor in SPACE if shard_counts.get(factor, 1) > 1)
    if not sharded:
        return ()
    x = op.inputs[0]
    batch = x.shape[0] // shard_counts.get("b", 1)
    groups = call_arguments(op)["num_groups"] // shard_counts.get("c", 1)
    # (shards, mean and sum of squared deviations, batch, groups).
    shape = (prod(shard_counts[factor] for factor in sharded), 2, batch, groups)
    dtype = accumulation_dtype(x.dtype)
    return (
        # `varying`: each device normalizes its own shard by the moments, so their gradient is a sum
        # over devices.
        Reduction(sharded, GATHER, shape, dtype, varying=True, differentiable=x.differentiable),
    )


def _build_group_norm_kernel(op: Op, local: LocalSharding) -> Callable[..., Any]:
    # Channels are sharded between groups, so a shard has whole groups.
    groups = call_arguments(op)["num_groups"] // local.shard_counts.get("c", 1)
    if not local.reduce:
        return WithArguments(op, num_groups=groups)
    (gather,), bind = local.reduce, argument_binder(op)
    channel = (1, -1, *(1,) * (len(op.output.shape) - 2))

    def run(*args: Any, **kwargs: Any) -> Any:
        arguments = bind(args, kwargs)
        x = arguments["input"]
        # Sums over many pixels lose digits in 16 bits, and overflow in float16.
        flat = x.to(accumulation_dtype(x.dtype)).reshape(x.shape[0], groups, -1)
        mean = flat.mean(-1)
        # Deviations from the local mean, as E[x²] - E[x]² would cancel; `combine_moments` corrects
        # it.
        squares = (flat - mean.unsqueeze(-1)).square().sum(-1)
        means, squares = gather(torch.stack((mean, squares)).unsqueeze(0)).unbind(1)
        # Elements per group of one shard; all shards have equally many.
        size = flat.shape[-1]
        mean, squares = combine_moments(means, squares, size)
        scale = torch.rsqrt(squares / (size * means.shape[0]) + arguments["eps"])
        y = ((flat - mean.unsqueeze(-1)) * scale.unsqueeze(-1)).reshape(x.shape)
        if arguments["weight"] is not None:
            y = y * arguments["weight"].view(channel)
        if arguments["bias"] is not None:
            y = y + arguments["bias"].view(channel)
        return y.to(x.dtype)

    return run
