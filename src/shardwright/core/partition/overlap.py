"""Overlap of activation redistributions with computation.

A redistribution starts after the producer of its value and finishes before its first consumer. In
the backward pass, the redistribution of the gradient starts after the consumer and finishes before
the producer. If linear layers read the result, their weight gradients are delayed so that they
overlap the communication of the input gradient, as in Megatron-LM.

Operators are not reordered. Lowering emits exactly the overlap that this module returns, and the
time model counts exactly this overlap as hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwright.core.graph.graph import Graph, Op, Origin
from shardwright.core.partition.communication import Communication
from shardwright.core.partition.transfer import Transfer
from shardwright.core.torch_internals.operators import OpOverload

aten = torch.ops.aten


@dataclass(frozen=True)
class Overlap:
    """Computation that overlaps a redistribution.

    Args:
        overlapping_ops: operators between the producer of the value and the first consumer of the
            result; empty if the redistribution starts at the consumer.
        delayed_linears: linear layers that read the result; their weight gradients overlap the
            redistribution of its gradient.
        fraction: fraction of the redistribution that may overlap.
    """

    overlapping_ops: tuple[Op, ...]
    delayed_linears: tuple[Op, ...]
    fraction: float = 1.0


def overlaps(
    graph: Graph, communication: Communication, delay_weight_gradients: bool = True
) -> dict[Transfer, Overlap]:
    """Return the computation that overlaps each redistribution; no entry without overlap.

    Args:
        communication: communication of `graph`.
        delay_weight_gradients: whether weight gradients may be delayed. A schedule that splits the
            backward pass computes them in a separate pass without communication.
    """
    op_index = {op.name: index for index, op in enumerate(graph.ops)}
    first_use: dict[Transfer, int] = {}
    possible_linears: dict[Transfer, list[Op]] = {}
    for op in graph.ops:
        for index in range(len(op.inputs)):
            route = communication.routes[op.name, index]
            for transfer in route:
                # Operators come in graph order, so the first entry is the operator before which it
                # finishes.
                first_use.setdefault(transfer, op_index[op.name])
            # The first input of a linear layer is its activation.
            if route and index == 0:
                possible_linears.setdefault(route[-1], []).append(op)
    result = {}
    for transfer in filter(_can_overlap_transfer, communication.transfers):
        overlapping_ops: tuple[Op, ...] = ()
        producer = graph.producer.get(transfer.value)
        # A later transfer of a route reads the result of the previous transfer, not of the
        # producer.
        if producer is not None and transfer.previous is None:
            # A result that no operator reads is returned: its redistribution finishes after the
            # last operator.
            end = first_use.get(transfer, len(graph.ops))
            ops = graph.ops[op_index[producer.name] : end + 1]
            overlapping_ops = _find_overlapping_ops(
                communication, transfer, ops, is_returned=end == len(graph.ops)
            )
        delayed_linears = tuple(
            op
            for op in possible_linears.get(transfer, ())
            if delay_weight_gradients
            # Without communication in the backward pass there is nothing for weight gradients to
            # hide.
            and transfer.step.backward
            and _can_delay_weight_gradient(op)
            and _is_in_segment(communication, op, transfer.segment)
        )
        if overlapping_ops or delayed_linears:
            result[transfer] = Overlap(overlapping_ops, delayed_linears)
    return result


def _can_overlap_transfer(transfer: Transfer) -> bool:
    """Whether `transfer` sends an activation, and can be split into a start and a finish."""
    step, value = transfer.step, transfer.value
    # Parameters overlap by buckets. Complex numbers are sent as pairs of real numbers, whose shape
    # autograd rejects for a gradient that is still pending.
    if value.origin is Origin.PARAMETER or value.dtype.is_complex:
        return False
    # Point-to-point exchanges have no separate start and finish (`core/runtime/collectives.py`).
    sends = not step.spec.local or step.backward is not None
    return sends and step.spec.pattern != "point_to_point"


def _find_overlapping_ops(
    communication: Communication, transfer: Transfer, ops: Sequence[Op], is_returned: bool
) -> tuple[Op, ...]:
    """Return the operators between producer and first consumer of `transfer`; () if all are views.

    A recomputed segment is a separate function. So the result is also () unless the redistribution
    can start and finish in the same segment, or outside of all segments.

    Args:
        ops: operators from the producer to the first consumer, both included; to the last operator
            if no operator reads the result.
        is_returned: whether only the program's caller reads the result.
    """
    segment = transfer.segment
    boundary_ops = ops[:1] if is_returned else (ops[0], ops[-1])
    if not all(_is_in_segment(communication, op, segment) for op in boundary_ops):
        return ()
    inner_ops = ops[1:] if is_returned else ops[1:-1]
    inner_ops = tuple(op for op in inner_ops if _is_in_segment(communication, op, segment))
    return inner_ops if any(map(_launches_kernel, inner_ops)) else ()


def _is_in_segment(communication: Communication, op: Op, segment: str | None) -> bool:
    """Whether `op` belongs to the recomputed segment named `segment`; None for no segment."""
    op_segment = communication.segment_of.get(op.name)
    return (op_segment.name if op_segment is not None else None) == segment


def _launches_kernel(op: Op) -> bool:
    if not isinstance(op.target, OpOverload):
        return True
    # Views launch no kernel with which a redistribution could overlap.
    return not op.target.is_view and op.target is not aten.reshape.default


def _can_delay_weight_gradient(op: Op) -> bool:
    """Whether `op` is a linear layer that computes gradients of both weight and input."""
    # `delayed_linear` flattens all dimensions but the last, so there must be at least two.
    if op.target is not aten.linear.default or len(op.inputs[0].shape) < 2:
        return False
    # The gradient of a parameter is read last; that of a computed weight is needed at once.
    x, weight = op.inputs[:2]
    return weight.origin is Origin.PARAMETER and weight.differentiable and x.differentiable
