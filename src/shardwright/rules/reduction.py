"""Operators along some dimensions: reductions, scans, sorts.

Sums and means are linear: a dimension that they reduce may be cut, and the output is then a partial
sum. For all others the dimensions along which they work stay whole.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch

from shardwright.graph.graph import Op
from shardwright.rules.notation import aligned, argument, names, overloads, sharding_rule, without
from shardwright.rules.rule import Dims, Local, ShardingRule, rule_for

aten = torch.ops.aten


@rule_for(*overloads("sum", "nansum", "count_nonzero"))
def total(op: Op) -> ShardingRule:
    """A sum of sums is the sum."""
    dims = names(op.inputs[0])
    return sharding_rule(op, (dims,), (_kept(op, dims),), reduced=_reduced_names(op))


@rule_for(*overloads("mean"))
def mean(op: Op) -> ShardingRule:
    """Each part gives the mean of its elements, divided by the number of parts."""
    dims = names(op.inputs[0])
    reduced = _reduced_names(op)
    return sharding_rule(op, (dims,), (_kept(op, dims),), reduced=reduced, kernel=_mean_of_part)


def _mean_of_part(op: Op, local: Local) -> Callable[..., Any]:
    parts = prod(local.parts.get(name, 1) for name in _reduced_names(op))
    if parts == 1:
        return op.target
    return lambda *args, **kwargs: op.target(*args, **kwargs) / parts


@rule_for(aten.max.default, aten.max.dim, aten.min.default, aten.min.dim)
@rule_for(*overloads("amax", "amin", "aminmax", "argmax", "argmin", "prod", "any", "all"))
@rule_for(*overloads("var", "std", "var_mean", "std_mean", "norm", "linalg_vector_norm"))
@rule_for(*overloads("frobenius_norm", "logsumexp", "nanmean", "median", "nanmedian", "mode"))
@rule_for(*overloads("kthvalue"))
def reduction_rule(op: Op) -> ShardingRule:
    """What is reduced stays whole."""
    dims = without(names(op.inputs[0]), *_reduced(op))
    return sharding_rule(op, (dims,), (_kept(op, dims),) * len(op.outputs))


@rule_for(*overloads("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"))
@rule_for(*overloads("sort", "argsort", "topk", "flip", "roll"))
def along(op: Op) -> ShardingRule:
    """The dimensions along which elements meet or move stay whole (all, if none is named)."""
    dims = without(names(op.inputs[0]), *_reduced(op))
    return sharding_rule(op, (dims,), (dims,) * len(op.outputs))


@rule_for(*overloads("msort"))
def sort_rows(op: Op) -> ShardingRule:
    dims = without(names(op.output), 0)
    return sharding_rule(op, (dims,), (dims,))


@rule_for(*overloads("diff", "linalg_cross"))
def along_of_several(op: Op) -> ShardingRule:
    """Elements of several tensors meet along one dimension, which stays whole."""
    dims = without(names(op.output), argument(op, "dim"))
    return sharding_rule(op, aligned(op, dims), (dims,))


@rule_for(aten.histc.default)
def histogram(op: Op) -> ShardingRule:
    """Counts of parts add up; without given bounds they depend on all elements."""
    dims = names(op.inputs[0])
    bounded = argument(op, "min") < argument(op, "max")
    reduced = [name for name in dims if name is not None] if bounded else []
    return sharding_rule(op, (dims,), ((None,),), reduced=reduced)


@rule_for(*overloads("cosine_similarity"))
def cosine_similarity(op: Op) -> ShardingRule:
    """Vectors along one dimension of two tensors that are broadcast stay whole."""
    dim, ndim = argument(op, "dim"), len(op.output.shape) + 1
    dims = names(op.output)
    dims = (*dims[: dim % ndim], None, *dims[dim % ndim :])
    return sharding_rule(op, aligned(op, dims), (tuple(_drop(dims, {dim % ndim})),))


def _reduced(op: Op) -> tuple[int, ...]:
    """The dimensions that `dim` or `dims` names, as numbers from 0; all if it names none."""
    ndim = len(op.inputs[0].shape)
    given = argument(op, "dim", argument(op, "dims"))
    listed = [given] if isinstance(given, int) else given
    if not listed:
        return tuple(range(ndim))
    return tuple(sorted({dim % max(ndim, 1) for dim in listed})) if ndim else ()


def _reduced_names(op: Op) -> tuple[str, ...]:
    dims = names(op.inputs[0])
    return tuple(name for i in _reduced(op) if (name := dims[i]) is not None)


def _kept(op: Op, dims: Dims) -> Dims:
    """The dimensions of the output: those reduced gone, or of size 1 with `keepdim`."""
    if argument(op, "keepdim", False):
        return without(dims, *_reduced(op))
    return _drop(dims, set(_reduced(op)))


def _drop(dims: Dims, positions: set[int]) -> Dims:
    return tuple(name for i, name in enumerate(dims) if i not in positions)
