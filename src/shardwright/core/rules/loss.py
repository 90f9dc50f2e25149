"""Elementwise losses, losses per sample, and negative log-likelihood losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwright.core.graph.ctc import CTC_LOSSES
from shardwright.core.graph.custom_ops import MEAN
from shardwright.core.graph.graph import Op
from shardwright.core.rules.notation import (
    NAMES,
    aligned_to_output,
    argument_binder,
    call_arguments,
    from_notation,
    input_factors,
    overloads,
    schema_parameters,
    sharding_rule,
)
from shardwright.core.rules.rule import (
    Dims,
    Kernel,
    LocalSharding,
    Reduce,
    Reduction,
    ShardingRule,
    TwoPhaseKernel,
    no_reductions,
    rule_for,
)

# The value of `reduction` in ATen's losses; 0 is none, 1 the mean.
SUM = 2


@rule_for(CTC_LOSSES)
def ctc(op: Op) -> ShardingRule | None:
    """CTC loss, `_ b _, b _, b, b -> b`: samples can be sharded if targets are padded to a matrix.

    Returns None for concatenated targets, as the start of each sample depends on the data.
    """
    rows = len(call_arguments(op)["targets"].shape) == 2
    return from_notation("_ b _, b _, b, b -> b", op) if rows else None


@rule_for(
    *overloads("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div"),
    *overloads("binary_cross_entropy", "binary_cross_entropy_with_logits", "soft_margin_loss"),
    *overloads("poisson_nll_loss", "hinge_embedding_loss", "margin_ranking_loss"),
)
def elementwise_loss(op: Op) -> ShardingRule:
    """Elementwise loss, `b s, b s -> b s`, or `-> ()` if reduced: all dimensions can be sharded.

    A mean is a partial sum of the local means, each divided by the number of shards.
    """
    shape = torch.broadcast_shapes(*(value.shape for value in op.inputs))  # type: ignore[no-untyped-call]
    dims: Dims = tuple(NAMES[: len(shape)])
    return build_loss_rule(op, aligned_to_output(op, dims), dims, mean_loss_kernel)


def mean_loss_kernel(op: Op, local: LocalSharding) -> Callable[..., Any]:
    """Build the local kernel of a loss: the operator itself, with a mean divided by the number of
    shards, so that the local losses are partial sums."""
    num_shards = prod(local.shard_counts.values())
    # Shards are of equal size, so that the mean of local means is the global one.
    if call_arguments(op)["reduction"] != MEAN or num_shards == 1:
        return op.target
    return lambda *args, **kwargs: op.target(*args, **kwargs) / num_shards


def build_loss_rule(
    op: Op,
    inputs: tuple[Dims, ...],
    rows: Dims,
    kernel: Kernel,
    reductions: Any = no_reductions,
    classes: tuple[str, ...] = (),
) -> ShardingRule:
    """Build the rule of a loss with one value per sample; a reduced loss is a partial sum.

    Args:
        inputs: the factors of each input.
        rows: the factors of the unreduced loss.
        kernel: builder of the local computation.
        reductions: function that returns the collectives of the kernel.
        classes: factors that the unreduced loss sums too.
    """
    # 0 is no reduction.
    output = () if call_arguments(op)["reduction"] else rows
    reduced = [*classes, *(() if output else map(str, rows))]
    return sharding_rule(
        op, inputs, (output,), reduced=reduced, kernel=kernel, reductions=reductions
    )


@rule_for(*overloads("multi_margin_loss", "multilabel_margin_loss"))
def margin_loss(op: Op) -> ShardingRule:
    """Margin loss over classes, `b _, b -> b`: samples can be sharded; classes cannot, as each
    score is compared with the score of the target class."""
    rows: Dims = ("b",)[: max(0, len(op.inputs[0].shape) - 1)]
    scores, target = ((*rows, None)[: len(value.shape)] for value in op.inputs[:2])
    inputs = input_factors(op, {"self": scores, "target": target, "weight": (None,)})
    return build_loss_rule(op, inputs, rows, mean_loss_kernel)


def target_count_reduction(op: Op, shard_counts: Mapping[str, int]) -> tuple[Reduction, ...]:
    """Return the all-reduce that counts (or weighs) valid targets; () unless samples of a mean loss
    are sharded."""
    # Sharded classes do not change the number of targets.
    sharded = tuple(name for name, count in shard_counts.items() if name != "v" and count > 1)
    if call_arguments(op)["reduction"] != MEAN or not sharded:
        return ()
    dtype = accumulation_dtype(op.output.dtype)
    # Targets and class weights are not trained.
    return (Reduction(sharded, "sum", (), dtype, differentiable=False),)


def target_mean_kernel(
    op: Op, reduce_count: Reduce, loss: Callable[..., Any] | None = None
) -> TwoPhaseKernel:
    """Build the local kernel of a mean loss: the local sum over samples divided by the count (or
    weight) of the valid targets on all devices.

    The all-reduce of the count is launched early, so that no device waits for others before its
    backward pass. The sum is in single precision: in half precision it may overflow although the
    mean does not.

    Args:
        reduce_count: sum over the devices that have other samples.
        loss: the loss of local classes, by default `op.target`.
    """
    loss = op.target if loss is None else loss
    call_args = call_arguments(op)
    scores, dtype = next(iter(schema_parameters(op.target))), accumulation_dtype(op.output.dtype)
    ignored, bind = call_args["ignore_index"], argument_binder(op)
    count_inputs = [call_args[name] for name in ("target", "weight") if call_args[name] is not None]

    def count(target: Tensor, weight: Tensor | None = None) -> Tensor:
        valid = target != ignored
        if weight is not None:
            # Ignored targets may be out of range, such as -100.
            valid = weight.to(dtype)[target.masked_fill(~valid, 0)].masked_fill(~valid, 0)
        return reduce_count.start(valid.sum(dtype=dtype))

    def mean(count: Tensor, *args: Any, **kwargs: Any) -> Any:
        # A sum, as the local mean would divide by the number of local targets, which differs
        # between devices.
        arguments = {**bind(args, kwargs), "reduction": SUM}
        arguments[scores] = arguments[scores].to(dtype)
        if arguments["weight"] is not None:
            arguments["weight"] = arguments["weight"].to(dtype)
        return (loss(**arguments) / reduce_count.end(count)).to(op.output.dtype)

    return TwoPhaseKernel(tuple(op.inputs.index(value) for value in count_inputs), count, mean)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which PyTorch accumulates: float32 for half precision, else `dtype`."""
    return torch.float32 if dtype.itemsize < 4 else dtype
