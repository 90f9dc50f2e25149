"""Operators that move the rows of a sharded dimension: `unfold`, `fold`, padding, shifts, `flip`.

All but `flip` are described by windows that slide along the dimension; for `roll` and padding a
window is one row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from shardwright.core.graph.graph import Op
from shardwright.core.rules.notation import (
    argument,
    call_arguments,
    factor_names,
    overloads,
    sharding_rule,
)
from shardwright.core.rules.overlapped import OutputHalos
from shardwright.core.rules.rule import (
    MIRROR,
    Dims,
    LocalSharding,
    Reduction,
    ShardingRule,
    rule_for,
)
from shardwright.core.rules.windowed import (
    CIRCULAR,
    InputHalos,
    Padding,
    Window,
    shard_shape,
    spatial_windows,
)


@rule_for(*overloads("unfold"))
def unfold(op: Op) -> ShardingRule:
    """Sliding windows, `b s -> b s _`: shards exchange the rows of windows that cross their
    borders."""
    x, dims = op.inputs[0], factor_names(op.inputs[0])
    if not x.shape:
        # PyTorch unfolds a scalar to a vector.
        return sharding_rule(op, ((),), ((None,),))
    dim = argument(op, "dimension") % len(dims)
    window = _make_window_of_dim(op, dim, argument(op, "size"), argument(op, "step"), 0)
    return _build_sliding_window_rule(op, InputHalos((window,), dims), ((*dims, None),))


@rule_for(*overloads("constant_pad_nd", "pad"))
def padding(op: Op) -> ShardingRule:
    """Padding, `b s -> b s`: the first and the last shard add the padding or, with mode `circular`,
    exchange rows."""
    # `pad` lists (before, after) of each dimension, the last dimension first.
    amounts = argument(op, "pad")
    befores = dict(enumerate(amounts[::2], 1))
    afters = dict(enumerate(amounts[1::2], 1))
    dims, ndim = factor_names(op.output), len(op.output.shape)
    padded = [ndim - i for i in befores if befores[i] or afters[i]]
    # `pad` has None for 0.
    rows = Padding(argument(op, "mode", "constant"), argument(op, "value") or 0)
    windows = (_make_window_of_dim(op, dim, 1, 1, befores[ndim - dim]) for dim in padded)
    windows = (replace(window, margin=int(rows.mode == "reflect")) for window in windows)
    return _build_sliding_window_rule(op, InputHalos(tuple(windows), dims, rows), (dims,))


@rule_for(*overloads("roll"))
def roll(op: Op) -> ShardingRule:
    """Cyclic shift, `b s -> b s`: shards exchange the rows that move to a neighbor; without `dims`,
    no dimension can be sharded."""
    dims, shifted = factor_names(op.output), argument(op, "dims")
    shifts = argument(op, "shifts")
    if not shifted:
        return _build_rule_with_unsharded_dims(op, range(len(dims)))
    # `dims` may list a dimension several times, whose shifts add up.
    total = dict.fromkeys((dim % len(dims) for dim in shifted), 0)
    for dim, shift in zip(shifted, shifts, strict=True):
        total[dim % len(dims)] += shift
    windows = []
    for dim, shift in total.items():
        # At least 1, since an empty dimension would divide by 0.
        size = max(op.output.shape[dim], 1)
        # The shorter way around, with the smaller halo.
        windows.append(_make_window_of_dim(op, dim, 1, 1, (shift + size // 2) % size - size // 2))

    def unsharded(op: Op, local: LocalSharding) -> dict[str, Any]:
        # The exchange of halos shifts sharded dimensions, the operator the others.
        counts = [local.shard_counts.get(dims[dim % len(dims)] or "", 1) for dim in shifted]
        return {"shifts": [0 if n > 1 else s for n, s in zip(counts, shifts, strict=True)]}

    return _build_sliding_window_rule(
        op, InputHalos(tuple(windows), dims, CIRCULAR, replace=unsharded), (dims,)
    )


@rule_for(*overloads("im2col"))
def windows_of_images(op: Op) -> ShardingRule:
    """Image to windows (`im2col`), `b c s _ -> b c s`: channels, whose windows are adjacent in the
    output, and rows can be sharded."""
    image = op.inputs[0].shape
    windows, dims, flat = _find_windows_and_factors(op, image)
    halos = InputHalos(windows, dims)
    capacity = {"c": image[-3], "s": halos.capacity.get("s", 1)}
    return sharding_rule(
        op,
        (dims,),
        (flat,),
        capacity=capacity,
        kernel=halos.kernel,
        reductions=halos.reductions,
    )


@rule_for(*overloads("col2im"))
def images_of_windows(op: Op) -> ShardingRule:
    """Windows to image (`col2im`), `b c s -> b c s _`: channels and rows can be sharded; rows that
    a shard's windows write in a neighbor's shard are sent to the neighbor and added."""
    image = op.output.shape
    windows, dims, flat = _find_windows_and_factors(op, image)
    halos = OutputHalos(
        windows, dims, replace=partial(_make_local_output_size_argument, windows[0])
    )
    capacity = {"c": image[-3], "s": halos.capacity.get("s", 1)}
    return sharding_rule(
        op,
        (flat,),
        (dims,),
        capacity=capacity,
        kernel=halos.kernel,
        reductions=halos.reductions,
    )


def _find_windows_and_factors(
    op: Op, image: Sequence[int]
) -> tuple[tuple[Window, ...], Dims, Dims]:
    """Return the window of each spatial dimension, the factors of the image, and the factors of the
    tensor of windows."""
    sizes = call_arguments(op)["kernel_size"]
    # Counts are derived below, from windows without a count.
    unknown = spatial_windows(op, sizes, image, (0, 0))
    counts = [(w.size + 2 * w.padding - w.extent) // w.stride + 1 for w in unknown]
    windows = spatial_windows(op, sizes, image, counts)
    batch: Dims = ("b",)[: len(image) - 3]
    # Of the two dimensions that windows merge only the leading one can be sharded.
    rows = "s" if windows[0].capacity > 1 else None
    return windows, (*batch, "c", rows, None), (*batch, "c", rows)


def _make_local_output_size_argument(
    window: Window, op: Op, local: LocalSharding
) -> dict[str, Any]:
    rows, columns = call_arguments(op)["output_size"]
    shards = local.shard_counts.get("s", 1)
    return {"output_size": [window.num_rows(shards) if shards > 1 else rows, columns]}


def _make_window_of_dim(op: Op, dim: int, extent: int, stride: int, padding: int) -> Window:
    factor = factor_names(op.inputs[0])[dim]
    assert factor is not None
    size, count = op.inputs[0].shape[dim], op.output.shape[dim]
    return Window(dim, factor, extent, stride, padding, size, count)


@rule_for(*overloads("flip"))
def flip(op: Op) -> ShardingRule:
    """Reversal of dimensions, `b s -> b s`: the first shard swaps with the last, the second with
    the second last, and each device reverses the shard that it receives."""
    dims = factor_names(op.output)
    # PyTorch accepts dimension 0 of a scalar.
    flipped = [dims[dim % len(dims)] or "" for dim in argument(op, "dims") if dims]

    def swaps(op: Op, shard_counts: Mapping[str, int]) -> tuple[Reduction, ...]:
        # The input of this `op`, as operators that differ in what is differentiable share a rule.
        x = op.inputs[0]
        shape = tuple(shard_shape(x, dims, shard_counts))
        return tuple(
            # `varying`: gradients of the swapped shards are swapped back.
            Reduction((name,), MIRROR, shape, x.dtype, True, x.differentiable)
            for name in flipped
            if shard_counts.get(name, 1) > 1
        )

    def kernel(op: Op, local: LocalSharding) -> Callable[..., Any]:
        def run(x: Tensor, dims: Sequence[int]) -> Tensor:
            for swap in local.reduce:
                x = swap(x)
            out: Tensor = op.target(x, dims)
            return out

        return run if local.reduce else op.target

    return sharding_rule(op, (dims,), (dims,), kernel=kernel, reductions=swaps)


def _build_rule_with_unsharded_dims(op: Op, dims: Sequence[int]) -> ShardingRule:
    """Return a rule by which all dimensions but `dims` can be sharded."""
    ndim = len(op.output.shape)
    unsharded = {dim % ndim for dim in dims}
    factors = tuple(
        None if i in unsharded else name for i, name in enumerate(factor_names(op.output))
    )
    return sharding_rule(op, (factors,), (factors,))


def _build_sliding_window_rule(
    op: Op, halos: InputHalos, outputs: tuple[Dims, ...]
) -> ShardingRule:
    """Return the rule of an operator with sliding windows; a dimension cannot be sharded if the
    capacity of its window is 1."""
    fixed = {window.factor for window in halos.windows if window.capacity == 1}

    def shardable(dims: Dims) -> Dims:
        return tuple(None if name in fixed else name for name in dims)

    return sharding_rule(
        op,
        (shardable(halos.dims),),
        tuple(map(shardable, outputs)),
        capacity=halos.capacity,
        kernel=halos.kernel,
        reductions=halos.reductions,
    )
