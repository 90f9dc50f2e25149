"""Pooling and pixel shuffling: batch, channels and, for most, spatial dimensions can be sharded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwright.core.graph.graph import Op
from shardwright.core.rules.notation import call_arguments, overloads, sharding_rule
from shardwright.core.rules.rule import (
    Dims,
    LocalSharding,
    RuleMaker,
    ShardingRule,
    rule_for,
)
from shardwright.core.rules.windowed import (
    SPACE,
    InputHalos,
    Window,
    expand_per_dim,
    input_windows,
    spatial_factors,
)

POOLS = ("max_pool{}d", "avg_pool{}d")
# They return the positions of the maxima in the full image, which a shard does not know.
REPLICATED_POOLS = ("max_pool{}d_with_indices", "adaptive_max_pool{}d")
AVERAGES = {2: ("_adaptive_avg_pool2d",), 3: ("_adaptive_avg_pool3d",)}


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


def pooling_rule(num_spatial: int) -> RuleMaker:
    """Make a builder of rules `b c s t -> b c s t`, in which shards of space exchange halos."""

    def rule(op: Op) -> ShardingRule:
        arguments = call_arguments(op)
        windows = input_windows(op, expand_per_dim(arguments["kernel_size"], num_spatial))
        count = len(op.output.shape) - num_spatial
        # An image without a batch has channels only.
        dims = (*("b", "c")[-count:], *spatial_factors(windows))
        # Padding is never the maximum, and adds 0 to a sum.
        is_max = op.short_name.startswith("max")
        halos = InputHalos(windows, dims, padding_value=-float("inf") if is_max else 0.0)
        if not is_max and _has_varying_divisor(arguments, windows):
            # The kernel averages full windows of padded images, whose divisor `finish` corrects.
            halos = InputHalos(
                *(windows, dims),
                pads_all=True,
                replace=_replace_arguments_for_full_windows,
                finish=partial(_build_divisor_correction, windows),
            )
        return sharding_rule(
            op,
            (dims,),
            (dims,),
            capacity=halos.capacity,
            kernel=halos.kernel,
            reductions=halos.reductions,
        )

    return rule


def _compute_averaged_row_range(arguments: Mapping[str, Any], window: Window) -> tuple[int, int]:
    """Return the range of rows that averages include: (first row, end), negative in padding."""
    padding = window.padding if arguments["count_include_pad"] else 0
    return -padding, window.size + padding


def _has_varying_divisor(arguments: Mapping[str, Any], windows: Sequence[Window]) -> bool:
    """Whether some windows of an average pooling include fewer rows than others."""
    if arguments.get("divisor_override") is not None:
        return False
    counted = [_compute_averaged_row_range(arguments, window) for window in windows]
    return any(
        # The first window may begin in padding that does not count, the last may end beyond the
        # padding (`ceil_mode`).
        window.first_row(0, 1) < first or window.num_rows(1) - window.padding > end
        for window, (first, end) in zip(windows, counted, strict=True)
    )


def _replace_arguments_for_full_windows(op: Op, local: LocalSharding) -> dict[str, Any]:
    if all(local.shard_counts.get(factor, 1) == 1 for factor in SPACE):
        return {}
    # The kernel has padded the image to whole windows, all of whose rows count.
    return {"ceil_mode": False, "count_include_pad": True}


def _build_divisor_correction(
    windows: Sequence[Window], op: Op, local: LocalSharding
) -> Callable[[Tensor], Tensor]:
    """Return a function that rescales averages over full windows to averages over the rows that
    each window includes."""
    arguments = call_arguments(op)
    bounds = []
    for window in windows:
        shards = local.shard_counts.get(window.factor, 1)
        first = window.first_row(local.index(window.factor) if shards > 1 else 0, shards)
        bounds.append((window, first, _compute_averaged_row_range(arguments, window)))

    def divide(out: Tensor) -> Tensor:
        for window, first, (low, high) in bounds:
            trailing = (1,) * (out.ndim - 1 - window.dim)
            begins = torch.arange(out.shape[window.dim], device=out.device) * window.stride + first
            # PyTorch divides by the rows within the image, or within image and padding with
            # `count_include_pad`.
            counted = (begins + window.extent).clamp(max=high) - begins.clamp(min=low)
            out = out * (window.extent / counted).to(out.dtype).view(-1, *trailing)
        return out

    return divide


def adaptive_average_rule(num_spatial: int) -> RuleMaker:
    """Make a builder of rules `b c s t -> b c _ _` of adaptive average pooling. Spatial dimensions
    can be sharded if the output is the average of all pixels, which is then a partial sum."""

    def rule(op: Op) -> ShardingRule | None:
        count = len(op.output.shape) - num_spatial
        if any(size != 1 for size in op.output.shape[count:]):
            return leading_dims_rule(num_spatial)(op)
        leading: Dims = ("c",) if count == 1 else ("b", "c")
        space = SPACE[:num_spatial]

        def kernel(op: Op, local: LocalSharding) -> Callable[..., Any]:
            num_shards = prod(local.shard_counts.get(factor, 1) for factor in space)
            if num_shards == 1:
                return op.target
            # Shards have equal sizes, so the mean of their means is the mean of all.
            return lambda *args, **kwargs: op.target(*args, **kwargs) / num_shards

        output = (*leading, *(None,) * num_spatial)
        return sharding_rule(op, ((*leading, *space),), (output,), reduced=space, kernel=kernel)

    return rule


for _spatial in (1, 2, 3):
    _unsharded_pools = [name.format(_spatial) for name in REPLICATED_POOLS]
    rule_for(*overloads(*_unsharded_pools, *AVERAGES.get(_spatial, ())))(
        leading_dims_rule(_spatial)
    )
    rule_for(*overloads(*(name.format(_spatial) for name in POOLS)))(pooling_rule(_spatial))
    rule_for(*overloads(f"adaptive_avg_pool{_spatial}d"))(adaptive_average_rule(_spatial))


@rule_for(*overloads("pixel_shuffle", "pixel_unshuffle"))
def shuffle_pixels(op: Op) -> ShardingRule:
    """Pixel shuffle, `b _ s t -> b _ s t`: space can be sharded between blocks of pixels; channels,
    whose elements become pixels or vice versa, cannot."""
    count = len(op.output.shape) - 3
    # A shard consists of whole blocks of pixels.
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
