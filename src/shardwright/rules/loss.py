"""Losses that compare tensors element by element, row by row, or log-probabilities with a class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwright.graph.custom_ops import MEAN
from shardwright.graph.graph import Op
from shardwright.rules.notation import (
    NAMES,
    aligned,
    binder,
    call_arguments,
    input_dims,
    overloads,
    schema_parameters,
    sharding_rule,
)
from shardwright.rules.rule import (
    Ahead,
    Dims,
    Kernel,
    Local,
    Reduce,
    Reduction,
    ShardingRule,
    no_reductions,
    rule_for,
)

SUM = 2


@rule_for(
    *overloads("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div"),
    *overloads("binary_cross_entropy", "binary_cross_entropy_with_logits", "soft_margin_loss"),
    *overloads("poisson_nll_loss", "hinge_embedding_loss", "margin_ranking_loss"),
)
def loss_of_elements(op: Op) -> ShardingRule:
    """All dimensions may be cut. A mean is local mean / number of parts, a term of the sum."""
    shape = torch.broadcast_shapes(*(value.shape for value in op.inputs))  # type: ignore[no-untyped-call]
    dims: Dims = tuple(NAMES[: len(shape)])
    return _reduced_loss(op, aligned(op, dims), dims, kernel_of_mean)


def kernel_of_mean(op: Op, local: Local) -> Callable[..., Any]:
    """The target itself, its result divided by the number of parts if that is a mean."""
    parts = prod(local.parts.values())
    if call_arguments(op)["reduction"] != MEAN or parts == 1:
        return op.target
    return lambda *args, **kwargs: op.target(*args, **kwargs) / parts


def _reduced_loss(
    op: Op, inputs: tuple[Dims, ...], rows: Dims, kernel: Kernel, reductions: Any = no_reductions
) -> ShardingRule:
    output = () if call_arguments(op)["reduction"] else rows
    reduced = () if output else [str(name) for name in rows]
    return sharding_rule(
        op, inputs, (output,), reduced=reduced, kernel=kernel, reductions=reductions
    )


@rule_for(*overloads("cosine_embedding_loss"))
def loss_of_pairs(op: Op) -> ShardingRule:
    """Rows may be cut; the features of a row, which the cosine sums over, stay whole."""
    rows: Dims = ("b",)[: len(op.inputs[-1].shape)]
    pairs = tuple((*rows, None) for _ in op.inputs[:2])
    return _reduced_loss(op, (*pairs, rows), rows, kernel_of_mean)


@rule_for(*overloads("nll_loss_nd", "nll_loss", "nll_loss2d"))
def nll_loss(op: Op) -> ShardingRule:
    """`b v s -> b s`: all but the classes may be cut. A mean counts the valid targets of all."""
    given = call_arguments(op)
    rows: Dims = tuple(name for name in NAMES if name != "v")[: len(given["target"].shape)]
    scores = (*rows[:1], None, *rows[1:])
    inputs = input_dims(op, {"self": scores, "target": rows, "weight": (None,)})
    return _reduced_loss(op, inputs, rows, _kernel_of_nll, mean_over_targets)


def mean_over_targets(op: Op, parts: Mapping[str, int]) -> tuple[Reduction, ...]:
    """The all-reduce of the number (or weight) of valid targets, where a mean goes over parts."""
    cut = tuple(factor for factor, count in parts.items() if factor != "v" and count > 1)
    if call_arguments(op)["reduction"] != MEAN or not cut:
        return ()
    dtype = accumulated(op.output.dtype)
    return (Reduction(cut, "sum", (), dtype, differentiable=False),)


def _kernel_of_nll(op: Op, local: Local) -> Callable[..., Any]:
    return divided_by_targets(op, local.reduce[0]) if local.reduce else op.target


def divided_by_targets(op: Op, reduce_count: Reduce) -> Ahead:
    """The local sum over rows / the weight of the valid targets of all devices. These are counted
    ahead, so that no device waits for others before its backward pass.

    The sum may be too large for the half precision that the mean has.
    """
    named = call_arguments(op)
    scores, dtype = next(iter(schema_parameters(op.target))), accumulated(op.output.dtype)
    ignored, bind = named["ignore_index"], binder(op)
    counted = [named[name] for name in ("target", "weight") if named[name] is not None]

    def count(target: Tensor, weight: Tensor | None = None) -> Tensor:
        valid = target != ignored
        if weight is not None:
            valid = weight.to(dtype)[target.masked_fill(~valid, 0)].masked_fill(~valid, 0)
        return reduce_count.start(valid.sum(dtype=dtype))

    def mean(count: Tensor, *args: Any, **kwargs: Any) -> Any:
        given = {**bind(args, kwargs), "reduction": SUM}
        given[scores] = given[scores].to(dtype)
        if given["weight"] is not None:
            given["weight"] = given["weight"].to(dtype)
        return (op.target(**given) / reduce_count.end(count)).to(op.output.dtype)

    return Ahead(tuple(op.inputs.index(value) for value in counted), count, mean)


def accumulated(dtype: torch.dtype) -> torch.dtype:
    """Half precision is summed up in single precision, as torch does."""
    return torch.float32 if dtype.itemsize < 4 else dtype
