"""Resizing of images whose rows and columns can be sharded, `b c s t -> b c s t`.

Each row of a resized image is a weighted sum of a few rows around its position in the original
(linear, cubic), or of all rows that it covers (with antialiasing). A device computes its shard of
the resized rows, and receives the original rows on which they depend from its neighbors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from math import ceil, gcd
from typing import Any

import torch
from torch import Tensor

from shardwright.core.graph.graph import Op
from shardwright.core.rules.loss import accumulation_dtype
from shardwright.core.rules.notation import (
    WithArguments,
    argument_binder,
    call_arguments,
    overloads,
    sharding_rule,
)
from shardwright.core.rules.rule import Dims, LocalSharding, RuleMaker, ShardingRule, rule_for
from shardwright.core.rules.windowed import (
    CIRCULAR,
    SPACE,
    InputHalos,
    largest_shard_count,
    spatial_factors,
)

INTERPOLATIONS = {
    1: ("upsample_linear1d",),
    2: (
        *("upsample_bilinear2d", "upsample_bicubic2d"),
        *("_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
    ),
    3: ("upsample_trilinear3d",),
}
NEAREST = {
    1: ("upsample_nearest1d", "_upsample_nearest_exact1d"),
    2: ("upsample_nearest2d", "_upsample_nearest_exact2d"),
    3: ("upsample_nearest3d", "_upsample_nearest_exact3d"),
}


@dataclass(frozen=True)
class ResizedDim:
    """Resizing of one dimension of an image, sharded with halos.

    Args:
        dim: the dimension of the image.
        factor: factor of the dimension.
        size, count: number of original rows and of resized rows.
        step: number of original rows per resized row.
        from_corners: whether the first and the last row keep their positions (`align_corners`).
        cubic: whether interpolation is cubic, over 4 rows, instead of linear, over 2.
        antialias: whether a resized row averages all original rows that it covers.
    """

    dim: int
    factor: str
    size: int
    count: int
    step: float
    from_corners: bool
    cubic: bool
    antialias: bool

    def rows_and_weights(self, j: Tensor) -> tuple[Tensor, Tensor]:
        """Return the original rows that resized rows read, and their weights.

        Args:
            j: indices of the resized rows, in the dtype in which PyTorch computes positions.

        Returns:
            Row indices and weights, both `[original rows per resized row, len(j)]`.
        """
        if self.antialias:
            return self._compute_antialiasing_rows(j)
        # Without `align_corners` a row covers [j, j + 1], and its center is mapped.
        position = j * self.step if self.from_corners else (j + 0.5) * self.step - 0.5
        if not self.cubic:
            # As in PyTorch, which clamps positions except for cubic interpolation.
            position = position.clamp(min=0)
            row = position.floor().clamp(max=self.size - 1)
            t = (position - row).clamp(0, 1)
            rows, weights = [row, row + 1], [1 - t, t]
        else:
            row = position.floor()
            t = position - row
            rows = [row - 1, row, row + 1, row + 2]
            # PyTorch's parameter a is -0.75, and -0.5 with antialiasing, as in Pillow.
            weights = [_compute_cubic_weight(x, -0.75) for x in (1 + t, t, 1 - t, 2 - t)]
        return torch.stack(rows).long().clamp(0, self.size - 1), torch.stack(weights)

    def _compute_antialiasing_rows(self, j: Tensor) -> tuple[Tensor, Tensor]:
        # Shrinking widens the filter to all rows that a resized row replaces; enlarging does not
        # narrow it.
        scale = max(self.step, 1.0)
        # A cubic filter reaches 2 rows to each side, a linear one 1.
        support = (2.0 if self.cubic else 1.0) * scale
        center = (j + 0.5) * self.step
        first = (center - support + 0.5).long().clamp(min=0)
        end = (center + support + 0.5).long().clamp(max=self.size)
        # `interp_size` of PyTorch's antialiasing: the filter, 2 `support` wide, covers at most this
        # many rows.
        rows = first + torch.arange(2 * ceil(support) + 1, device=j.device).unsqueeze(1)
        x = ((rows - center + 0.5) / scale).abs()
        weights = _compute_cubic_weight(x, -0.5) if self.cubic else (1 - x).clamp(min=0)
        weights = weights.masked_fill(rows >= end, 0)
        # Rows with weight 0 must exist too, since they are indexed.
        return torch.where(rows < end, rows, first), weights / weights.sum(0)

    @cached_property
    def _first_and_last_rows_read(self) -> tuple[Tensor, Tensor]:
        # In both dtypes, in which a position may be rounded to different rows.
        j = torch.arange(self.count)
        rows = torch.cat([self.rows_and_weights(j.to(dtype))[0] for dtype in _POSITION_DTYPES])
        return rows.amin(0), rows.amax(0)

    def num_rows_before(self, shards: int) -> int:
        """Return the number of rows that a shard reads from the previous shard."""
        first = self._first_and_last_rows_read[0].view(shards, -1).amin(1)
        return max(0, int((torch.arange(shards) * (self.size // shards) - first).max()))

    def num_rows_after(self, shards: int) -> int:
        """Return the number of rows that a shard reads from the next shard."""
        last = self._first_and_last_rows_read[1].view(shards, -1).amax(1)
        end = (torch.arange(shards) + 1) * (self.size // shards)
        return max(0, int((last + 1 - end).max()))

    def num_rows(self, shards: int) -> int:
        """Return the number of rows of a shard with its halo."""
        return self.num_rows_before(shards) + self.size // shards + self.num_rows_after(shards)

    def halo_start(self, index: Any, shards: int) -> int:
        """Return 0: a resized shard reads its rows with halo from the first row on."""
        return 0

    @cached_property
    def capacity(self) -> int:
        """The number that the shard count must divide; 1 if the dimension cannot be sharded."""
        return largest_shard_count(
            gcd(self.size, self.count),
            # Shards exchange rows with their direct neighbors only.
            lambda n: max(self.num_rows_before(n), self.num_rows_after(n)) <= self.size // n,
        )

    def resize(self, x: Tensor, index: Any, shards: int) -> Tensor:
        """Return the resized rows of shard `index`, given its rows with their halo."""
        # Indices and positions are global, and only the rows read are relative to the halo.
        number = self.count // shards
        j = (torch.arange(number, device=x.device) + index * number).to(x.dtype)
        rows, weights = self.rows_and_weights(j)
        rows = (rows - (index * (self.size // shards) - self.num_rows_before(shards))).clamp(
            0, x.shape[self.dim] - 1
        )
        trailing = (1,) * (x.ndim - 1 - self.dim)
        terms = (
            x.index_select(self.dim, row) * weight.view(-1, *trailing)
            for row, weight in zip(rows, weights, strict=True)
        )
        return sum(terms, start=torch.zeros((), dtype=x.dtype, device=x.device))


# PyTorch computes positions in float32, and in float64 for images in float64.
_POSITION_DTYPES = torch.float32, torch.float64


def _compute_cubic_weight(x: Tensor, a: float) -> Tensor:
    """Return the weight of a row at distance `x` ≥ 0 in cubic convolution with parameter `a` (Keys,
    "Cubic convolution interpolation for digital image processing", 1981)."""
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return torch.where(x <= 1, near, torch.where(x < 2, far, 0))


def interpolation_rule(num_spatial: int) -> RuleMaker:
    """Make a builder of rules `b c s t -> b c s t` for linear and cubic resizing, whose shards
    exchange halos."""

    def rule(op: Op) -> ShardingRule:
        leading = ("b", "c")[: len(op.output.shape) - num_spatial]
        if not op.inputs[0].dtype.is_floating_point:
            # PyTorch resizes integers in fixed-point arithmetic, whose rounding weights in floating
            # point do not reproduce.
            integer_dims: Dims = (*leading, *(None,) * num_spatial)
            return sharding_rule(op, (integer_dims,), (integer_dims,))
        axes = _list_resized_spatial_dims(op, num_spatial)
        dims: Dims = (*leading, *spatial_factors(axes))
        # No row beyond the image is read, so that shards at its ends have no padding.
        halos = InputHalos(axes, dims, CIRCULAR)
        return sharding_rule(
            op,
            (dims,),
            (dims,),
            capacity=halos.capacity,
            kernel=lambda op, local: _build_resize_kernel(op, local, halos, axes),
            reductions=halos.reductions,
        )

    return rule


def _list_resized_spatial_dims(op: Op, num_spatial: int) -> tuple[ResizedDim, ...]:
    arguments, first = call_arguments(op), len(op.output.shape) - num_spatial
    sizes = zip(op.inputs[0].shape[first:], op.output.shape[first:], strict=True)
    from_corners = arguments["align_corners"]
    axes = []
    for n, ((size, count), scale) in enumerate(
        zip(sizes, _list_scale_arguments(op, num_spatial), strict=True)
    ):
        # As PyTorch's `area_pixel_compute_scale`: a scale that is passed has priority over the
        # sizes.
        if from_corners:
            step = (size - 1) / (count - 1) if count > 1 else 0.0
        else:
            step = 1 / scale if scale else size / count
        name = op.short_name
        cubic, antialias = "bicubic" in name, name.endswith("_aa")
        dimension = first + n, SPACE[n], size, count
        axes.append(ResizedDim(*dimension, step, from_corners, cubic, antialias))
    return tuple(axes)


def _list_scale_arguments(op: Op, num_spatial: int) -> list[float | None]:
    """Return the scale argument of each spatial dimension; None where the call passes no scale."""
    arguments = call_arguments(op)
    if "scale_factors" in arguments:
        return list(arguments["scale_factors"] or [None] * num_spatial)
    return [value for name, value in arguments.items() if name.startswith("scales")]


def _build_resize_kernel(
    op: Op, local: LocalSharding, halos: InputHalos, axes: tuple[ResizedDim, ...]
) -> Callable[..., Any]:
    borders, bind = halos.borders(local), argument_binder(op)
    if not borders:
        return op.target
    sharded = [(axis, local.shard_counts.get(axis.factor, 1)) for axis in axes]
    blocks = [
        (axis, local.index(axis.factor) if n > 1 else 0, n)
        for axis, n in sharded
        # PyTorch's antialiasing is wrong for shards of a single column.
        if n > 1 or (axis.antialias and axis.size != axis.count)
    ]
    resized = {axis.dim for axis, _, _ in blocks}
    others = [axis for axis in axes if axis.dim not in resized and axis.size != axis.count]
    # Sharded dimensions are resized before, so their scale is 1 here.
    scales = [
        scale if n == 1 else 1.0
        for scale, (_, n) in zip(_list_scale_arguments(op, len(axes)), sharded, strict=True)
    ]
    # The overload that takes the output size together with a scale per dimension, whichever of them
    # the call itself passes.
    native = getattr(torch.ops.aten, op.short_name).default
    output_size = list(local.output_shapes[0][-len(axes) :])

    def run(*args: Any, **kwargs: Any) -> Tensor:
        arguments = bind(args, kwargs)
        x: Tensor = next(iter(arguments.values()))
        dtype = x.dtype
        for border in borders:
            x = border.extend(x)
        x = x.to(accumulation_dtype(dtype))
        for axis, index, shards in blocks:
            x = axis.resize(x, index, shards)
        if others:
            x = native(x, output_size, arguments["align_corners"], *scales)
        return x.to(dtype)

    return run


def nearest_rule(num_spatial: int) -> RuleMaker:
    """Make a builder of rules `b c s t -> b c s t` for nearest-neighbor resizing; a dimension can
    be sharded if every shard repeats or leaves out the same rows, counted from its first."""

    def rule(op: Op) -> ShardingRule:
        x, count = op.inputs[0], len(op.output.shape) - num_spatial
        capacity = {
            factor: _count_equal_blocks(op, old, new, scale)
            for factor, old, new, scale in zip(
                SPACE,
                x.shape[count:],
                op.output.shape[count:],
                _list_scale_arguments(op, num_spatial),
                strict=False,
            )
        }
        space = tuple(f if capacity[f] > 1 else None for f in SPACE[:num_spatial])
        dims: Dims = (*("b", "c")[:count], *space)
        return sharding_rule(
            op, (dims,), (dims,), capacity=capacity, kernel=_build_nearest_resize_kernel
        )

    return rule


def _count_equal_blocks(op: Op, size: int, count: int, scale: float | None) -> int:
    """Return the largest number of blocks that nearest-neighbor resizing of `size` rows to `count`
    resizes alike; all of its divisors are such numbers too."""
    # A scale that is passed has priority over the sizes. It is compared, as PyTorch's CPU kernels
    # ignore it for `count == 2 * size`, and those of GPUs do not.
    if scale not in (None, count / size):
        return 1
    exact = "exact" in op.short_name
    operator = "_upsample_nearest_exact1d" if exact else "upsample_nearest1d"
    resize = getattr(torch.ops.aten, operator).default

    def are_blocks_alike(shards: int) -> bool:
        # PyTorch rounds the number by which it multiplies indices: enlarged 41 times, 4 rows
        # are repeated 42, 41, 40 and 41 times.
        rows, local = size // shards, count // shards
        return all(
            torch.equal(
                resize(x.view(1, 1, -1), [count], scale).view(shards, local),
                resize(x[:rows].view(1, 1, -1), [local], scale).view(local) + x[::rows, None],
            )
            for dtype in _POSITION_DTYPES
            for x in [torch.arange(size, dtype=dtype, device="cpu")]
        )

    return largest_shard_count(gcd(size, count), are_blocks_alike)


def _build_nearest_resize_kernel(op: Op, local: LocalSharding) -> Callable[..., Any]:
    if call_arguments(op)["output_size"] is None:
        return op.target
    return WithArguments(op, output_size=list(local.output_shapes[0][2:]))


for _spatial in (1, 2, 3):
    rule_for(*overloads(*INTERPOLATIONS[_spatial]))(interpolation_rule(_spatial))
    rule_for(*overloads(*NEAREST[_spatial]))(nearest_rule(_spatial))
