"""Cross entropy of logits `b s v`, whose last dimension, the classes, can be sharded too.

With log(Σ exp) written out, the loss of one token is `W log Σ_c exp z_c - Σ_c a_c z_c`, where z are
the logits minus their maximum, a_c is the weight of class c times its (smoothed) target
probability, and W = Σ_c a_c. All of these are sums over the classes, so two all-reduces, one of the
maximum and one of the sums, give every device the loss of its tokens (vocabulary-parallel cross
entropy, as in Megatron-LM).

The loss of logarithms of probabilities (`nll_loss`) reads one class per token, whose device has the
loss: with sharded classes the losses are partial sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwright.core.graph.custom_ops import MEAN, cross_entropy
from shardwright.core.graph.graph import Op
from shardwright.core.rules.indexed import LocalIndexRange, other_shard_mask
from shardwright.core.rules.loss import (
    SUM,
    accumulation_dtype,
    build_loss_rule,
    mean_loss_kernel,
    target_count_reduction,
    target_mean_kernel,
)
from shardwright.core.rules.notation import (
    NAMES,
    argument_binder,
    call_arguments,
    input_factors,
    overloads,
    sharding_rule,
)
from shardwright.core.rules.rule import (
    Dims,
    LocalSharding,
    Reduce,
    Reduction,
    ShardingRule,
    rule_for,
)

# The value of `reduction` in ATen's losses without a reduction.
NONE = 0


@rule_for(cross_entropy)
def cross_entropy_rule(op: Op) -> ShardingRule:
    """Cross entropy, `b s v, b s -> b s`, or `-> ()` if reduced: tokens and classes can be sharded.

    If tokens are sharded, a reduced loss is a partial sum; sums over sharded classes are
    all-reduced inside the kernel.
    """
    arguments = call_arguments(op)
    # `v` names the classes.
    rows: Dims = tuple(name for name in NAMES if name != "v")[: len(arguments["logits"].shape) - 1]
    target = (*rows, "v") if _has_probability_targets(op) else rows
    dims: dict[str, Dims] = {"logits": (*rows, "v"), "target": target, "weight": ("v",)}
    return sharding_rule(
        op,
        input_factors(op, dims),
        (() if arguments["reduction"] else rows,),
        reduced=[str(name) for name in rows] if arguments["reduction"] else (),
        complete=frozenset("v"),
        kernel=_build_cross_entropy_kernel,
        reductions=_make_cross_entropy_reductions,
    )


@rule_for(*overloads("nll_loss_nd", "nll_loss", "nll_loss2d"))
def nll_loss(op: Op) -> ShardingRule:
    """Negative log-likelihood, `b v s, b s -> b s`, or `-> ()` if reduced: with sharded classes the
    loss is a partial sum; a mean counts the valid targets of all devices."""
    arguments = call_arguments(op)
    rows: Dims = tuple(name for name in NAMES if name != "v")[: len(arguments["target"].shape)]
    # Classes are the second dimension or, without a batch, the only one.
    scores = (*rows[:1], "v", *rows[1:])
    inputs = input_factors(op, {"self": scores, "target": rows, "weight": (None,)})
    options = (_build_nll_kernel, target_count_reduction, ("v",))
    return build_loss_rule(op, inputs, rows, *options)


def _build_nll_kernel(op: Op, local: LocalSharding) -> Callable[..., Any]:
    shards, bind = local.shard_counts.get("v", 1), argument_binder(op)
    if all(count == 1 for count in local.shard_counts.values()):
        return op.target
    classes = op.inputs[0].shape[1 if len(op.inputs[0].shape) > 1 else 0]
    size = classes // shards
    block = LocalIndexRange(local.index("v") * size if shards > 1 else 0, size, classes)
    ignored = call_arguments(op)["ignore_index"]

    def loss(*args: Any, **kwargs: Any) -> Tensor:
        arguments = bind(args, kwargs)
        target, weight = arguments["target"], arguments["weight"]
        # PyTorch's backward pass of images needs contiguous scores, which shards of another
        # dimension, moved by an all-to-all, are not.
        arguments["self"] = arguments["self"].contiguous()
        row, elsewhere = block.localize(target)
        # Not the index that the call ignores, which may be a class of this device.
        arguments["ignore_index"] = -1
        arguments["target"] = row.masked_fill(elsewhere | (target == ignored), -1)
        if weight is not None:
            arguments["weight"] = weight.narrow(0, block.first, size)
        out: Tensor = op.target(**arguments)
        return out

    if call_arguments(op)["reduction"] != MEAN:
        return loss
    # Devices with other classes have the same targets, which are counted once.
    return target_mean_kernel(op, local.reduce[0] if local.reduce else _WITHOUT_REDUCE, loss)


def _identity(count: Tensor) -> Tensor:
    return count


_WITHOUT_REDUCE = Reduce(_identity, _identity, _identity)
"""In place of the all-reduce of a count of targets that every device has."""


def _has_probability_targets(op: Op) -> bool:
    """Whether the targets are class probabilities, not class indices."""
    return bool(call_arguments(op)["target"].dtype.is_floating_point)


def _make_cross_entropy_reductions(
    op: Op, shard_counts: Mapping[str, int]
) -> tuple[Reduction, ...]:
    counted = () if _has_probability_targets(op) else target_count_reduction(op, shard_counts)
    if shard_counts.get("v", 1) == 1:
        return counted
    arguments = call_arguments(op)
    logits = arguments["logits"]
    dims = [name for name in NAMES if name != "v"]
    rows = tuple(n // shard_counts.get(f, 1) for n, f in zip(logits.shape[:-1], dims, strict=False))
    dtype = accumulation_dtype(logits.dtype)
    sums = (_count_class_sums(op), *rows)
    # Every device computes the same losses from the sums, so their gradients are equal and need no
    # collective: `varying` stays False.
    return (
        Reduction(("v",), "max", rows, dtype, differentiable=False),
        Reduction(("v",), "sum", sums, dtype),
        *counted,
    )


def _count_class_sums(op: Op) -> int:
    """Return the number of values per token that are all-reduced over the class shards.

    These are Σ exp z and Σ a z, for logits z minus their maximum and weighted target probabilities
    a; also Σ a, if it may differ from 1, and, with class weights, the weight of the target class.
    """
    if _has_probability_targets(op):
        return 3
    return 2 if call_arguments(op)["weight"] is None else 4


def _build_cross_entropy_kernel(op: Op, local: LocalSharding) -> Callable[..., Any]:
    if local.shard_counts.get("v", 1) > 1:
        return _build_sharded_classes_kernel(op, local)
    if _has_probability_targets(op):
        return mean_loss_kernel(op, local)
    return target_mean_kernel(op, local.reduce[0]) if local.reduce else op.target


def _build_sharded_classes_kernel(op: Op, local: LocalSharding) -> Callable[..., Any]:
    logits = call_arguments(op)["logits"]
    first = local.index("v") * (logits.shape[-1] // local.shard_counts["v"])
    reduce_max, reduce_sum, *reduce_count = local.reduce
    probabilities, bind = _has_probability_targets(op), argument_binder(op)
    terms = (
        _sum_loss_terms_for_probability_targets
        if probabilities
        else _sum_loss_terms_for_index_targets
    )

    def run(*args: Any, **kwargs: Any) -> Any:
        arguments = bind(args, kwargs)
        # Sums over a large vocabulary lose too much in 16 bits.
        scores = arguments["logits"].to(accumulation_dtype(logits.dtype))
        if arguments["weight"] is not None:
            arguments["weight"] = arguments["weight"].to(scores.dtype)
        # Without a gradient: the loss does not depend on the maximum, which only keeps exp from
        # overflowing.
        scores = scores - reduce_max(scores.detach().amax(-1)).unsqueeze(-1)
        # Stacked, so that one all-reduce carries all sums.
        local_sums = (scores.exp().sum(-1), *terms(scores, arguments, first, logits.shape[-1]))
        exponentials, products, *weights = reduce_sum(torch.stack(local_sums)).unbind()
        losses = exponentials.log() * (weights[0] if weights else 1) - products
        if not probabilities:
            ignored = arguments["target"] == arguments["ignore_index"]
            losses = losses.masked_fill(ignored, 0)
        if arguments["reduction"] == NONE:
            return losses.to(logits.dtype)
        if arguments["reduction"] == SUM:
            return losses.sum().to(logits.dtype)
        if probabilities:
            # By the global number of rows: there is no `ignore_index` for probabilities.
            return (losses.sum() / prod(logits.shape[:-1])).to(logits.dtype)
        # PyTorch divides a weighted mean by the weights of the targets, also with label smoothing.
        counted = weights[1].detach() if weights else torch.ones_like(losses)
        count = counted.masked_fill(ignored, 0).sum()
        mean = losses.sum() / (reduce_count[0](count) if reduce_count else count)
        return mean.to(logits.dtype)

    return run


def _sum_loss_terms_for_index_targets(
    scores: Tensor, arguments: Mapping[str, Any], first: Any, classes: int
) -> tuple[Tensor, ...]:
    """Sum the terms of the cross entropy over this device's classes, for class indices as targets.

    With scores z and weighted target probabilities a, the sums are Σ a z and, with class weights,
    Σ a and the weight of the target class.

    Args:
        scores: logits minus their maximum over all classes, `[..., local classes]`.
        arguments: arguments of the local call, by name.
        first: index of the first local class.
        classes: number of classes on all devices.
    """
    weight, smoothing = arguments["weight"], arguments["label_smoothing"]
    target = arguments["target"].long()
    elsewhere = other_shard_mask(target, first, scores.shape[-1], classes)
    # An ignored target, by default -100, need not be a class.
    elsewhere = elsewhere | (target == arguments["ignore_index"])
    # Any valid row, since the result is masked: `gather` would fail on one out of range.
    row = (target - first).masked_fill(elsewhere, 0)
    score = scores.gather(-1, row.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0)
    share = smoothing / classes
    if weight is None:
        product = score * (1 - smoothing)
        return (product + scores.sum(-1) * share if smoothing else product,)
    target_weight = weight[row].masked_fill(elsewhere, 0)
    total = target_weight * (1 - smoothing)
    product = total * score
    # PyTorch's label smoothing: the target probability is (1 - ε) at the target plus ε / classes
    # everywhere (Szegedy et al., "Rethinking the Inception Architecture", 2016, section 7).
    if smoothing:
        product = product + scores @ weight * share
        total = total + weight.sum() * share
    return product, total, target_weight


def _sum_loss_terms_for_probability_targets(
    scores: Tensor, arguments: Mapping[str, Any], first: Any, classes: int
) -> tuple[Tensor, ...]:
    """Sum the terms of the cross entropy over this device's classes, for targets that are class
    probabilities.

    Returns Σ a z and Σ a, with scores z and weighted target probabilities a.

    Args:
        scores: logits minus their maximum over all classes, `[..., local classes]`.
        arguments: arguments of the local call, by name.
        first: unused; it is the index of the first local class.
        classes: number of classes on all devices.
    """
    smoothing = arguments["label_smoothing"]
    weighted = arguments["target"].to(scores.dtype) * (1 - smoothing) + smoothing / classes
    if arguments["weight"] is not None:
        weighted = weighted * arguments["weight"]
    return (weighted * scores).sum(-1), weighted.sum(-1)
