"""Losses that are means over the targets that count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shardwright.core.graph.custom_ops import MEAN
from shardwright.core.graph.graph import (
    Op,
    Value,
)
from shardwright.core.rules.loss import accumulation_dtype
from shardwright.core.rules.notation import call_arguments, schema_parameters

aten = torch.ops.aten


COUNTED_LOSSES = ("cross_entropy", "nll_loss_nd", "nll_loss", "nll_loss2d")
"""Names of losses whose mean divides by the number, or sum of class weights, of valid targets."""


def with_argument(
    op: Op, args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str, argument: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments for `op` with argument `name` set to `argument`."""
    position = list(schema_parameters(op.target)).index(name)
    if position < len(args):
        return (*args[:position], argument, *args[position + 1 :]), dict(kwargs)
    return args, {**kwargs, name: argument}


def is_mean_over_targets(op: Op) -> bool:
    """Whether `op` is a loss that averages over valid (not ignored) integer targets."""
    if op.short_name not in COUNTED_LOSSES:
        return False
    arguments = call_arguments(op)
    # Floating-point targets are probabilities: all samples count, as for a plain mean.
    return arguments["reduction"] == MEAN and not arguments["target"].dtype.is_floating_point


def count_of_targets(op: Op) -> tuple[Value, list[Op]]:
    """Return the divisor of a mean over targets, and the operators that compute this divisor.

    The divisor is the number of valid targets or, with class weights, the sum of the class weights
    of valid targets.

    Args:
        op: a loss for which `is_mean_over_targets` is true.
    """
    arguments, ops = call_arguments(op), list[Op]()
    target, weight = arguments["target"], arguments["weight"]
    # Half precision cannot represent counts exactly.
    dtype = accumulation_dtype(op.output.dtype)

    def add(target: Any, *args: Any, like: Value, dtype: torch.dtype, shape: Any = None) -> Value:
        name = f"{op.name}_count_{len(ops)}"
        shape = like.shape if shape is None else shape
        output = Value(name, tuple(shape), dtype)
        ops.append(Op(name, target, args, {}, (output,), op.module, op.source))
        return output

    ignored = add(aten.eq.Scalar, target, arguments["ignore_index"], like=target, dtype=torch.bool)
    if weight is None:
        numbers = add(aten.logical_not.default, ignored, like=target, dtype=torch.bool)
    else:
        # Ignored targets may be out of range, such as -100.
        valid = add(aten.masked_fill.Scalar, target, ignored, 0, like=target, dtype=target.dtype)
        weights = add(aten.index.Tensor, weight, [valid], like=target, dtype=weight.dtype)
        numbers = add(aten.masked_fill.Scalar, weights, ignored, 0, like=target, dtype=weight.dtype)
    wide = add(aten.to.dtype, numbers, dtype, like=target, dtype=dtype)
    return add(aten.sum.default, wide, like=target, dtype=dtype, shape=()), ops
