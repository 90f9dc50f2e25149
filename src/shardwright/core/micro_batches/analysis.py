"""Propagate the batch dimension from the inputs of a graph to its loss.

A micro-batch is a shard of the batch, so the sharding rule of an operator also says what the
operator computes on a micro-batch. Means and sums over samples that depend on inputs only, such as
the number of valid labels, are computed once per step for the global batch, by a graph called the
*prologue*. Means and sums that depend on parameters may pass through linear operators only: then
the loss is a mean or sum over micro-batches too.
"""

from __future__ import annotations

from collections.abc import Collection

from shardwright.core.graph.graph import Graph, Op, SampleReduction, Value
from shardwright.core.graph.local_map import LocalCall
from shardwright.core.micro_batches.micro_batch_graph import FILLED_LIKE
from shardwright.core.micro_batches.reduced_operators import states_from_reduced_inputs
from shardwright.core.micro_batches.sample_flow import SampleFlow
from shardwright.core.micro_batches.sample_operators import states_from_sample_inputs
from shardwright.core.micro_batches.sample_states import (
    AVERAGE,
    POSITIONS,
    SUM,
    UNKNOWN,
    WHOLE,
    SampleState,
    UnsplittableError,
)
from shardwright.core.micro_batches.shared_operators import (
    state_from_positions,
    states_from_shared_inputs,
)
from shardwright.core.rules import is_random

UPDATED_BY_RESULT = " is updated with its result"
"""End of an error text: a buffer is updated with a value that micro-batches cannot compute."""


def graph_of_micro_batch(flow: SampleFlow) -> Graph:
    """Return the graph of a micro-batch; its losses sum or average to the loss of the global batch.

    Args:
        flow: `SampleState` of the values in the graph of the global batch, initially of its inputs;
            updated in place.

    Raises:
        UnsplittableError: for the first operator before the loss that cannot run on micro-batches.
    """
    graph = flow.pair.batch
    # Operators off this path may mix samples, as only their outputs become unusable.
    on_path = set() if graph.loss is None else set(_find_ops_computing_value(graph, graph.loss))
    for op in graph.ops:
        _set_output_states(flow, op, op in on_path)
    state = WHOLE if graph.loss is None else flow.states[graph.loss]
    # The result would be exact, but each micro-batch would need the time and memory of the batch.
    if graph.loss is not None and state == WHOLE:
        loss_op = graph.producer[graph.loss]
        raise UnsplittableError(loss_op, "every micro-batch computes the loss from the full batch")
    outputs: dict[Value, SampleReduction | int] = {}
    for value in graph.output_values:
        of_value = _infer_result_state(flow, value)
        if of_value != WHOLE and of_value != POSITIONS and of_value != UNKNOWN:
            outputs[value] = of_value
    mixed = [value for value in graph.output_values if flow.states[value] == UNKNOWN]
    _check_outputs_read_as_numbers(flow, mixed)
    updates = _choose_update_reductions(flow)
    return flow.result.result(SUM if state == SUM else AVERAGE, outputs, mixed, updates)


def _check_outputs_read_as_numbers(flow: SampleFlow, mixed: Collection[Value]) -> None:
    """Check the outputs that Python code converts to numbers, as by `.item()`.

    Args:
        mixed: outputs that combine several samples in a way that micro-batches cannot reproduce.

    Raises:
        UnsplittableError: if Python code converts an output in `mixed` to a number.
    """
    graph = flow.pair.batch
    for index in graph.python.read_outputs if graph.python is not None else ():
        value = graph.outputs[index]
        if value in mixed:
            cause = flow.causes[value]
            raise UnsplittableError(cause.op, f"{cause.why}, and Python code reads its result")


def _infer_result_state(flow: SampleFlow, value: Value) -> SampleState:
    """Return the `SampleState` of `value`, an output or the new value of a buffer.

    If the prologue computes `value`, the micro-batches get and return it, and its state is `WHOLE`.
    """
    if value in flow.reduced:
        return flow.reduced[value]
    if value in flow.outside or flow.states[value] == POSITIONS:
        flow.result.replaced[value] = flow.result.take(value, None)
        return WHOLE
    return flow.states[value]


def _choose_update_reductions(flow: SampleFlow) -> dict[Value, SampleReduction | None]:
    """Return how to combine the micro-batches' new values of each buffer: "mean", "sum" or, if they
    are equal, None.

    Omits buffers that each micro-batch updates.

    Raises:
        UnsplittableError: if a new value mixes samples in a model with a loss.
    """
    updates: dict[Value, SampleReduction | None] = {}
    for before, after in flow.pair.batch.updates:
        if before in flow.statistics:
            continue
        match _infer_result_state(flow, after):
            case "sum" | "mean" as reduction:
                updates[before] = reduction
                continue
            case "whole":
                updates[before] = None
                continue
        # Without a loss nothing is trained: micro-batches update the buffer one after another.
        if flow.pair.batch.loss is not None:
            cause = flow.causes[after]
            why = f"{cause.why}, and {before.name!r}{UPDATED_BY_RESULT}"
            raise UnsplittableError(cause.op, why)
    return updates


