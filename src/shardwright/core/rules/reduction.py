"""Operators that combine elements along dimensions: reductions, scans, sorts.

Sums and means are linear, so a dimension that they reduce can be sharded: the output is then a
partial sum. Other operators combine statistics of the shards (`statistics.py`), or cannot be
sharded along the dimensions that they reduce or scan.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch

from shardwright.core.graph.graph import Op
from shardwright.core.rules.notation import (
    aligned_to_output,
    argument,
    factor_names,
    overloads,
    sharding_rule,
    unsharded_at,
)
from shardwright.core.rules.rule import Dims, LocalSharding, ShardingRule, rule_for
from shardwright.core.rules.statistics import combination_of

aten = torch.ops.aten


@rule_for(*overloads("sum", "nansum", "count_nonzero"))
def sum_rule(op: Op) -> ShardingRule:
    """Sum, `b s -> b`: reduced dimensions can be sharded; the local sums are then partial sums."""
    dims = factor_names(op.inputs[0])
    return sharding_rule(
        op, (dims,), (_compute_output_factors(op, dims),), reduced=_find_reduced_factors(op)
    )


@rule_for(*overloads("mean"))
def mean(op: Op) -> ShardingRule:
    """Mean, `b s -> b`: reduced dimensions can be sharded; the local means, divided by the number
    of shards, are then partial sums."""
    dims = factor_names(op.inputs[0])
    reduced = _find_reduced_factors(op)
    return sharding_rule(
        op,
        (dims,),
        (_compute_output_factors(op, dims),),
        reduced=reduced,
        kernel=_build_local_mean_kernel,
    )


def _build_local_mean_kernel(op: Op, local: LocalSharding) -> Callable[..., Any]:
    num_shards = prod(local.shard_counts.get(name, 1) for name in _find_reduced_factors(op))
    if num_shards == 1:
        return op.target
    # Shards have equal sizes, so the mean of their means is the mean of all.
    return lambda *args, **kwargs: op.target(*args, **kwargs) / num_shards


@rule_for(aten.max.default, aten.max.dim, aten.min.default, aten.min.dim)
@rule_for(*overloads("amax", "amin", "argmax", "argmin", "prod", "any", "all", "logsumexp"))
@rule_for(*overloads("var", "std", "var_mean", "std_mean"))
@rule_for(*overloads("norm", "linalg_vector_norm", "frobenius_norm"))
def combined_reduction(op: Op) -> ShardingRule:
    """Nonlinear reduction, `b s -> b`: the kernel combines statistics of the shards of reduced
    dimensions."""
    combination, dims = combination_of(op), factor_names(op.inputs[0])
    if combination is None:
        return _build_unsharded_reduction_rule(op, dims)
    # `max` along a dimension returns values and indices, `var_mean` variance and mean, of one
    # shape.
    outputs = (_compute_output_factors(op, dims),) * len(op.outputs)
    return combination.rule(op, (dims,), outputs, _normalize_reduced_dims(op))


@rule_for(*overloads("median", "nanmedian", "mode"))
def reduction_rule(op: Op) -> ShardingRule:
    """Order statistic, `b _ -> b`: reduced dimensions cannot be sharded."""
    return _build_unsharded_reduction_rule(op, factor_names(op.inputs[0]))


def _build_unsharded_reduction_rule(op: Op, dims: Dims) -> ShardingRule:
    """Return the rule of a reduction whose input has the factors `dims` and whose reduced
    dimensions cannot be sharded."""
    dims = unsharded_at(dims, *_normalize_reduced_dims(op))
    return sharding_rule(op, (dims,), (_compute_output_factors(op, dims),) * len(op.outputs))


@rule_for(*overloads("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"))
def cumulative_rule(op: Op) -> ShardingRule:
    """Cumulative sum, product, logarithm of a sum of exponentials, or extreme, `b s -> b s`: the
    kernel combines the results of its shard with the totals of earlier shards."""
    combination, dims = combination_of(op), factor_names(op.inputs[0])
    assert combination is not None
    outputs = (dims,) * len(op.outputs)
    return combination.rule(op, (dims,), outputs, _normalize_reduced_dims(op))


@rule_for(*overloads("sort", "argsort"))
def sort_rule(op: Op) -> ShardingRule:
    """Sort, `b _ -> b _`: the dimension in the argument `dim` cannot be sharded."""
    dims = unsharded_at(factor_names(op.inputs[0]), *_normalize_reduced_dims(op))
    return sharding_rule(op, (dims,), (dims,) * len(op.outputs))


@rule_for(*overloads("rot90"))
def rotation(op: Op) -> ShardingRule:
    """Rotation by 90 degrees, `b _ _ -> b _ _`: the two dimensions of the plane of rotation cannot
    be sharded."""
    dims = unsharded_at(factor_names(op.output), *argument(op, "dims"))
    return sharding_rule(op, (dims,), (dims,))


@rule_for(*overloads("renorm"))
def renorm(op: Op) -> ShardingRule:
    """Renormalization of slices, `_ s _ -> _ s _`: only the dimension whose slices are scaled can
    be sharded."""
    # Each slice along `dim` has its own norm, over all other dimensions.
    slice_dim = argument(op, "dim") % len(op.output.shape)
    dims = tuple(name if i == slice_dim else None for i, name in enumerate(factor_names(op.output)))
    return sharding_rule(op, (dims,), (dims,))


@rule_for(*overloads("linalg_cross"))
def cross_product(op: Op) -> ShardingRule:
    """Cross product, `b _, b _ -> b _`: the dimension of vectors cannot be sharded."""
    dims = unsharded_at(factor_names(op.output), argument(op, "dim"))
    return sharding_rule(op, aligned_to_output(op, dims), (dims,))


@rule_for(aten.histc.default)
def histogram(op: Op) -> ShardingRule:
    """Histogram, `b s -> _`: all dimensions can be sharded if `min` and `max` are given; local
    counts are then partial sums."""
    dims = factor_names(op.inputs[0])
    # Equal bounds mean the bounds of the data, which differ between shards.
    bounded = argument(op, "min") < argument(op, "max")
    reduced = [name for name in dims if name is not None] if bounded else []
    return sharding_rule(op, (dims,), ((None,),), reduced=reduced)


def _normalize_reduced_dims(op: Op) -> tuple[int, ...]:
    """Return the dimensions in the argument `dim` or `dims`, as nonnegative numbers; all dimensions
    if the argument is absent or empty."""
    ndim = len(op.inputs[0].shape)
    dims = argument(op, "dim", argument(op, "dims"))
    listed = [dims] if isinstance(dims, int) else dims
    if not listed:
        return tuple(range(ndim))
    # PyTorch accepts dimensions 0 and -1 of a scalar.
    return tuple(sorted({dim % max(ndim, 1) for dim in listed})) if ndim else ()


def _find_reduced_factors(op: Op) -> tuple[str, ...]:
    dims = factor_names(op.inputs[0])
    return tuple(name for i in _normalize_reduced_dims(op) if (name := dims[i]) is not None)


def _compute_output_factors(op: Op, dims: Dims) -> Dims:
    """Return the factors of the output, given the factors `dims` of the input, in which reduced
    dimensions are removed or, with `keepdim`, set to None."""
    # Operators without `keepdim`, such as `count_nonzero`, remove the dimensions.
    if argument(op, "keepdim", False):
        return unsharded_at(dims, *_normalize_reduced_dims(op))
    return _remove_dims(dims, set(_normalize_reduced_dims(op)))


def _remove_dims(dims: Dims, positions: set[int]) -> Dims:
    return tuple(name for i, name in enumerate(dims) if i not in positions)
