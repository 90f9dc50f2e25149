"""Cross entropy of class scores `b s v` with the classes last; the classes may be cut too.

With log(Σ exp) written out, the loss of one row is `W log Σ_c exp z_c - Σ_c a_c z_c`, where z are
the scores less their maximum, a_c is the weight of class c times its (smoothed) target
probability, and W = Σ_c a_c. All are sums over the classes: one all-reduce of them, after one of
the maximum, gives every device that holds a part of the classes the loss of the whole row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwright.graph.custom_ops import cross_entropy
from shardwright.graph.graph import Op
from shardwright.rules.loss import (
    SUM,
    accumulated,
    divided_by_targets,
    kernel_of_mean,
    mean_over_targets,
)
from shardwright.rules.notation import NAMES, binder, call_arguments, input_dims, sharding_rule
from shardwright.rules.rule import Dims, Local, Reduction, ShardingRule, rule_for

NONE = 0


@rule_for(cross_entropy)
def rule_of_cross_entropy(op: Op) -> ShardingRule:
    """Rows and classes may be cut. A reduced loss is a partial sum where rows are cut."""
    given = call_arguments(op)
    rows: Dims = tuple(name for name in NAMES if name != "v")[: len(given["logits"].shape) - 1]
    target = (*rows, "v") if _by_probabilities(op) else rows
    dims: dict[str, Dims] = {"logits": (*rows, "v"), "target": target, "weight": ("v",)}
    return sharding_rule(
        op,
        input_dims(op, dims),
        (() if given["reduction"] else rows,),
        reduced=[str(name) for name in rows] if given["reduction"] else (),
        complete=frozenset("v"),
        kernel=_kernel,
        reductions=_reductions,
    )


def _by_probabilities(op: Op) -> bool:
    return bool(call_arguments(op)["target"].dtype.is_floating_point)


def _reductions(op: Op, parts: Mapping[str, int]) -> tuple[Reduction, ...]:
    counted = () if _by_probabilities(op) else mean_over_targets(op, parts)
    if parts.get("v", 1) == 1:
        return counted
    given = call_arguments(op)
    logits = given["logits"]
    dims = [name for name in NAMES if name != "v"]
    rows = tuple(n // parts.get(f, 1) for n, f in zip(logits.shape[:-1], dims, strict=False))
    dtype = accumulated(logits.dtype)
    sums = (_number_of_sums(op), *rows)
    return (
        Reduction(("v",), "max", rows, dtype, differentiable=False),
        Reduction(("v",), "sum", sums, dtype),
        *counted,
    )


def _number_of_sums(op: Op) -> int:
    """Σ exp z, Σ a z, W where it is not 1, and with class weights that of the target."""
    if _by_probabilities(op):
        return 3
    return 2 if call_arguments(op)["weight"] is None else 4


def _kernel(op: Op, local: Local) -> Callable[..., Any]:
    if local.parts.get("v", 1) > 1:
        return _over_cut_classes(op, local)
    if _by_probabilities(op):
        return kernel_of_mean(op, local)
    return divided_by_targets(op, local.reduce[0]) if local.reduce else op.target


def _over_cut_classes(op: Op, local: Local) -> Callable[..., Any]:
    logits = call_arguments(op)["logits"]
    first = local.index("v") * (logits.shape[-1] // local.parts["v"])
    reduce_max, reduce_sum, *reduce_count = local.reduce
    probabilities, bind = _by_probabilities(op), binder(op)
    terms = _terms_of_probabilities if probabilities else _terms_of_classes

    def run(*args: Any, **kwargs: Any) -> Any:
        given = bind(args, kwargs)
        scores = given["logits"].to(accumulated(logits.dtype))
        if given["weight"] is not None:
            given["weight"] = given["weight"].to(scores.dtype)
        scores = scores - reduce_max(scores.detach().amax(-1)).unsqueeze(-1)
        local_sums = (scores.exp().sum(-1), *terms(scores, given, first, logits.shape[-1]))
        exponentials, products, *weights = reduce_sum(torch.stack(local_sums)).unbind()
        losses = exponentials.log() * (weights[0] if weights else 1) - products
        if not probabilities:
            ignored = given["target"] == given["ignore_index"]
            losses = losses.masked_fill(ignored, 0)
        if given["reduction"] == NONE:
            return losses.to(logits.dtype)
        if given["reduction"] == SUM:
            return losses.sum().to(logits.dtype)
        if probabilities:
            return (losses.sum() / prod(logits.shape[:-1])).to(logits.dtype)
        counted = weights[1].detach() if weights else torch.ones_like(losses)
        count = counted.masked_fill(ignored, 0).sum()
        mean = losses.sum() / (reduce_count[0](count) if reduce_count else count)
        return mean.to(logits.dtype)

    return run


def _terms_of_classes(
    scores: Tensor, given: Mapping[str, Any], first: Any, classes: int
) -> tuple[Tensor, ...]:
    """Σ a z over the classes from `first` on; with class weights W and the target's weight too."""
    weight, smoothing = given["weight"], given["label_smoothing"]
    row = given["target"].long() - first
    elsewhere = (row < 0) | (row >= scores.shape[-1])
    row = row.masked_fill(elsewhere, 0)
    score = scores.gather(-1, row.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0)
    share = smoothing / classes
    if weight is None:
        product = score * (1 - smoothing)
        return (product + scores.sum(-1) * share if smoothing else product,)
    counted = weight[row].masked_fill(elsewhere, 0)
    total = counted * (1 - smoothing)
    product = total * score
    if smoothing:
        product = product + scores @ weight * share
        total = total + weight.sum() * share
    return product, total, counted


def _terms_of_probabilities(
    scores: Tensor, given: Mapping[str, Any], first: Any, classes: int
) -> tuple[Tensor, ...]:
    """Σ a z over the classes here, and W."""
    smoothing = given["label_smoothing"]
    wanted = given["target"].to(scores.dtype) * (1 - smoothing) + smoothing / classes
    if given["weight"] is not None:
        wanted = wanted * given["weight"]
    return (wanted * scores).sum(-1), wanted.sum(-1)
