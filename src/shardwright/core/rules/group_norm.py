"""Group and instance normalization of images whose batch, groups of channels and space can be
sharded. In an instance norm each channel is a group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

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
    spatial dimensions, or sharded channels of a single group, the kernel combines the moments of
    the shards."""
    dims, groups = image_factors(op), _count_groups(op)
    return sharding_rule(
        op,
        input_factors(op, {"input": dims, "weight": ("c",), "bias": ("c",)}),
        (dims,),
        capacity={"c": op.output.shape[1] if groups == 1 else groups},
        kernel=_build_group_norm_kernel,
        reductions=make_moment_all_gathers,
    )


def image_factors(op: Op) -> Dims:
    """Return the factors of an image: `b`, `c`, and one per spatial dimension."""
    dims: Dims = ("b", "c", *SPACE[: len(op.output.shape) - 2])
    # Spatial dimensions beyond the third have no factor.
    return (*dims, *(None,) * (len(op.output.shape) - len(dims)))


def _count_groups(op: Op) -> int:
    """Return the number of groups of channels; of an instance norm, the number of channels."""
    groups: int = call_arguments(op).get("num_groups", op.inputs[0].shape[1])
    return groups


def _count_local_groups(op: Op, shard_counts: Mapping[str, int]) -> int:
    # Channels are sharded between groups, so a shard has whole groups or a part of the only one.
    return max(1, _count_groups(op) // shard_counts.get("c", 1))


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


def make_moment_all_gathers(op: Op, shard_counts: Mapping[str, int]) -> tuple[Reduction, ...]:
    """Make the all-gather of the moments of shards of a group; empty if no group is sharded."""
    combined = ("c", *SPACE) if _count_groups(op) == 1 else SPACE
    sharded = tuple(factor for factor in combined if shard_counts.get(factor, 1) > 1)
    if not sharded:
        return ()
    x = op.inputs[0]
    batch = x.shape[0] // shard_counts.get("b", 1)
    groups = _count_local_groups(op, shard_counts)
    # (shards, mean and sum of squared deviations, batch, groups).
    shape = (prod(shard_counts[factor] for factor in sharded), 2, batch, groups)
    dtype = accumulation_dtype(x.dtype)
    return (
        # `varying`: each device normalizes its own shard by the moments, so their gradient is a sum
        # over devices.
        Reduction(sharded, GATHER, shape, dtype, varying=True, differentiable=x.differentiable),
    )


def _build_group_norm_kernel(op: Op, local: LocalSharding) -> Callable[..., Any]:
    groups = _count_local_groups(op, local.shard_counts)
    if not local.reduce:
        return (
            WithArguments(op, num_groups=groups)
            if op.target is aten.group_norm.default
            else op.target
        )
    (gather,), bind = local.reduce, argument_binder(op)

    def run(*args: Any, **kwargs: Any) -> Any:
        arguments = bind(args, kwargs)
        x, weight, bias = (arguments[name] for name in ("input", "weight", "bias"))
        return normalize_shard(x, groups, weight, bias, arguments["eps"], gather).output

    return run


class NormalizedShard(NamedTuple):
    """A normalized spatial shard of images.

    Args:
        output: the normalized shard, in the shape and dtype of the input.
        mean: mean of each group over all shards, `[b, groups]`.
        squares: sum of squared deviations from `mean` over all shards, `[b, groups]`.
        size: number of elements of a group over all shards.
    """

    output: Tensor
    mean: Tensor
    squares: Tensor
    size: int


def normalize_shard(
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    gather: Callable[[Tensor], Tensor],
) -> NormalizedShard:
    """Normalize groups of channels of a spatial shard by the moments of all shards.

    Args:
        x: the shard, `[b, c, ...]`.
        groups: number of groups of channels.
        weight, bias: `[c]` each or None.
        eps: added to the variance.
        gather: all-gather of `make_moment_all_gathers`.
    """
    # Sums over many pixels lose digits in 16 bits, and overflow in float16.
    # Not -1, which is ambiguous for empty tensors.
    elements = x.shape[1] // groups * prod(x.shape[2:])
    flat = x.to(accumulation_dtype(x.dtype)).reshape(x.shape[0], groups, elements)
    mean = flat.mean(-1)
    # Deviations from the local mean, as E[x²] - E[x]² would cancel; `combine_moments` corrects it.
    squares = (flat - mean.unsqueeze(-1)).square().sum(-1)
    means, squares = gather(torch.stack((mean, squares)).unsqueeze(0)).unbind(1)
    # Elements per group of one shard; all shards have equally many.
    size = flat.shape[-1]
    mean, squares = combine_moments(means, squares, size)
    size *= means.shape[0]
    scale = torch.rsqrt(squares / size + eps)
    y = ((flat - mean.unsqueeze(-1)) * scale.unsqueeze(-1)).reshape(x.shape)
    channel = (1, -1, *(1,) * (x.ndim - 2))
    if weight is not None:
        y = y * weight.view(channel)
    if bias is not None:
        y = y + bias.view(channel)
    return NormalizedShard(y.to(x.dtype), mean, squares, size)
