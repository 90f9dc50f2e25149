"""Operators on means and sums over samples that depend on parameters."""

from __future__ import annotations

import torch

from shardwright.core.graph.graph import Op, Value
from shardwright.core.micro_batches.linear_operators import ADDITIVE, LINEAR
from shardwright.core.micro_batches.sample_flow import SampleFlow
from shardwright.core.micro_batches.sample_states import (
    AVERAGE,
    SUM,
    WHOLE,
    SampleState,
    UnsplittableError,
)
from shardwright.core.micro_batches.shared_operators import CONSTANT
from shardwright.core.rules.notation import call_arguments

TENSOR_SUMS = frozenset({torch.ops.aten.add.Tensor, torch.ops.aten.sub.Tensor})
"""Operators that take a number or a tensor as their argument `other`."""

PARAMETRIC_DIVISOR = (
    "its divisor, a sum or mean over samples, depends on parameters (multiply by a mask of the"
    " labels, and divide by its sum)"
)


def states_from_reduced_inputs(flow: SampleFlow, op: Op) -> list[SampleState]:
    """Return the `SampleState` of each output of an operator that reads means or sums of samples.

    Args:
        flow: the states determined so far.
        op: an operator in the graph of the global batch.

    Raises:
        UnsplittableError: if `op` is not linear in the means or sums.
    """
    if op.short_name in CONSTANT:
        # Reads the shape only, which is that of the reduced value in each micro-batch.
        flow.result.emit(op, [None] * len(op.inputs), flow.outside)
        return [WHOLE] * len(op.outputs)
    nonlinear = UnsplittableError(op, "the operator is not linear in a mean or sum over samples")
    name, arguments = op.short_name, call_arguments(op)
    reduced = [v for v in op.inputs if flow.states[v] in (SUM, AVERAGE)]
    # Rounding, comparisons and indices are not linear; sums of integers are.
    dtypes = [value.dtype for value in (*op.outputs, *reduced)]
    is_integer = not any(each.is_floating_point or each == torch.bool for each in dtypes)
    if not is_integer and not all(_can_add_sums_in_dtype(value.dtype) for value in op.outputs):
        raise nonlinear
    if name in ADDITIVE:
        # A condition or a weight selects, so only the other two operands are linear.
        constant = arguments.get({"where": "condition", "lerp": "weight"}.get(name, ""))
        if constant in reduced:
            raise nonlinear
        operands = [value for value in op.inputs if value is not constant]
        # The prologue passes integers in full to one micro-batch, but it lacks the parameters.
        if is_integer and not _can_add_as_exact_sum(flow, op, operands):
            raise nonlinear
        state = _infer_additive_output_state(flow, op, operands)
        return [state] * len(op.outputs)
    # `rounding_mode` makes a division an integer division.
    alone = len(reduced) == 1 and arguments.get("rounding_mode") is None
    # A quotient is linear in its numerator only, a linear layer only without bias.
    alone = alone and (name != "div" or op.args[0] is reduced[0])
    alone = alone and (name != "linear" or arguments["bias"] is None)
    if name == "div" and op.args[1] in reduced:
        raise UnsplittableError(op, PARAMETRIC_DIVISOR)
    if name not in LINEAR or not alone:
        raise nonlinear
    flow.result.emit(op, [None] * len(op.inputs), flow.outside)
    return [flow.states[reduced[0]]] * len(op.outputs)


def _can_add_sums_in_dtype(dtype: torch.dtype) -> bool:
    """Whether `dtype` is precise enough that operators on sums are linear up to rounding."""
    # Two or three bits of mantissa: PyTorch does not add 8-bit numbers either.
    return dtype.is_floating_point and dtype.itemsize > 1


def _can_add_as_exact_sum(flow: SampleFlow, op: Op, operands: list[Value]) -> bool:
    """Whether `op`, an addition of integers, can be computed exactly as a sum over micro-batches.

    This holds if each operand is a sum over samples, or an integer that the prologue computes.
    """
    arguments = call_arguments(op)
    names = ("self", "input", "other")
    # A number becomes a tensor that the prologue passes to one micro-batch.
    numbers = {name for name in names if isinstance(arguments.get(name), (int, float))}
    return (not numbers or (numbers == {"other"} and op.target in TENSOR_SUMS)) and all(
        flow.states[value] == SUM or (value in flow.free and not value.dtype.is_floating_point)
        for value in operands
    )


def _infer_additive_output_state(flow: SampleFlow, op: Op, operands: list[Value]) -> SampleState:
    """Return the `SampleState` of the output of an addition or subtraction.

    If an operand is a sum over micro-batches, an operand that is equal in all micro-batches is
    divided by the number of micro-batches, so that it is added once.

    Args:
        flow: the states determined so far.
        op: an operator in `ADDITIVE`.
        operands: the inputs of `op` that are added.
    """
    if all(flow.states[value] != SUM for value in operands):
        # mean(x) + c is the mean of x + c.
        flow.result.emit(op, [None] * len(op.inputs), flow.outside)
        return AVERAGE
    # A term that is equal in all n micro-batches would be added n times.
    shared = flow.shared_values([v for v in operands if flow.states[v] != SUM])
    arguments = call_arguments(op)
    # Numbers such as the 1 of `x + 1` too.
    is_integer = not op.output.dtype.is_floating_point
    numbers = {
        name: flow.result.pass_to_first(arguments[name], op)
        if is_integer
        else arguments[name] / flow.count
        for name in ("self", "input", "other")
        if isinstance(arguments.get(name), (int, float)) and arguments[name]
    }
    # Shared values of the prologue are read by `share`, not directly.
    outside = flow.outside.difference(shared)
    flow.result.emit(op, [None] * len(op.inputs), outside, shared, numbers)
    return SUM