def _set_output_states(flow: SampleFlow, op: Op, affects_loss: bool) -> None:
    """Set the states of an operator's outputs, derived from the states of its inputs.

    Args:
        flow: the states determined so far, updated in place.
        op: an operator in the graph of the global batch.
        affects_loss: whether the loss depends on the outputs of `op`.

    Raises:
        UnsplittableError: if the loss depends on `op`, which cannot run on micro-batches.
    """
    # The code of a `local_map` may draw random numbers or depend on other values.
    is_determined = flow.free.issuperset(op.inputs) or op.short_name in FILLED_LIKE
    free = is_determined and not flow.keeps_statistics(op)
    free = free and not is_random(op) and not isinstance(op.target, LocalCall)
    if free:
        flow.free.update(op.outputs)
    try:
        _check_no_unknown_inputs(flow, op)
        states = _infer_output_states(flow, op, free)
    except UnsplittableError as error:
        # Free operators may mix samples: the prologue computes them for the global batch.
        if not free and affects_loss:
            raise
        states = [WHOLE if free else UNKNOWN] * len(op.outputs)
        flow.outside.update(op.outputs if free else ())
        cause = next((flow.causes[v] for v in op.inputs if v in flow.causes), error)
        flow.causes.update(dict.fromkeys(op.outputs, cause))
        # Undo the replacements of the failed attempt; its operators are dropped, as nothing reads
        # them.
        for value in op.outputs:
            flow.result.replaced.pop(value, None)
    for value, state in zip(op.outputs, states, strict=True):
        flow.states[value] = state
        # Such as the number of valid labels: from the prologue, so that a division by it need not
        # be linear.
        if free and state in (SUM, AVERAGE):
            flow.reduced[value] = state
            flow.states[value] = WHOLE
            flow.outside.add(value)


def _check_no_unknown_inputs(flow: SampleFlow, op: Op) -> None:
    # In training, running statistics do not change what a batch norm returns.
    read = op.inputs[:1] if flow.keeps_statistics(op) else op.inputs
    if any(flow.states[value] == UNKNOWN for value in read):
        raise UnsplittableError(op, "the operator reads a value that mixes samples")


def _infer_output_states(flow: SampleFlow, op: Op, free: bool) -> list[SampleState]:
    """Return the `SampleState` of each output of `op`: how it depends on the samples of the batch.

    Args:
        flow: the states determined so far.
        op: an operator in the graph of the global batch.
        free: whether `op` reads neither parameters nor random numbers, so that the prologue could
            compute it.

    Raises:
        UnsplittableError: if `op` mixes samples.
    """
    read = {flow.states[value] for value in op.inputs}
    if POSITIONS in read:
        # Only views and indexing keep the indices of samples local; else the prologue computes
        # those of all.
        state = state_from_positions(flow, op)
        if state is not None:
            return [state] * len(op.outputs)
        positions = [v for v in op.inputs if flow.states[v] == POSITIONS]
        flow.outside.update(positions)
        read = read - {POSITIONS} | {WHOLE}
    # An operator in a micro-batch reads only its samples of a value such as `x[permutation]`.
    if not free:
        read |= flow.split_values_of_prologue(op)
    # Samples before sums: an operator that reads both is refused there.
    if any(isinstance(state, int) for state in read):
        states = states_from_sample_inputs(flow, op)
    elif read.intersection((SUM, AVERAGE)):
        states = states_from_reduced_inputs(flow, op)
    else:
        states = states_from_shared_inputs(flow, op, free)
    if flow.keeps_statistics(op):
        states[1:] = [UNKNOWN] * (len(states) - 1)
    # A rule does not know sizes that are Python numbers; the twin graph shows which dimensions
    # vary.
    for value, state in zip(op.outputs, states, strict=True):
        if state != POSITIONS and flow.varying_dims(value) != (
            {state} if isinstance(state, int) else set()
        ):
            raise UnsplittableError(
                op, "the shape of the operator's output depends on the batch size"
            )
    return states


def _find_ops_computing_value(graph: Graph, value: Value) -> list[Op]:
    needed, ops = {value}, []
    for op in reversed(graph.ops):
        if needed.intersection(op.outputs):
            ops.append(op)
            # The value does not depend on a tensor of which only the shape is read.
            needed.update(() if op.short_name in FILLED_LIKE else op.inputs)
    return ops
