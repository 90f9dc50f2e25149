"""What could be recomputed in the backward pass: blocks of a model, with options for each.

The modules at one depth of the module tree are its blocks. Deeper ones need less memory while they
are recomputed; of outer ones less is kept. Each block has up to four options:

| option | recomputed | redistributions inside |
|---|---|---|
| `lean` | as `cheap`, but for biases, views and sums that it would begin with | saved |
| `cheap` | operators without matrix products | saved |
| `kept` | the whole block | saved |
| `again` | the whole block | repeated |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import torch

from shardwright.core.constraints.recompute import add_segments
from shardwright.core.cost.cluster import Cluster
from shardwright.core.cost.flops import is_view, work_of
from shardwright.core.graph.graph import Graph, Kind, Op, Value
from shardwright.core.graph.saved_tensors import SavedTensors, saved_tensors
from shardwright.core.layout.layout import DeviceMatrix, TensorLayout
from shardwright.core.partition.communication import Communication, communication
from shardwright.core.partition.decisions import Decisions, Recompute
from shardwright.core.partition.recompute_segments import (
    OperatorTransfers,
    assign_recomputed_transfers,
    recompute_segments,
)
from shardwright.core.partition.transfer import Transfer
from shardwright.core.rules import rule_of
from shardwright.core.search.recompute.knapsack import KnapsackItem

RecomputeByOp = Mapping[str, Recompute]
"""By operator how it is recomputed."""


@dataclass(frozen=True)
class RecomputePrices:
    """How many operations a device does in the time in which it moves one byte in its memory, or
    sends one. By default those of an A100: 312e12 operations a second in bfloat16, 2e12 bytes in
    memory, and 300e9 over NVLink in one direction (NVIDIA's data sheet)."""

    moved: float = 156.0
    sent: float = 1040.0

    @classmethod
    def on(cls, cluster: Cluster, dtype: torch.dtype) -> RecomputePrices:
        """On a device of `cluster` that computes in `dtype`, over its fastest links."""
        rate = cluster.device.rate(dtype)
        fastest = max(level.bandwidth for level in cluster.levels)
        return cls(rate / cluster.device.stream, rate / fastest)


@dataclass(frozen=True)
class RecomputeBlock:
    """Operators of one module, in one stage.

    Args:
        options: by name what is recomputed, with what that frees on one device and its work.
    """

    stage: int
    name: str
    options: Mapping[str, tuple[KnapsackItem, RecomputeByOp]]


DEFAULT_PRICES = RecomputePrices()

HARDLY_MORE = 1.25
"""What blocks of another depth may leave, of the least."""


class RecomputeBlocks:
    """The blocks of a planned model.

    Args:
        stage_of: for each operator the stage that runs it.
        prices: of bytes that are moved and sent again.
    """

    def __init__(
        self,
        graph: Graph,
        mesh: DeviceMatrix,
        decisions: Decisions,
        stage_of: Callable[[Op], int],
        prices: RecomputePrices = DEFAULT_PRICES,
    ) -> None:
        self.prices = prices
        self.graph, self.mesh, self.decisions, self.stage_of = graph, mesh, decisions, stage_of
        self._saved = {op.name: saved_tensors(op) for op in graph.ops}
        self._estimate = ActivationEstimate(graph, self._saved, mesh, decisions)
        self._plain_flow = communication(graph, mesh, decisions)
        flow = self._plain_flow
        self._transfers = OperatorTransfers(graph, flow.routes, flow.reductions)
        self._free = [op for op in graph.ops if op.name not in decisions.recompute]
        self._known: dict[object, float] = {}

    def blocks(self, depth: int) -> tuple[RecomputeBlock, ...]:
        """At a depth of the module tree; operators that the user has marked are in none."""
        return self._blocks(self._divided(depth), self.plain)

    @cached_property
    def depths(self) -> tuple[tuple[int, ...], ...]:
        """Of the module tree, those at which blocks may be. First those that compete: the one where
        recomputing all of them leaves least at its peak if that is within a block, and those that
        leave hardly more. Then outer ones, each of which keeps less than those before: the peak may
        be elsewhere, as in a loss over a vocabulary."""
        deepest = max((len(op.calls) for op in self._free), default=0)
        kept = {depth: self._kept(depth) for depth in range(1, deepest) or (0,)}
        peaks = {depth: size + self._inside(depth) for depth, size in kept.items()}
        best = min(peaks, key=lambda depth: peaks[depth])
        near = (depth for depth in sorted(peaks) if peaks[depth] <= HARDLY_MORE * peaks[best])
        found = [tuple(sorted(near, key=lambda depth: depth != best))]
        for depth in range(best - 1, 0, -1):
            if depth not in found[0] and kept[depth] < kept[found[-1][0]]:
                found.append((depth,))
        return tuple(found)

    @cached_property
    def plain(self) -> SavedBytes:
        """Bytes saved if nothing further is recomputed."""
        return self._saved_with({})

    def _divided(self, depth: int) -> dict[str, tuple[int, str]]:
        """For each operator its block: the call of a module at this depth, if it is in one."""
        return {
            op.name: (self.stage_of(op), op.calls[depth] if depth < len(op.calls) else "")
            for op in self._free
        }

    def _kept(self, depth: int) -> int:
        """Bytes saved with all blocks recomputed."""
        return sum(self._saved_with(self._whole(self._divided(depth), True)).values())

    def _inside(self, depth: int) -> int:
        """Bytes saved while the largest block is recomputed."""
        block_of = self._divided(depth)
        inside: dict[tuple[int, str], int] = {}
        for name, size in self.plain.items():
            if block_of.get(name, (0, ""))[1]:
                inside[block_of[name]] = inside.get(block_of[name], 0) + size
        return max(inside.values(), default=0)

    def _whole(self, block_of: Mapping[str, tuple[int, str]], again: bool) -> dict[str, Recompute]:
        return {name: Recompute(block, again) for name, (_, block) in block_of.items() if block}

    def _cheap(
        self, block_of: Mapping[str, tuple[int, str]], lean: bool = False
    ) -> dict[str, Recompute]:
        """Args:
        lean: without what a segment could begin with that saves nothing: biases, views, sums.
        """
        marks: dict[str, Recompute] = {}
        cheap: dict[str, Op] = {}
        for op in self._free:
            saved, makers = self._saved[op.name], map(self.graph.producer.get, op.inputs)
            counts = saved.inputs or saved.outputs or saved.others or not lean
            if work_of(op).forward_flops == 0 and (
                counts or any(maker is not None and maker.name in cheap for maker in makers)
            ):
                cheap[op.name] = op
        add_segments(self.graph, marks, list(cheap.values()), communication=False)
        return {name: mark for name, mark in marks.items() if name in block_of}

    def _blocks(
        self, block_of: Mapping[str, tuple[int, str]], plain: SavedBytes
    ) -> tuple[RecomputeBlock, ...]:
        options: dict[tuple[int, str], dict[str, tuple[KnapsackItem, RecomputeByOp]]] = {}
        alternatives = {
            "lean": self._cheap(block_of, lean=True),
            "cheap": self._cheap(block_of),
            "kept": self._whole(block_of, False),
            "again": self._whole(block_of, True),
        }
        for option, marks in alternatives.items():
            flow = self._flow(marks)
            kept = self._estimate.saved_bytes(flow)
            freed: dict[tuple[int, str], int] = {}
            for name, block in block_of.items():
                freed[block] = freed.get(block, 0) + plain.get(name, 0) - kept.get(name, 0)
            of_blocks: dict[tuple[int, str], dict[str, Recompute]] = {}
            for name, mark in marks.items():
                of_blocks.setdefault(block_of[name], {})[name] = mark
            work = self._work(flow, block_of)
            for block, size in freed.items():
                if size > 0 and block in of_blocks:
                    item = KnapsackItem(size, work.get(block, 0.0))
                    options.setdefault(block, {})[option] = (item, of_blocks[block])
        return tuple(RecomputeBlock(*block, by_name) for block, by_name in options.items())

    def _flow(self, marks: RecomputeByOp) -> Communication:
        """What is communicated, without buckets and their bytes. Until other marks are asked for:
        transfers are the same for all, but for what they are made again with."""
        for transfer in self._plain_flow.transfers:
            transfer.segment, transfer.again = None, False
        recompute = {**self.decisions.recompute, **marks}
        segments = recompute_segments(self.graph, recompute, self._transfers)
        assign_recomputed_transfers(segments, self._transfers, self.decisions)
        return replace(self._plain_flow, segments=segments)

    def _saved_with(self, marks: RecomputeByOp) -> SavedBytes:
        return self._estimate.saved_bytes(self._flow(marks))

    def _work(
        self, flow: Communication, block_of: Mapping[str, tuple[int, str]]
    ) -> dict[tuple[int, str], float]:
        """By block the operations that one device repeats."""
        sent: dict[str, int] = {}
        for transfer in flow.transfers:
            if transfer.segment is not None:
                size = sent.get(transfer.segment, 0)
                sent[transfer.segment] = size + transfer.forward_bytes
        operations: dict[tuple[int, str], float] = {}
        for segment in flow.segments:
            if (first := block_of.get(segment.ops[0])) is not None:
                work = self.prices.sent * sent.get(segment.name, 0)
                operations[first] = operations.get(first, 0.0) + work
            for name in self._run_again(segment.ops):
                if (block := block_of.get(name)) is not None:
                    operations[block] = operations.get(block, 0.0) + self._operations(name)
        return operations

    def _run_again(self, names: Sequence[str]) -> list[str]:
        """All up to the last that keeps something; that one only if it keeps what it makes."""
        last = max(number for number, name in enumerate(names) if self._saved[name])
        makes = self._saved[names[last]].outputs or self._saved[names[last]].others
        return list(names[: last + 1 if makes else last])

    def _operations(self, name: str) -> float:
        """What one device does for an operator in the forward pass."""
        op, cuts = self.graph.by_name[name], self.decisions.cuts.get(name, {})
        work = work_of(op)
        key = (id(work), *cuts.items())
        if key not in self._known:
            rule = rule_of(op)
            parts = rule.shard_counts(self.mesh, cuts) if rule is not None else {}
            moved = sum(
                size / prod(parts.get(factor, 1) for factor in factors)
                for size, factors in work.forward_bytes
            )
            flops = work.forward_flops / prod(parts.values())
            self._known[key] = flops + self.prices.moved * moved
        return self._known[key]


SavedBytes = dict[str, int]
"""By operator the bytes of its outputs that the backward pass needs."""


class ActivationEstimate:
    """A graph with what autograd saves of each of its operators.

    Args:
        saved: for each operator.
    """

    def __init__(
        self, graph: Graph, saved: dict[str, SavedTensors], mesh: DeviceMatrix, decisions: Decisions
    ) -> None:
        self.graph = graph
        self.saved = saved
        self._mesh, self._cuts = mesh, decisions.cuts
        self._roots: dict[Value, Value] = {}
        for op in graph.ops:
            if _shares_memory(op):
                first = op.inputs[0]
                self._roots[op.output] = self._roots.get(first, first)

    def saved_bytes(self, flow: Communication) -> SavedBytes:
        """Bytes saved under a plan: the inputs of its segments, and outside of them what autograd
        saves of each operator."""
        saved: SavedBytes = {}
        seen: set[object] = set()
        for maker, key, size in self._tensors(flow):
            if key not in seen:
                seen.add(key)
                saved[maker] = saved.get(maker, 0) + size
        return saved

    def _tensors(self, flow: Communication) -> Iterator[tuple[str, object, int]]:
        makers = _makers(self.graph, flow)
        for op in self.graph.ops:
            segment = flow.segment_of.get(op.name)
            if segment is None:
                saved = self.saved[op.name]
                for index in saved.inputs:
                    yield from self._read(op, index, flow, makers)
                for index in saved.outputs:
                    yield self._made(op.outputs[index], flow)
                for number, (shape, dtype) in enumerate(saved.others):
                    size = prod(shape) * dtype.itemsize * self._share(op, shape, flow)
                    yield op.name, (op.name, number), int(size)
                continue
            for index, value in enumerate(op.inputs):
                producer = self.graph.producer.get(value)
                inside = producer is not None and producer.name in segment.ops
                route = flow.routes[op.name, index]
                again = any(transfer.segment == segment.name for transfer in route)
                if not inside or (route and not again):
                    yield from self._read(op, index, flow, makers, segment.name)

    def _share(self, op: Op, shape: Sequence[int], flow: Communication) -> float:
        """Of a tensor that only the backward pass needs what one device has: as much as of the
        output or input of this shape, else of an output that is as large, else of what is largest;
        of what is larger than that, as much as it computes. A loss saves what has the shape of its
        input, and experts what they make of tokens for each that a token goes to."""
        used = zip(op.inputs, flow.input_layouts[op.name], strict=True)
        layouts = [(op.output, flow.initial_layouts[op.output]), *used]
        like = (each for each in layouts if tuple(each[0].shape) == tuple(shape))
        if (found := next(like, None)) is None:
            enough = op.output.numel >= prod(shape)
            found = layouts[0] if enough else max(layouts, key=lambda each: each[0].numel)
        value, layout = found
        if value.numel < prod(shape):
            return 1 / prod(map(self._mesh.size, self._cuts.get(op.name, {}).values()))
        return _local(value, layout) / max(value.numel, 1)

    def _read(
        self,
        op: Op,
        index: int,
        flow: Communication,
        makers: dict[Transfer, str],
        segment: str = "",
    ) -> Iterator[tuple[str, object, int]]:
        """What an operator reads, as it is before a segment repeats redistributions."""
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
        return producer.name, root, _local(root, flow.initial_layouts[root]) * root.itemsize


def _makers(graph: Graph, flow: Communication) -> dict[Transfer, str]:
    """For each transfer the first operator that needs it."""
    makers: dict[Transfer, str] = {}
    for op in graph.ops:
        for index in range(len(op.inputs)):
            for transfer in flow.routes[op.name, index]:
                makers.setdefault(transfer, op.name)
    return makers


def _shares_memory(op: Op) -> bool:
    return bool(op.inputs) and len(op.outputs) == 1 and is_view(op)


def _local(value: Value, layout: TensorLayout) -> int:
    return prod(layout.shard_shape(value.shape))
