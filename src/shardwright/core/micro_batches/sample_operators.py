"""States of the outputs of operators that read samples, derived from sharding rules."""

from __future__ import annotations

from typing import Any

from shardwright.core.capture.functions_in_full import AppliedFunction
from shardwright.core.graph.custom_ops import MEAN
from shardwright.core.graph.graph import Op, Value
from shardwright.core.graph.local_map import LocalCall
from shardwright.core.micro_batches.batch_norms import takes_statistics, use_of_statistics
from shardwright.core.micro_batches.linear_operators import dims_of_indexed_sum
from shardwright.core.micro_batches.paired_graphs import DIVIDES_BATCH, TAKES_PART
from shardwright.core.micro_batches.sample_flow import SampleFlow
from shardwright.core.micro_batches.sample_states import (
    AVERAGE,
    POSITIONS,
    SUM,
    WHOLE,
    SampleState,
    UnsplittableError,
)
from shardwright.core.micro_batches.target_counts import count_of_targets, is_mean_over_targets
from shardwright.core.rules import rule_of
from shardwright.core.rules.notation import WithArguments, call_arguments
from shardwright.core.rules.rule import Dims, LocalSharding, ShardingRule, depends_on_position

DIVISIONS = frozenset({"chunk", "split", "split_with_sizes", "tensor_split", "unbind"})
"""Names of operators that split a tensor along a dimension into several tensors."""

PARTS = frozenset({"slice", "select", "narrow"})
"""Names of operators that return one slice of a tensor along a dimension."""

JOINS = frozenset({"view", "reshape", "flatten", "_unsafe_view"})
"""Names of operators that may merge the batch dimension with the dimension before it."""

MIXES = "the operator mixes samples"
RESHAPED = (
    "the operator merges the batch dimension with others so that consecutive samples are not"
    " consecutive in the result (transpose the batch dimension to the front before)"
)
NO_RULE = "the operator has no sharding rule, so it may mix samples"
AUTOGRAD_FUNCTION = (
    "it is an autograd function, which may mix samples (if it does not, call its `apply` through"
    ' `sw.local_map(F.apply, "b _ -> b _")`)'
)
RAGGED = {
    "embedding_bag": (
        "its bags of different sizes in one list cannot be split equally (pass indices of shape"
        " (samples, length), padded with `padding_idx`)"
    ),
    "ctc_losses": (
        "its targets of different lengths in one list cannot be split equally (pass targets of"
        " shape (samples, length), padded)"
    ),
}
"""Why an operator cannot be split into micro-batches, and what to do instead, by operator name."""


def states_from_sample_inputs(flow: SampleFlow, op: Op) -> list[SampleState]:
    """Return the `SampleState` of each output of an operator that reads samples.

    Args:
        flow: the states determined so far.
        op: an operator in the graph of the global batch.

    Raises:
        UnsplittableError: if `op` mixes samples.
    """
    summed_dims = dims_of_indexed_sum(op, flow.states, flow.outside, flow.free)
    # Each micro-batch adds its samples to its own term of a sum.
    if summed_dims is not None and flow.states[op.inputs[0]] == SUM:
        flow.result.emit(op, summed_dims, flow.outside)
        return [SUM]
    # A micro-batch has only its own term of a sum that its samples would need completely.
    if any(flow.states[value] in (SUM, AVERAGE) for value in op.inputs):
        raise UnsplittableError(
            op, "the operator's input, a sum over samples, depends on parameters"
        )
    rule = rule_of(op)
    # The batch dimension is a factor of the operator, as if a mesh axis sharded it.
    factor, why = (None, NO_RULE) if rule is None else _find_batch_dim_factor(flow, op, rule)
    # The rule has no common factor for it, as several samples may be added to one row of the base.
    if factor is None and summed_dims is not None:
        # Each micro-batch adds its samples to 1/n of the base, or the first one to an integer base.
        shared = flow.shared_values(op.inputs[:1])
        flow.result.emit(op, summed_dims, flow.outside.difference(shared), shared)
        return [SUM]
    if rule is None or factor is None:
        raise UnsplittableError(op, _explain_unsplittable_op(flow, op, why))
    dims = [
        factors.index(factor)
        if _reads_slice_of_shared_value(flow, value, factors, factor)
        else None
        for value, factors in zip(op.inputs, rule.inputs, strict=True)
    ]
    flow.result.emit(
        op, dims, flow.outside, numbers=_compute_local_number_arguments(flow, op, rule, factor)
    )
    reduced: list[SampleState]
    if isinstance(op.target, LocalCall):
        # The user's notation declares which outputs are means.
        reduced = [AVERAGE if op.target.is_mean(n) else SUM for n in range(len(op.outputs))]
    # Statistics are never reduced here: `analysis` marks them as unknown.
    elif takes_statistics(op) or all(factor in factors for factors in rule.outputs):
        reduced = [SUM] * len(op.outputs)
    else:
        reduced = [_infer_reduced_state(flow, op, rule, factor)] * len(op.outputs)
    return [
        factors.index(factor) if factor in factors else state
        for factors, state in zip(rule.outputs, reduced, strict=True)
    ]


