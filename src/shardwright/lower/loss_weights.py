"""How much each micro-batch counts in the loss of the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.decided import Decided
from shardwright.graph.functional import MEAN
from shardwright.graph.graph import Graph, Op, Value
from shardwright.graph.interpret import run
from shardwright.graph.leading import made_of_inputs
from shardwright.lower.collectives import all_reduce
from shardwright.lower.devices import Devices
from shardwright.rules.arguments import arguments

COUNTED_LOSSES = ("cross_entropy", "nll_loss_nd", "nll_loss", "nll_loss2d")


class LossWeights:
    """The weights with which the losses of micro-batches make the loss of the whole batch.

    A mean over all targets that are not ignored weighs each micro-batch by the number of its own,
    if the targets follow from the inputs alone. All other losses are taken as means over equal
    parts.

    Args:
        graph: the whole model, for one micro-batch.
        arrivals: the axes over which inputs arrive cut; what is counted is summed over them.
    """

    def __init__(self, graph: Graph, devices: Devices, arrivals: tuple[int, ...] = ()) -> None:
        self._graph, self._devices, self._arrivals = graph, devices, arrivals
        self._target, self._ignored = _counted(graph)
        self._ops = made_of_inputs(graph, [self._target]) if self._target is not None else None

    def __call__(self, pieces: Sequence[Sequence[Any]]) -> Sequence[float | Tensor]:
        """The weights, together 1.

        Args:
            pieces: for each micro-batch the leaves of its call.
        """
        if self._ops is None or len(pieces) == 1:
            return [1 / len(pieces)] * len(pieces)
        with torch.no_grad():
            counts = torch.stack([self._count(piece) for piece in pieces])
            if self._arrivals:
                counts = all_reduce(counts, self._devices.group(self._arrivals))
            loss = self._graph.loss
            double = loss is not None and loss.dtype == torch.float64
            return (counts / counts.sum()).to(torch.float64 if double else torch.float32).unbind()

    def _count(self, leaves: Sequence[Any]) -> Tensor:
        assert self._target is not None and self._ops is not None
        given = zip(self._graph.inputs, leaves, strict=True)
        tensors = {value: leaf for value, leaf in given if isinstance(value, Value)}
        tensors |= {v: t.to(self._devices.device) for v, t in self._graph.constants.items()}
        for op in self._ops:
            tensors.update(zip(op.outputs, run(op, tensors, self._devices.device), strict=True))
        count: Tensor = (tensors[self._target] != self._ignored).sum(dtype=torch.float64)
        return count


def arrival_axes(graph: Graph, decided: Decided) -> tuple[int, ...]:
    """The axes that cut the loss' targets as they arrive."""
    target, _ = _counted(graph)
    ops = made_of_inputs(graph, [target]) if target is not None else None
    read = {target, *(value for op in ops or () for value in op.inputs)}
    cut = (decided.arrivals.get(v.name, ()) for v in graph.input_values if v in read)
    return tuple(sorted({axis for dims in cut for axes in dims for axis in axes}))


def _counted(graph: Graph) -> tuple[Value | None, int]:
    """The targets that a mean loss counts, and which of them it ignores."""
    op = graph.producer.get(graph.loss) if graph.loss is not None else None
    while op is not None and str(op.target).startswith(("aten.to.", "aten._to_copy")):
        op = graph.producer.get(op.inputs[0])
    if op is None or _name(op) not in COUNTED_LOSSES:
        return None, 0
    given = arguments(op)
    target = given["target"]
    if given["reduction"] != MEAN or given["weight"] is not None or target.dtype.is_floating_point:
        return None, 0
    if made_of_inputs(graph, [target]) is None:
        return None, 0
    return target, int(given["ignore_index"])


def _name(op: Op) -> str:
    if isinstance(op.target, torch._ops.OpOverload):
        return op.target._overloadpacket.__name__
    return op.target.__name__
