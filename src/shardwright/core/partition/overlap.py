"""Which redistributions of activations are under way while operators compute.

A redistribution is started where its value is made, and finished where it is first read. Its
gradient goes the same way back. Where it is read by linear layers, the gradients of their weights
need not be ready before that of the input, so they are computed while that is under way.

The order of operators remains that of the model. Lowering writes what is listed here, and the time
model counts no more of it as hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwright.core.graph.graph import Graph, Kind, Op
from shardwright.core.partition.communication import Communication
from shardwright.core.partition.transfer import Transfer
from shardwright.core.torch_internals.operators import OpOverload

aten = torch.ops.aten


@dataclass(frozen=True)
class Overlap:
    """What is computed while a redistribution is under way.

    Args:
        beside: operators between where its value is made and where its result is first read,
            forward and backward; none if it starts where it is read.
        linears: linear layers that read its result, the gradients of whose weights are computed
            while its own gradient is under way.
    """

    beside: tuple[Op, ...]
    linears: tuple[Op, ...]


def overlaps(graph: Graph, flow: Communication, delays: bool = True) -> dict[Transfer, Overlap]:
    """The redistributions beside which something is computed.

    Args:
        delays: whether gradients of weights are delayed. Where a schedule computes them apart from
            those of the inputs, there would be nothing beside which they could be.
    """
    place = {op.name: number for number, op in enumerate(graph.ops)}
    first_use: dict[Transfer, int] = {}
    readers: dict[Transfer, list[Op]] = {}
    for op in graph.ops:
        for index in range(len(op.inputs)):
            route = flow.routes[op.name, index]
            for transfer in route:
                first_use.setdefault(transfer, place[op.name])
            if route and index == 0:
                readers.setdefault(route[-1], []).append(op)
    result = {}
    for transfer in filter(_divides, flow.transfers):
        beside: tuple[Op, ...] = ()
        maker = graph.producer.get(transfer.value)
        if maker is not None and transfer.before is None:
            end = first_use.get(transfer, len(graph.ops))
            ops = graph.ops[place[maker.name] : end + 1]
            beside = _between(flow, transfer, ops, returned=end == len(graph.ops))
        delayed = tuple(
            op
            for op in readers.get(transfer, ())
            if delays
            and transfer.step.backward
            and _delays(op)
            and _inside(flow, op, transfer.segment)
        )
        if beside or delayed:
            result[transfer] = Overlap(beside, delayed)
    return result


def _divides(transfer: Transfer) -> bool:
    """Whether it is one of an activation that sends something, and can be started by itself."""
    step, value = transfer.step, transfer.value
    if value.kind is Kind.PARAMETER or value.dtype.is_complex:
        return False
    sends = not step.spec.local or step.backward is not None
    return sends and step.spec.pattern != "point_to_point"


def _between(
    flow: Communication, transfer: Transfer, ops: Sequence[Op], returned: bool
) -> tuple[Op, ...]:
    """The operators between the maker of a transfer's value, the first of `ops`, and the reader of
    its result, the last unless it is `returned`; none if nothing is computed there.

    What is computed again in the backward pass is one function, so all must be inside or outside.
    """
    segment = transfer.segment
    ends = ops[:1] if returned else (ops[0], ops[-1])
    if not all(_inside(flow, op, segment) for op in ends):
        return ()
    beside = ops[1:] if returned else ops[1:-1]
    beside = tuple(op for op in beside if _inside(flow, op, segment))
    return beside if any(map(_computes, beside)) else ()


def _inside(flow: Communication, op: Op, segment: str | None) -> bool:
    """Whether an operator is of a segment that is computed again; of none, if it is None."""
    mine = flow.segment_of.get(op.name)
    return (mine.name if mine is not None else None) == segment


def _computes(op: Op) -> bool:
    if not isinstance(op.target, OpOverload):
        return True
    return not op.target.is_view and op.target is not aten.reshape.default


def _delays(op: Op) -> bool:
    """Whether it is a linear layer of a trained weight, and a gradient of its input is wanted."""
    if op.target is not aten.linear.default or len(op.inputs[0].shape) < 2:
        return False
    x, weight = op.inputs[:2]
    return weight.kind is Kind.PARAMETER and weight.differentiable and x.differentiable
