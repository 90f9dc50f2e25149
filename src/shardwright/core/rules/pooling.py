"""Pooling, resizing, pixel shuffling: batch and channels can be sharded, space only for some."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from shardwright.core.graph.graph import Op
from shardwright.core.rules.notation import WithArguments, call_arguments, overloads, sharding_rule
from shardwright.core.rules.rule import (
    Dims,
    Local,
    RuleMaker,
    ShardingRule,
    no_reductions,
    rule_for,
)
from shardwright.core.rules.windowed import SPACE, Windowed, windows_of

POOLS = ("max_pool{}d", "avg_pool{}d")
REPLICATED_POOLS = ("max_pool{}d_with_indices", "adaptive_max_pool{}d")
RESIZES = {
    1: ("upsample_linear1d",),
    2: (
        *("_adaptive_avg_pool2d", "upsample_bilinear2d", "_upsample_bilinear2d_aa"),
        *("upsample_bicubic2d", "_upsample_bicubic2d_aa"),
    ),
    3: ("_adaptive_avg_pool3d", "upsample_trilinear3d"),
}
NEAREST = {
    1: ("upsample_nearest1d", "_upsample_nearest_exact1d"),
    2: ("upsample_nearest2d", "_upsample_nearest_exact2d"),
    3: ("upsample_nearest3d", "_upsample_nearest_exact3d"),
}


def leading_dims_rule(num_replicated: int) -> RuleMaker:
    """Make a builder of rules `b c _ _ -> b c _ _`, in which the last `num_replicated` dimensions
    cannot be sharded."""

    def rule(op: Op) -> ShardingRule:
        count = len(op.output.shape) - num_replicated
        # A single leading dimension is the channels of an image without a batch.
        free: Dims = ("c",) if count == 1 else ("b", "c", "d", "e", "f")[:count]
        dims = (*free, *(None,) * num_replicated)
        return sharding_rule(op, (dims,), (dims,) * len(op.outputs))

    return rule


def nearest_rule(num_spatial: int) -> RuleMaker:
    """Make a builder of rules `b c s t -> b c s t` for resizing in which each pixel is repeated a
    whole number of times in each sharded dimension."""

    def rule(op: Op) -> ShardingRule:
        x, count = op.inputs[0], len(op.output.shape) - num_spatial
        multiples = {
            factor: old
            for factor, old, new in zip(
                SPACE, x.shape[count:], op.output.shape[count:], strict=False
            )
            if new % old == 0
        }
        space = tuple(factor if factor in multiples else None for factor in SPACE[:num_spatial])
        dims: Dims = (*("b", "c")[:count], *space)
        return sharding_rule(op, (dims,), (dims,), capacity=multiples, kernel=_nearest_kernel)

    return rule


def _nearest_kernel(op: Op, local: Local) -> Callable[..., Any]:
    if call_arguments(op)["output_size"] is None:
        return op.target
    return WithArguments(op, output_size=list(local.output_shapes[0][2:]))


def pooling_rule(num_spatial: int) -> RuleMaker:
    """Make a builder of rules `b c s t -> b c s t`, in which shards of space exchange halos."""

    def rule(op: Op) -> ShardingRule:
        arguments = call_arguments(op)
        sizes = list(arguments["kernel_size"])
        sizes = sizes * num_spatial if len(sizes) == 1 else sizes
        windows = windows_of(op, sizes)
        factors = {window.dim: window.factor for window in windows}
        count = len(op.output.shape) - num_spatial
        leading: Dims = ("c",) if count == 1 else ("b", "c")
        dims = (*leading, *(factors.get(count + n) for n in range(num_spatial)))
        is_max = op.short_name.startswith("max")
        windowed = Windowed(windows, dims, num_spatial, -float("inf") if is_max else 0.0)
        return sharding_rule(
            op,
            (dims,),
            (dims,),
            capacity=windowed.capacity,
            kernel=windowed.kernel if windows else None,
            reductions=windowed.reductions if windows else no_reductions,
        )

    return rule


def adaptive_average_rule(num_spatial: int) -> RuleMaker:
    """Make a builder of rules `b c s t -> b c _ _` of averages: those of all pixels are partial
    sums if space is sharded; of other averages space cannot be sharded."""

    def rule(op: Op) -> ShardingRule | None:
        count = len(op.output.shape) - num_spatial
        if any(size != 1 for size in op.output.shape[count:]):
            return leading_dims_rule(num_spatial)(op)
        leading: Dims = ("c",) if count == 1 else ("b", "c")
        space = SPACE[:num_spatial]

        def kernel(op: Op, local: Local) -> Callable[..., Any]:
            num_shards = prod(local.shard_counts.get(factor, 1) for factor in space)
            if num_shards == 1:
                return op.target
            return lambda *args, **kwargs: op.target(*args, **kwargs) / num_shards

        output = (*leading, *(None,) * num_spatial)
        return sharding_rule(op, ((*leading, *space),), (output,), reduced=space, kernel=kernel)

    return rule


for _spatial, _resizes in RESIZES.items():
    _pools = (name.format(_spatial) for name in REPLICATED_POOLS)
    rule_for(*overloads(*_pools, *_resizes))(leading_dims_rule(_spatial))
    rule_for(*overloads(*(name.format(_spatial) for name in POOLS)))(pooling_rule(_spatial))
    rule_for(*overloads(f"adaptive_avg_pool{_spatial}d"))(adaptive_average_rule(_spatial))
    rule_for(*overloads(*NEAREST[_spatial]))(nearest_rule(_spatial))


@rule_for(*overloads("pixel_shuffle", "pixel_unshuffle"))
def shuffle_pixels(op: Op) -> ShardingRule:
    """Pixel shuffle, `b _ s t -> b _ s t`: elements move between channels and the pixels of a
    block."""
    count = len(op.output.shape) - 3
    capacity = {
        factor: min(op.inputs[0].shape[dim], op.output.shape[dim])
        for factor, dim in (("s", -2), ("t", -1))
    }
    dims: Dims = (*("b", "c", "d", "e", "f")[:count], None, "s", "t")
    return sharding_rule(op, (dims,), (dims,), capacity=capacity)


@rule_for(*overloads("channel_shuffle"))
def shuffle_channels(op: Op) -> ShardingRule:
    """Channel shuffle, `b _ s t -> b _ s t`: all dimensions but the channels can be sharded."""
    dims = ("b", None, *("s", "t", "u")[: len(op.output.shape) - 2])
    return sharding_rule(op, (dims,), (dims,))
