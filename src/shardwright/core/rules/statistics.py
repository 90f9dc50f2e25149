"""Statistics of shards, from which operators compute results along sharded dimensions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwright.core.graph.graph import Op
from shardwright.core.rules.gathered import InputShard, ShardCombination, Statistics
from shardwright.core.rules.notation import call_arguments

# The reduction of all elements is that of the reductions of shards


def _multiply_over_dims(x: Tensor, dims: Sequence[int]) -> Tensor:
    # `prod` takes a single dimension.
    for dim in dims:
        x = x.prod(dim, keepdim=True)
    return x


PRODUCT = ShardCombination(
    lambda s: (_multiply_over_dims(s.x, s.dims),), lambda s, all_: all_[0].prod(0)
)
ANY = ShardCombination(
    lambda s: ((s.x != 0).any(s.dims, keepdim=True).to(torch.uint8),),
    lambda s, all_: all_[0].any(0),
    statistic_dtype=torch.uint8,
)
ALL = ShardCombination(
    lambda s: ((s.x != 0).all(s.dims, keepdim=True).to(torch.uint8),),
    lambda s, all_: all_[0].all(0),
    statistic_dtype=torch.uint8,
)


def norm_combination(order: float) -> ShardCombination:
    """Return the `ShardCombination` of a vector norm of finite order except 0: the norm of the
    norms of all shards."""
    return ShardCombination(
        lambda s: (torch.linalg.vector_norm(s.x, order, s.dims, keepdim=True),),
        lambda s, all_: torch.linalg.vector_norm(all_[0], order, 0),
    )


# Exponentials


def _compute_local_max_and_exp_sum(shard: InputShard) -> Statistics:
    """Return the maximum m of the local elements, and the sum of exp(x - m)."""
    limits = torch.finfo(shard.x.dtype)
    # Without a gradient, as results do not depend on it. Clamped, since -inf - -inf is NaN where
    # all elements of a shard are masked.
    maximum = shard.x.detach().amax(shard.dims, keepdim=True).clamp(limits.min, limits.max)
    return maximum, (shard.x - maximum).exp().sum(shard.dims, keepdim=True)


def _combine_exp_sums(gathered: Statistics) -> tuple[Tensor, Tensor]:
    """Return the maximum m of the elements of all shards, and the sum of exp(x - m)."""
    peaks, sums = gathered[0].detach(), gathered[1]
    maximum = peaks.amax(0)
    # The sum of each shard is rescaled from its own maximum to that of all shards.
    return maximum, (sums * (peaks - maximum).exp()).sum(0)


def _combine_to_log_sum_exp(shard: InputShard, gathered: Statistics) -> Tensor:
    maximum, total = _combine_exp_sums(gathered)
    return maximum + total.log()


def _compute_local_softmax(shard: InputShard, gathered: Statistics) -> Tensor:
    maximum, total = _combine_exp_sums(gathered)
    return (shard.x - maximum).exp() / total


def _compute_local_log_softmax(shard: InputShard, gathered: Statistics) -> Tensor:
    maximum, total = _combine_exp_sums(gathered)
    # Not the logarithm of the softmax, which is -inf where the softmax underflows.
    return shard.x - maximum - total.log()


LOG_SUM_EXP = ShardCombination(
    _compute_local_max_and_exp_sum, _combine_to_log_sum_exp, num_values=2
)
SOFTMAX = ShardCombination(
    _compute_local_max_and_exp_sum, _compute_local_softmax, num_values=2, keeps_dims=True
)
LOG_SOFTMAX = ShardCombination(
    _compute_local_max_and_exp_sum, _compute_local_log_softmax, num_values=2, keeps_dims=True
)

# Moments


def local_moments(shard: InputShard) -> Statistics:
    """Return the mean of the local elements, and the sum of squared deviations from the mean."""
    mean = shard.x.mean(shard.dims, keepdim=True)
    return mean, (shard.x - mean).square().sum(shard.dims, keepdim=True)


def combine_moments(means: Tensor, squares: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the mean of the elements of all shards, and the sum of squared deviations from the
    mean.

    Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample
    variances" (1979), equation 2.1; unlike E[x²] - E[x]² it does not cancel.

    Args:
        means, squares: mean and sum of squared deviations of each shard, along dimension 0.
        size: number of elements of a shard.
    """
    mean = means.mean(0)
    return mean, squares.sum(0) + size * (means - mean).square().sum(0)


def _combine_gathered_moments(shard: InputShard, gathered: Statistics) -> tuple[Tensor, Tensor]:
    means, squares = gathered
    return combine_moments(means, squares, prod(shard.x.shape[dim] for dim in shard.dims))


