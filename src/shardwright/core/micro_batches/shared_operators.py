"""Operators on values that are equal for all samples, or on the indices of samples."""

from __future__ import annotations

from shardwright.core.capture.functions_in_full import AppliedFunction
from shardwright.core.graph.graph import Op, Value
from shardwright.core.graph.local_map import LocalCall
from shardwright.core.micro_batches.sample_flow import SampleFlow
from shardwright.core.micro_batches.sample_states import (
    POSITIONS,
    WHOLE,
    SampleState,
    UnsplittableError,
    sample_dim_of_index,
)
from shardwright.core.rules import rule_of
from shardwright.core.rules.notation import call_arguments
from shardwright.core.rules.rule import depends_on_position
from shardwright.core.torch_internals.operators import OpOverload

CONSTANT = frozenset({"zeros", "ones", "full", "zeros_like", "ones_like", "full_like"})
"""Names of operators that fill a tensor with one number."""

RESHAPES = frozenset({"view", "reshape", "unsqueeze", "squeeze", "to", "_to_copy", "alias"})


def states_from_shared_inputs(flow: SampleFlow, op: Op, free: bool) -> list[SampleState]:
    """Return the `SampleState` of each output of an operator that reads no samples.

    Args:
        flow: the states determined so far.
        op: an operator in the graph of the global batch.
        free: whether the outputs are computed from inputs, buffers and constants only.

    Raises:
        UnsplittableError: if `op` cannot run on micro-batches.
    """
    if not flow.in_full.isdisjoint(op.inputs):
        if any(value.requires_grad for value in op.outputs):
            raise UnsplittableError(op, "every micro-batch runs the operator on the full batch")
        flow.in_full.update(op.outputs)
    # An operator that reads values of the prologue only is computed there too.
    if free and not flow.outside.isdisjoint(op.inputs):
        flow.outside.update(op.outputs)
        return [WHOLE] * len(op.outputs)
    if _has_custom_backward(op) and any(value.requires_grad for value in op.outputs):
        # Each micro-batch passes a term of the gradient to it.
        raise UnsplittableError(op, "the operator's custom backward may not be linear in gradients")
    # No dimension depends on the batch size: each micro-batch computes the same.
    if not op.outputs or not any(flow.varying_dims(value) for value in op.outputs):
        flow.result.emit(op, [None] * len(op.inputs), flow.outside)
        return [WHOLE] * len(op.outputs)
    if _is_arange_over_samples(flow, op):
        return [POSITIONS]
    states: list[SampleState] = []
    # Such as `zeros(len(x))`: each micro-batch makes its rows of a tensor whose rows are all equal.
    for value in op.outputs:
        dims = flow.varying_dims(value)
        if len(dims) != 1 or not _has_interchangeable_slices(flow, value, *dims):
            raise UnsplittableError(
                op, "the shape of the operator's output depends on the batch size"
            )
        states += dims
    flow.result.emit(op, [None] * len(op.inputs), flow.outside)
    return states


def state_from_positions(flow: SampleFlow, op: Op) -> SampleState | None:
    """Return the `SampleState` of the output of `op`, which reads the indices of all samples.

    Returns None unless `op` reshapes the indices, or selects a slice of each sample, as in
    `logits[arange(len(x)), last]`.

    Args:
        flow: the states determined so far.
        op: an operator in the graph of the global batch.
    """
    if op.short_name in RESHAPES and len(op.inputs) == 1:
        return POSITIONS
    if op.short_name == "index" and isinstance(op.args[1], (list, tuple)):
        sample_dim = sample_dim_of_index(op, flow.states)
        # Indices of the prologue would be those of the batch.
        if sample_dim is not None and flow.outside.isdisjoint(op.inputs):
            flow.result.emit(op, [None] * len(op.inputs))
            return sample_dim
    return None


def _is_arange_over_samples(flow: SampleFlow, op: Op) -> bool:
    """Whether `op` is `arange(batch_size)`, as in `logits[arange(len(x)), last]`."""
    # `changed_numbers` leaves out `end`, so it finds a `start` or `step` that depends on the batch.
    if op.short_name != "arange" or flow.pair.changed_numbers(op):
        return False
    arguments = call_arguments(op)
    begins = arguments.get("start") in (0, None) and arguments.get("step") in (1, None)
    return begins and op.output.shape == (flow.num_samples(),)


def _has_interchangeable_slices(flow: SampleFlow, value: Value, dim: int) -> bool:
    """Whether all slices of `value` along `dim` are equal (as in an expanded tensor), or are random
    numbers of equal distribution."""
    if dim < 0:
        return False
    op = flow.pair.batch.producer.get(value)
    rule = None if op is None else rule_of(op)
    if op is None or flow.pair.changed_numbers(op) or not flow.outside.isdisjoint(op.inputs):
        return False
    if op.short_name in ("expand", "repeat"):
        source = op.inputs[0]
        # Dimensions that `expand` and `repeat` add or widen repeat one slice.
        from_end = dim - len(value.shape)
        if from_end < -len(source.shape) or source.shape[from_end] == 1:
            return True
    if rule is None:
        return False
    # Rows of `torch.rand(len(x))` are not equal, but exchangeable: micro-batches draw their own.
    if op.short_name in CONSTANT or (rule.random and not op.inputs):
        return True
    factor = rule.outputs[op.outputs.index(value)][dim]
    # A reduction along the dimension, such as a softmax, relates its slices.
    if factor is None or rule.reductions(op, {factor: 2}):
        return False
    if depends_on_position(op, rule, factor):
        return False
    read = zip(op.inputs, rule.inputs, strict=True)
    carriers = [(v, dims) for v, dims in read if factor in dims]
    # Without an input along the dimension nothing proves that slices are equal.
    return bool(carriers) and all(
        dims.count(factor) == 1 and _has_interchangeable_slices(flow, v, dims.index(factor))
        for v, dims in carriers
    )


def _has_custom_backward(op: Op) -> bool:
    """Whether `op` is a custom operator or a replicated `autograd.Function`."""
    if isinstance(op.target, LocalCall):
        return isinstance(op.target.body, AppliedFunction)
    return isinstance(op.target, OpOverload) and op.target.namespace not in ("aten", "shardwright")
