"""Pooling, resizing, pixel shuffling: batch and channels can be sharded, spatial dims cannot."""

from __future__ import annotations

from shardwright.core.graph.graph import Op
from shardwright.core.rules.notation import overloads, sharding_rule
from shardwright.core.rules.rule import Dims, RuleMaker, ShardingRule, rule_for

POOLS = ("max_pool{}d", "max_pool{}d_with_indices", "avg_pool{}d")
ADAPTIVE_POOLS = ("adaptive_avg_pool{}d", "adaptive_max_pool{}d")
RESIZES = {
    1: ("upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_linear1d"),
    2: (
        *("upsample_nearest2d", "_upsample_nearest_exact2d", "_adaptive_avg_pool2d"),
        *("upsample_bilinear2d", "_upsample_bilinear2d_aa"),
        *("upsample_bicubic2d", "_upsample_bicubic2d_aa"),
    ),
    3: (
        *("upsample_nearest3d", "_upsample_nearest_exact3d", "_adaptive_avg_pool3d"),
        "upsample_trilinear3d",
    ),
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


for _spatial, _resizes in RESIZES.items():
    _pools = (name.format(_spatial) for name in (*POOLS, *ADAPTIVE_POOLS))
    rule_for(*overloads(*_pools, *_resizes))(leading_dims_rule(_spatial))


@rule_for(*overloads("pixel_shuffle", "pixel_unshuffle"))
def shuffle_pixels(op: Op) -> ShardingRule:
    """Pixel shuffle, `b _ _ _ -> b _ _ _`: elements move between channels and pixels, so only
    leading dimensions can be sharded."""
    dims = (*("b", "c", "d", "e", "f")[: len(op.output.shape) - 3], None, None, None)
    return sharding_rule(op, (dims,), (dims,))


@rule_for(*overloads("channel_shuffle"))
def shuffle_channels(op: Op) -> ShardingRule:
    """Channel shuffle, `b _ s t -> b _ s t`: all dimensions but the channels can be sharded."""
    dims = ("b", None, *("s", "t", "u")[: len(op.output.shape) - 2])
    return sharding_rule(op, (dims,), (dims,))