def variance_combination(*, root: bool, with_mean: bool) -> ShardCombination:
    """Return the `ShardCombination` for `var` and `var_mean` or, with `root`, for `std` and
    `std_mean`."""

    def combine(shard: InputShard, gathered: Statistics) -> Tensor | Sequence[Tensor]:
        mean, squares = _combine_gathered_moments(shard, gathered)
        size = prod(shard.shape[dim] for dim in shard.dims)
        # As in PyTorch, too few elements divide by 0.
        result = squares / max(size - _get_variance_correction(shard.arguments), 0)
        if root:
            # The gradient of `std` is 0 where all elements are equal, that of `sqrt` is infinite.
            is_zero = result == 0
            result = result.masked_fill(is_zero, 1).sqrt().masked_fill(is_zero, 0)
        return (result, mean) if with_mean else result

    return ShardCombination(local_moments, combine, num_values=2)


def _get_variance_correction(arguments: Mapping[str, Any]) -> float:
    if "unbiased" in arguments:
        return float(arguments["unbiased"])
    correction = arguments["correction"]
    return 1.0 if correction is None else float(correction)


# Largest and smallest elements


def extreme_combination(*, largest: bool, shared_by_nans: bool = False) -> ShardCombination:
    """Return the `ShardCombination` for `amax` and `max`, or for `amin` and `min` if not `largest`.

    Args:
        largest: whether the operator takes the largest element, not the smallest.
        shared_by_nans: whether the gradient of a NaN result is distributed over all NaNs, as in
            `max` of all elements.
    """
    reduce = torch.amax if largest else torch.amin

    def is_tie(x: Tensor, value: Tensor) -> Tensor:
        equal = x == value
        return equal | (x.isnan() & value.isnan()) if shared_by_nans else equal

    def local(shard: InputShard) -> Statistics:
        if shared_by_nans:
            # Not `amax`, whose backward pass compares by `==`, by which no element equals a NaN.
            value = shard.x.max() if largest else shard.x.min()
            value = value.reshape([1] * shard.x.ndim)
        else:
            value = reduce(shard.x, shard.dims, keepdim=True)
        return value, is_tie(shard.x, value).sum(shard.dims, keepdim=True).to(value.dtype)

    def combine(shard: InputShard, gathered: Statistics) -> Tensor:
        values, ties = gathered
        value = reduce(values.detach(), 0)
        # All elements that equal the result share its gradient, each shard in proportion to theirs.
        ties = ties.detach() * is_tie(values.detach(), value)
        out: Tensor = _SplitGradientOverTies.apply(values, value, ties / ties.sum(0))  # type: ignore[no-untyped-call]
        return out

    return ShardCombination(local, combine, num_values=2)


def _of_absolute_values(combination: ShardCombination) -> ShardCombination:
    def absolute(shard: InputShard) -> InputShard:
        return replace(shard, x=shard.x.abs())

    return replace(
        combination,
        local_statistics=lambda shard: combination.local_statistics(absolute(shard)),
        combine=lambda shard, gathered: combination.combine(absolute(shard), gathered),
    )