def _explain_unsplittable_op(flow: SampleFlow, op: Op, default_reason: str) -> str:
    """Return why `op` cannot run on micro-batches; by default `default_reason`."""
    if flow.keeps_statistics(op):
        return "the operator normalizes samples that are not in its dimension 0"
    if op.short_name in DIVISIONS:
        return DIVIDES_BATCH
    if op.short_name in PARTS:
        return TAKES_PART
    if op.short_name in JOINS:
        return RESHAPED
    if isinstance(op.target, LocalCall) and isinstance(op.target.body, AppliedFunction):
        return AUTOGRAD_FUNCTION
    return (
        use_of_statistics(op) if takes_statistics(op) else RAGGED.get(op.short_name, default_reason)
    )


def _find_batch_dim_factor(flow: SampleFlow, op: Op, rule: ShardingRule) -> tuple[str | None, str]:
    """Return (factor of the batch dimension, ""), or (None, reason) if `op` mixes samples."""
    factors: set[str | None] = set()
    for value, dims in zip(op.inputs, rule.inputs, strict=True):
        state = flow.states[value]
        if isinstance(state, int):
            factors.add(dims[state])
    if len(factors) != 1 or None in factors:
        return None, MIXES
    (factor,) = factors
    assert factor is not None
    # A tensor with the factor in two dimensions pairs samples with each other.
    if any(dims.count(factor) > 1 for dims in (*rule.inputs, *rule.outputs)):
        return None, MIXES
    for value, dims in zip(op.inputs, rule.inputs, strict=True):
        # A value that depends on no sample must be equal for all samples: positional embeddings
        # along the batch dimension would differ between a micro-batch and the batch.
        if _reads_slice_of_shared_value(flow, value, dims, factor) and value not in flow.outside:
            return None, MIXES
    # The capacity limits the number of micro-batches as it limits the shards of a factor.
    if rule.capacity.get(factor, 0) % flow.count:
        return None, flow.not_divisible
    # A reduction within the operator, as in batch norm, runs over all samples. In a mean over
    # targets it is the divisor, which the prologue computes.
    if flow.keeps_statistics(op):
        # Statistics of each micro-batch are wanted, but batch norms average over dimension 0 only.
        reduces = flow.states[op.inputs[0]] != 0
    else:
        reduces = bool(not is_mean_over_targets(op) and rule.reductions(op, {factor: 2}))
    # An index that selects samples of the batch may select those of another micro-batch.
    is_local = isinstance(op.target, LocalCall)
    selects = not is_local and factor in rule.reduced and depends_on_position(op, rule, factor)
    return (None, MIXES) if reduces or selects else (factor, "")


