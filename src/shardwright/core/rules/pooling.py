"""Pooling and pixel shuffling: batch, channels and spatial dimensions can be sharded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwright.core.graph.graph import Op
from shardwright.core.rules.notation import (
    WithArguments,
    call_arguments,
    factor_names,
    overloads,
    sharding_rule,
    unsharded_at,
)
from shardwright.core.rules.rule import (
    Dims,
    LocalSharding,
    RuleMaker,
    ShardingRule,
    rule_for,
)
from shardwright.core.rules.statistics import extreme_index_combination
from shardwright.core.rules.windowed import (
    SPACE,
    InputHalos,
    Padding,
    Window,
    build_identity,
    expand_per_dim,
    input_windows,
    spatial_factors,
)

POOLS = ("max_pool{}d", "max_pool{}d_with_indices", "avg_pool{}d")
ADAPTIVE_POOLS = ("adaptive_avg_pool{}d", "adaptive_max_pool{}d")
BACKEND_POOLS = {2: ("_adaptive_avg_pool2d",), 3: ("_adaptive_avg_pool3d",)}
"""Adaptive pools that traces have in place of the public ones, by number of spatial dimensions."""


def pooling_rule(num_spatial: int) -> RuleMaker:
    """Make a builder of rules `b c s t -> b c s t`, in which shards of space exchange halos."""

    def rule(op: Op) -> ShardingRule:
        arguments = call_arguments(op)
        windows = input_windows(op, expand_per_dim(arguments["kernel_size"], num_spatial))
        dims = (*_leading_factors(op, num_spatial), *spatial_factors(windows))
        # Padding is never the maximum, and adds 0 to a sum.
        is_max = op.short_name.startswith("max")
        halos = InputHalos(
            *(windows, dims),
            padding=Padding(value=-float("inf") if is_max else 0.0),
            finish=partial(_build_index_shift, windows) if len(op.outputs) > 1 else build_identity,
        )
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
            (dims,) * len(op.outputs),
            capacity=halos.capacity,
            kernel=halos.kernel,
            reductions=halos.reductions,
        )

    return rule


def _leading_factors(op: Op, num_spatial: int) -> Dims:
    # An image without a batch has channels only.
    return ("c",) if len(op.output.shape) == num_spatial + 1 else ("b", "c")


def _build_index_shift(
    windows: Sequence[Window], op: Op, local: LocalSharding
) -> Callable[[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]:
    """Return a function from maxima and their positions in a shard with halos to the maxima and
    their positions in the full image."""
    sizes, starts = [], []
    for window in windows:
        shards = local.shard_counts.get(window.factor, 1)
        sizes.append(window.num_rows(shards) if shards > 1 else window.size)
        starts.append(window.first_row(local.index(window.factor), shards) if shards > 1 else 0)
    return _make_index_shift(sizes, starts, [window.size for window in windows])


def _make_index_shift(
    sizes: Sequence[int], starts: Sequence[Any], full_sizes: Sequence[int]
) -> Callable[[tuple[Tensor, Tensor]], tuple[Tensor, Tensor]]:
    """Return a function that adds the position of a block of pixels to positions in the block.

    Args:
        sizes: size of the block in each spatial dimension; positions count its pixels row by row.
        starts: first row of the block in each spatial dimension.
        full_sizes: size of the full image in each spatial dimension.
    """

    def shift(out: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        maxima, positions = out
        shifted, stride = torch.zeros_like(positions), 1
        for size, start, full in zip(*map(reversed, (sizes, starts, full_sizes)), strict=True):
            shifted = shifted + (positions % size + start) * stride
            positions, stride = positions // size, stride * full
        return maxima, shifted

    return shift


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


def adaptive_pooling_rule(num_spatial: int) -> RuleMaker:
    """Make a builder of rules `b c s t -> b c s t` of adaptive pooling. A dimension can be sharded
    between outputs if each output has equally many rows; an average of all rows is a partial sum of
    its shards, and the maximum of an image is that of the maxima of its shards."""

    def rule(op: Op) -> ShardingRule:
        image, outputs = (shape[-num_spatial:] for shape in (op.inputs[0].shape, op.output.shape))
        is_average = "avg" in op.short_name
        if not is_average and prod(outputs) == 1:
            dims = factor_names(op.inputs[0])
            space = tuple(range(len(dims) - num_spatial, len(dims)))
            maxima = extreme_index_combination(largest=True, with_value=True)
            return maxima.rule(op, (dims,), (unsharded_at(dims, *space),) * 2, space)
        leading = _leading_factors(op, num_spatial)
        factors = list(zip(SPACE, image, outputs, strict=False))
        averaged = tuple(factor for factor, _, count in factors if is_average and count == 1)
        split = {f: count for f, size, count in factors if count > 1 and size % count == 0}
        given = (f if f in split or f in averaged else None for f, *_ in factors)
        results = (f if f in split else None for f, *_ in factors)
        return sharding_rule(
            op,
            ((*leading, *given),),
            ((*leading, *results),) * len(op.outputs),
            capacity=split,
            reduced=averaged,
            kernel=partial(_build_adaptive_kernel, num_spatial, averaged),
        )

    return rule


def _build_adaptive_kernel(
    num_spatial: int, averaged: Sequence[str], op: Op, local: LocalSharding
) -> Callable[..., Any]:
    shards = [local.shard_counts.get(factor, 1) for factor in SPACE[:num_spatial]]
    if prod(shards) == 1:
        return op.target
    call = WithArguments(op, output_size=list(local.output_shapes[0][-num_spatial:]))
    if len(op.outputs) == 1:
        # Shards have equal sizes, so the mean of their means is the mean of all.
        num_averaged = prod(local.shard_counts.get(factor, 1) for factor in averaged)
        return lambda *args, **kwargs: call(*args, **kwargs) / num_averaged
    full_sizes = op.inputs[0].shape[-num_spatial:]
    sizes = [full // n for full, n in zip(full_sizes, shards, strict=True)]
    starts = [
        local.index(factor) * size if n > 1 else 0
        for factor, size, n in zip(SPACE, sizes, shards, strict=False)
    ]
    shift = _make_index_shift(sizes, starts, full_sizes)
    return lambda *args, **kwargs: shift(call(*args, **kwargs))


for _spatial in (1, 2, 3):
    rule_for(*overloads(*(name.format(_spatial) for name in POOLS)))(pooling_rule(_spatial))
    _adaptive = (name.format(_spatial) for name in ADAPTIVE_POOLS)
    rule_for(*overloads(*_adaptive, *BACKEND_POOLS.get(_spatial, ())))(
        adaptive_pooling_rule(_spatial)
    )


@rule_for(*overloads("pixel_shuffle", "pixel_unshuffle"))
def shuffle_pixels(op: Op) -> ShardingRule:
    """Pixel shuffle, `b c s t -> b c s t`: space can be sharded between blocks of pixels, channels
    between groups of channels that become the pixels of one channel, or vice versa."""
    count = len(op.output.shape) - 3
    # A shard consists of whole blocks of pixels, and of whole groups of channels.
    capacity = {
        factor: min(op.inputs[0].shape[dim], op.output.shape[dim])
        for factor, dim in (("c", -3), ("s", -2), ("t", -1))
    }
    dims: Dims = (*("b", "d", "e", "f", "g")[:count], "c", "s", "t")
    return sharding_rule(op, (dims,), (dims,), capacity=capacity)


@rule_for(*overloads("channel_shuffle"))
def shuffle_channels(op: Op) -> ShardingRule:
    """Channel shuffle, `b _ s t -> b _ s t`: all dimensions but the channels can be sharded."""
    dims = ("b", None, *("s", "t", "u")[: len(op.output.shape) - 2])
    return sharding_rule(op, (dims,), (dims,))
