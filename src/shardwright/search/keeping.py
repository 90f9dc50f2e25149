"""Bytes that one device keeps between forward and backward, and what of it each operator makes.

An estimate that is quick for many alternatives; `cost/memory.py` rehearses the one that is chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from shardwright.communication import Communication
from shardwright.cost.flops import is_view
from shardwright.graph.graph import Graph, Kind, Op, Value
from shardwright.graph.saved import Saved
from shardwright.layout import TensorLayout
from shardwright.transfer import Transfer

Kept = dict[str, int]
"""By operator the bytes of what it makes and the backward pass needs."""


class Keeping:
    """A graph with what autograd keeps of each of its operators.

    Args:
        saved: for each operator.
    """

    def __init__(self, graph: Graph, saved: dict[str, Saved]) -> None:
        self.graph = graph
        self.saved = saved
        self._roots: dict[Value, Value] = {}
        for op in graph.ops:
            if _shares_memory(op):
                first = op.inputs[0]
                self._roots[op.output] = self._roots.get(first, first)

    def kept(self, flow: Communication) -> Kept:
        """What is kept under a plan, segments and all: what a segment is given, and of operators
        outside what autograd keeps of them."""
        found: Kept = {}
        seen: set[object] = set()
        for maker, key, size in self._tensors(flow):
            if key not in seen:
                seen.add(key)
                found[maker] = found.get(maker, 0) + size
        return found

    def _tensors(self, flow: Communication) -> Iterator[tuple[str, object, int]]:
        makers = _makers(self.graph, flow)
        for op in self.graph.ops:
            segment = flow.segment_of.get(op.name)
            if segment is None:
                found = self.saved[op.name]
                for index in found.inputs:
                    yield from self._read(op, index, flow, makers)
                for index in found.outputs:
                    yield self._made(op.outputs[index], flow)
                share = _local(op.output, flow.made[op.output]) / max(op.output.numel, 1)
                for number, (shape, dtype) in enumerate(found.others):
                    size = prod(shape) * dtype.itemsize
                    yield op.name, (op.name, number), int(size * share)
                continue
            for index, value in enumerate(op.inputs):
                producer = self.graph.producer.get(value)
                inside = producer is not None and producer.name in segment.ops
                route = flow.routes[op.name, index]
                again = any(transfer.segment == segment.name for transfer in route)
                if not inside or (route and not again):
                    yield from self._read(op, index, flow, makers, segment.name)

    def _read(
        self,
        op: Op,
        index: int,
        flow: Communication,
        makers: dict[Transfer, str],
        segment: str = "",
    ) -> Iterator[tuple[str, object, int]]:
        """What an operator reads, as it is before a segment makes conversions again."""
        value = op.inputs[index]
        if value.kind is Kind.PARAMETER:
            return
        route = [t for t in flow.routes[op.name, index] if t.segment != segment or not segment]
        sent = [transfer for transfer in route if transfer.forward_bytes]
        if sent:
            yield makers[sent[-1]], sent[-1], _local(value, route[-1].step.target) * value.itemsize
        elif value.kind is Kind.ACTIVATION:
            yield self._made(value, flow)

    def _made(self, value: Value, flow: Communication) -> tuple[str, object, int]:
        root = self._roots.get(value, value)
        producer = self.graph.producer.get(root)
        if producer is None:
            return "", root, 0
        return producer.name, root, _local(root, flow.made[root]) * root.itemsize


def _makers(graph: Graph, flow: Communication) -> dict[Transfer, str]:
    """For each conversion the operator that it is made for first."""
    found: dict[Transfer, str] = {}
    for op in graph.ops:
        for index in range(len(op.inputs)):
            for transfer in flow.routes[op.name, index]:
                found.setdefault(transfer, op.name)
    return found


def _shares_memory(op: Op) -> bool:
    return bool(op.inputs) and len(op.outputs) == 1 and is_view(op)


def _local(value: Value, layout: TensorLayout) -> int:
    return prod(layout.shard_shape(value.shape))