def _compute_local_number_arguments(
    flow: SampleFlow, op: Op, rule: ShardingRule, factor: str
) -> dict[str, Any]:
    """Return the number arguments that an operator on a micro-batch replaces, such as the number of
    groups of a norm, by name.

    Args:
        flow: the states determined so far.
        op: an operator in the graph of the global batch.
        rule: the sharding rule of `op`.
        factor: the sharding factor of the batch dimension.

    Raises:
        UnsplittableError: if the arguments depend on the index of the micro-batch.
    """
    # The reduction of these is rewritten separately, or their code runs unchanged.
    reduces = is_mean_over_targets(op) or takes_statistics(op)
    if rule.kernel is None or reduces or isinstance(op.target, LocalCall):
        return {}

    # Kernels of shards whose number depends on the index ask for it; no micro-batch knows its own.
    def index(factor: str) -> int:
        raise UnsplittableError(op, "the operator depends on the positions of samples in the batch")

    factors = {name for dims in (*rule.inputs, *rule.outputs) for name in dims if name}
    # A micro-batch is a shard in time: the kernel of `flow.count` shards has the numbers to use.
    counts = {name: flow.count if name == factor else 1 for name in factors}
    kernel = rule.kernel(op, LocalSharding(counts, index, rule.local_output_shapes(op, counts)))
    if not isinstance(kernel, WithArguments):
        return {}
    arguments = call_arguments(op)
    replaced = kernel.replacements.items()
    return {name: number for name, number in replaced if number != arguments[name]}


def _reads_slice_of_shared_value(
    flow: SampleFlow, value: Value, factors: Dims, factor: str
) -> bool:
    """Whether an operator on a micro-batch reads only a slice of `value`.

    Args:
        flow: the states determined so far.
        value: an input of the operator, which does not depend on samples.
        factors: the sharding factor of each dimension of `value`.
        factor: the sharding factor of the batch dimension.
    """
    sliced = flow.states[value] in (WHOLE, POSITIONS) and factor in factors
    # A dimension of size 1 is broadcast to all samples.
    return sliced and value.shape[factors.index(factor)] > 1


def _infer_reduced_state(flow: SampleFlow, op: Op, rule: ShardingRule, factor: str) -> SampleState:
    """Return the `SampleState` of the output of a reduction over samples: `SUM` or `AVERAGE`.

    Args:
        flow: the states determined so far.
        op: an operator in the graph of the global batch that reduces the batch dimension.
        rule: the sharding rule of `op`.
        factor: the sharding factor of the batch dimension.

    Raises:
        UnsplittableError: if `op` is neither a mean nor a sum over samples.
    """
    if is_mean_over_targets(op):
        _record_loss_denominator(flow, op)
        return SUM
    reduction = call_arguments(op).get("reduction")
    averages = op.short_name == "mean" or reduction == MEAN
    # The kernel for shards, such as for rows of a table, may differ from the operator.
    runs_unchanged = rule.kernel is None or reduction is not None or averages
    if factor not in rule.reduced or rule.reductions(op, {factor: 2}) or not runs_unchanged:
        raise UnsplittableError(op, "the operator reduces samples, but neither to a mean nor a sum")
    return AVERAGE if averages else SUM


def _record_loss_denominator(flow: SampleFlow, op: Op) -> None:
    arguments = call_arguments(op)
    counted = [v for v in (arguments["target"], arguments["weight"]) if v is not None]
    # The prologue must be able to compute the divisor.
    if not flow.free.issuperset(counted):
        raise UnsplittableError(
            op,
            "the operator divides by a number of targets or sum of class weights that depends on"
            " parameters or random numbers",
        )
    if all(value in flow.free for value in op.inputs):
        return  # The prologue computes the loss.
    count, ops = count_of_targets(op)
    flow.result.counts += ops
    flow.result.sum_over_targets(op, count)