class _SplitGradientOverTies(torch.autograd.Function):
    """Return `value`, the extreme of all shards; in the backward pass, distribute its gradient over
    `values`, the extremes of the shards, in the proportions `weights`."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, value: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(weights)
        # A view, since autograd treats inputs that are returned unchanged specially.
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (weights,) = ctx.saved_tensors
        return gradients[0] * weights, None, None


def extreme_index_combination(*, largest: bool, with_value: bool) -> ShardCombination:
    """Return the `ShardCombination` for `argmax`, or with `with_value` for `max` along a dimension.

    The first of equal elements wins.

    Args:
        largest: False for `argmin` and `min`.
        with_value: whether to return the element in addition to its index.
    """

    def local(shard: InputShard) -> Statistics:
        rows, flat, shape = _flatten_combined_dims(shard)
        value, index = flat.max(-1) if largest else flat.min(-1)
        return value.reshape(shape), _convert_to_global_index(shard, index, rows).reshape(shape)

    def combine(shard: InputShard, gathered: Statistics) -> Tensor | Sequence[Tensor]:
        values, indices = gathered
        best = values.amax(0) if largest else values.amin(0)
        # In PyTorch a NaN is both the largest and the smallest element.
        is_best = (values == best) | (values.isnan() & best.isnan())
        # Of equal elements the first one wins, so others get the largest index.
        index = indices.masked_fill(~is_best, torch.iinfo(torch.int64).max)
        first = index.argmin(0, keepdim=True)
        index = index.gather(0, first).squeeze(0)
        # Gathered, so that the gradient flows to this element only.
        return (values.gather(0, first).squeeze(0), index) if with_value else index

    return ShardCombination(local, combine, num_indices=1)


def _flatten_combined_dims(shard: InputShard) -> tuple[list[int], Tensor, list[int]]:
    """Flatten the dimensions along which an operator combines elements into the last dimension.

    Returns:
        The local sizes of these dimensions, the flattened shard, and the local shape with size 1 in
        these dimensions.
    """
    x, dims = shard.x, shard.dims
    other_dims = [dim for dim in range(x.ndim) if dim not in dims]
    shape = [1 if dim in dims else size for dim, size in enumerate(x.shape)]
    flat = x.permute(*other_dims, *dims).reshape(*(x.shape[dim] for dim in other_dims), -1)
    return [x.shape[dim] for dim in dims], flat, shape


def _convert_to_global_index(shard: InputShard, index: Tensor, sizes: Sequence[int]) -> Tensor:
    """Convert indices of elements in a flattened shard to indices in the flattened full tensor.

    Args:
        shard: the shard; its `dims` are flattened.
        index: the indices in the flattened shard.
        sizes: the local size of each flattened dimension.
    """
    result = torch.zeros_like(index)
    stride = 1
    # From the last dimension on, which varies fastest in a flat index.
    for dim, size, offset in reversed(list(zip(shard.dims, sizes, shard.offsets, strict=True))):
        result = result + (index % size + offset) * stride
        index = index.div(size, rounding_mode="floor")
        stride *= shard.shape[dim]
    return result


# Outputs that are sharded like the input


def _mask_statistics_of_later_shards(shard: InputShard, gathered: Tensor, neutral: float) -> Tensor:
    """Return the gathered statistics of earlier shards, with `neutral` in place of those of this
    and later shards.

    `neutral` is the neutral element of the sum or product over earlier shards.
    """
    # A mask instead of a slice: with many simulated ranks `shard_index` is a `SymInt`, whose value
    # differs from rank to rank.
    numbers = torch.arange(shard.num_shards, device=gathered.device)
    is_later = (numbers >= shard.shard_index).view(-1, *(1,) * (gathered.ndim - 1))
    return gathered.masked_fill(is_later, neutral)


CUMULATIVE_SUM = ShardCombination(
    lambda s: (s.x.sum(s.dims, keepdim=True),),
    lambda s, all_: s.x.cumsum(s.dims[0]) + _mask_statistics_of_later_shards(s, all_[0], 0).sum(0),
    keeps_dims=True,
)
CUMULATIVE_PRODUCT = ShardCombination(
    lambda s: (_multiply_over_dims(s.x, s.dims),),
    lambda s, all_: (
        s.x.cumprod(s.dims[0]) * _mask_statistics_of_later_shards(s, all_[0], 1).prod(0)
    ),
    keeps_dims=True,
)


def _compute_local_log_cumulative_sum_exp(shard: InputShard, gathered: Statistics) -> Tensor:
    # Not -inf, of which `logsumexp` has no gradient.
    least = torch.finfo(shard.x.dtype).min
    earlier = _mask_statistics_of_later_shards(shard, gathered[0], least).logsumexp(0)
    return torch.logaddexp(shard.x.logcumsumexp(shard.dims[0]), earlier)


LOG_CUMULATIVE_SUM_EXP = ShardCombination(
    lambda s: (s.x.logsumexp(s.dims, keepdim=True),),
    _compute_local_log_cumulative_sum_exp,
    keeps_dims=True,
)


def cumulative_extreme_combination(*, largest: bool) -> ShardCombination:
    """Return the `ShardCombination` for `cummax`, or for `cummin` if not `largest`.

    The last of equal elements wins.
    """
    accumulate = torch.cummax if largest else torch.cummin

    def local(shard: InputShard) -> Statistics:
        (dim,), (offset,) = shard.dims, shard.offsets
        values, indices = accumulate(shard.x, dim)
        last = values.shape[dim] - 1
        return values.narrow(dim, last, 1), indices.narrow(dim, last, 1) + offset

    def combine(shard: InputShard, gathered: Statistics) -> Sequence[Tensor]:
        (dim,), (offset,), dtype = shard.dims, shard.offsets, shard.x.dtype
        limits = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
        infinite = float("-inf") if largest else float("inf")
        limit = limits.min if largest else limits.max
        neutral = infinite if dtype.is_floating_point else limit
        earlier = _mask_statistics_of_later_shards(shard, gathered[0], neutral)
        positions = _mask_statistics_of_later_shards(shard, gathered[1], -1)
        best = earlier.amax(0) if largest else earlier.amin(0)
        is_best = (earlier == best) | (earlier.isnan() & best.isnan())
        winner = positions.masked_fill(~is_best, -2).argmax(0, keepdim=True)
        value = earlier.gather(0, winner).squeeze(0)
        position = positions.gather(0, winner).squeeze(0)
        values, indices = accumulate(shard.x, dim)
        # A NaN replaces any element, and no element a NaN.
        is_later = (values >= value if largest else values <= value) | values.isnan()
        return values.where(is_later, value), (indices + offset).where(is_later, position)

    return ShardCombination(local, combine, num_indices=1, keeps_dims=True)


def _compute_local_layer_norm(shard: InputShard, gathered: Statistics) -> Tensor:
    mean, squares = _combine_gathered_moments(shard, gathered)
    variance = squares / prod(shard.shape[dim] for dim in shard.dims)
    normalized = (shard.x - mean) * torch.rsqrt(variance + shard.arguments["eps"])
    return _apply_weight_and_bias(normalized, shard.arguments)


def _compute_local_rms_norm(shard: InputShard, gathered: Statistics) -> Tensor:
    eps = shard.arguments["eps"]
    # As in PyTorch, epsilon of the dtype in which the norm is computed.
    if eps is None:
        eps = torch.finfo(shard.x.dtype).eps
    return _apply_weight_and_bias(shard.x * torch.rsqrt(gathered[0].mean(0) + eps), shard.arguments)


def _apply_weight_and_bias(x: Tensor, arguments: Mapping[str, Any]) -> Tensor:
    weight, bias = arguments["weight"], arguments.get("bias")
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


LAYER_NORM = ShardCombination(
    local_moments, _compute_local_layer_norm, num_values=2, keeps_dims=True
)
RMS_NORM = ShardCombination(
    lambda s: (s.x.square().mean(s.dims, keepdim=True),), _compute_local_rms_norm, keeps_dims=True
)


def combination_of(op: Op) -> ShardCombination | None:
    """Return the `ShardCombination` for `op`; None if the dimensions along which the operator
    combines elements cannot be sharded."""
    arguments, x = call_arguments(op), op.inputs[0]
    name = str(op.target).removeprefix("aten.").partition(".")[0]
    if name in ("norm", "linalg_vector_norm", "frobenius_norm"):
        order = arguments.get("ord", arguments.get("p", 2))
        order = 2.0 if order is None else float(order)
        # An infinite norm is an extreme, whose gradient is shared by ties. Order 0 counts.
        if order in (float("inf"), -float("inf")) and not x.dtype.is_complex:
            return _of_absolute_values(extreme_combination(largest=order > 0))
        return norm_combination(order) if order not in (0, float("inf"), -float("inf")) else None
    if name in ("max", "min"):
        largest = name == "max"
        if len(op.outputs) == 1:
            return extreme_combination(largest=largest, shared_by_nans=True)
        return extreme_index_combination(largest=largest, with_value=True)
    # The variance of complex numbers is that of their real parts plus that of their imaginary ones.
    return None if x.dtype.is_complex and name in VARIANCES else COMBINATIONS.get(name)


VARIANCES = ("var", "std", "var_mean", "std_mean")
COMBINATIONS: dict[str, ShardCombination] = {
    "prod": PRODUCT,
    "logsumexp": LOG_SUM_EXP,
    "any": ANY,
    "all": ALL,
    "amax": extreme_combination(largest=True),
    "amin": extreme_combination(largest=False),
    "argmax": extreme_index_combination(largest=True, with_value=False),
    "argmin": extreme_index_combination(largest=False, with_value=False),
    "var": variance_combination(root=False, with_mean=False),
    "std": variance_combination(root=True, with_mean=False),
    "var_mean": variance_combination(root=False, with_mean=True),
    "std_mean": variance_combination(root=True, with_mean=True),
    "cumsum": CUMULATIVE_SUM,
    "cumprod": CUMULATIVE_PRODUCT,
    "logcumsumexp": LOG_CUMULATIVE_SUM_EXP,
    "cummax": cumulative_extreme_combination(largest=True),
    "cummin": cumulative_extreme_combination(largest=False),
    "softmax": SOFTMAX,
    "_softmax": SOFTMAX,
    "log_softmax": LOG_SOFTMAX,
    "_log_softmax": LOG_SOFTMAX,
    "layer_norm": LAYER_NORM,
    "rms_norm": RMS_NORM,
}
