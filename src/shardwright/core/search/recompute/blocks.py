"""Blocks of a model that may be recomputed in the backward pass, with options for each.

The modules at one depth of the module tree are its blocks. Small blocks need less memory while they
are recomputed; large blocks save fewer inputs. Each block has up to four options:

| option | recomputed | redistributions inside |
|---|---|---|
| `lean` | as `cheap`, without biases, views and sums at the start of a segment | saved |
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
"""The recomputation of operators, by name."""


@dataclass(frozen=True)
class RecomputePrices:
    """Operations that cost as much time as moving one byte in device memory, or sending one.

    The defaults are those of an A100: 312e12 operations a second in bfloat16, 2e12 bytes a second
    in memory, and 300e9 over NVLink in one direction (NVIDIA's data sheet).
    """

    moved: float = 156.0
    sent: float = 1040.0

    @classmethod
    def on(cls, cluster: Cluster, dtype: torch.dtype) -> RecomputePrices:
        """Return the prices on a device of `cluster` that computes in `dtype`, for its fastest
        links."""
        rate = cluster.device.rate(dtype)
        fastest = max(level.bandwidth for level in cluster.levels)
        return cls(rate / cluster.device.stream, rate / fastest)


@dataclass(frozen=True)
class RecomputeBlock:
    """The operators of one module in one stage.

    Args:
        options: for each option the bytes it frees on a device with its cost in operations, and the
            operators that it recomputes.
    """

    stage: int
    name: str
    options: Mapping[str, tuple[KnapsackItem, RecomputeByOp]]


DEFAULT_PRICES = RecomputePrices()

PEAK_TOLERANCE = 1.25
"""Depths compete if their estimated peak is at most this multiple of the lowest."""


class RecomputeBlocks:
    """The blocks of a model under given decisions.

    Args:
        stage_of: returns the stage that runs an operator.
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
        self._cached_operations: dict[object, float] = {}

    def blocks(self, depth: int) -> tuple[RecomputeBlock, ...]:
        """Return the blocks at a depth of the module tree.

        Operators that the user recomputes are in none.
        """
        return self._blocks(self._block_of_ops(depth), self.plain)

    @cached_property
    def depths(self) -> tuple[tuple[int, ...], ...]:
        """Groups of depths of the module tree whose modules may be blocks.

        The first group has the depth with the lowest estimated peak with all blocks recomputed, if
        the peak is within a block, and those that come close. Then follow outer depths, each of
        which saves less than those before: the peak may be elsewhere, as in a loss over a large
        vocabulary.
        """
        deepest = max((len(op.calls) for op in self._free), default=0)
        saved = {depth: self._bytes_with_all_blocks(depth) for depth in range(1, deepest) or (0,)}
        peaks = {depth: size + self._largest_block_bytes(depth) for depth, size in saved.items()}
        # Deep blocks save many inputs, shallow ones recompute much at once: the lowest peak is in
        # between.
        best_depth = min(peaks, key=lambda depth: peaks[depth])
        competing = (
            depth for depth in sorted(peaks) if peaks[depth] <= PEAK_TOLERANCE * peaks[best_depth]
        )
        groups = [tuple(sorted(competing, key=lambda depth: depth != best_depth))]
        for depth in range(best_depth - 1, 0, -1):
            if depth not in groups[0] and saved[depth] < saved[groups[-1][0]]:
                groups.append((depth,))
        return tuple(groups)

    @cached_property
    def plain(self) -> SavedBytes:
        """Bytes saved without further recomputation."""
        return self._saved_with({})

    def _block_of_ops(self, depth: int) -> dict[str, tuple[int, str]]:
        """For each operator its stage and the module call at this depth; empty if in none."""
        return {
            op.name: (self.stage_of(op), op.calls[depth] if depth < len(op.calls) else "")
            for op in self._free
        }

    def _bytes_with_all_blocks(self, depth: int) -> int:
        """Bytes saved with all blocks recomputed."""
        return sum(
            self._saved_with(self._recompute_whole_blocks(self._block_of_ops(depth), True)).values()
        )

    def _largest_block_bytes(self, depth: int) -> int:
        """Bytes saved while the largest block is recomputed."""
        block_of = self._block_of_ops(depth)
        saved: dict[tuple[int, str], int] = {}
        for name, size in self.plain.items():
            if block_of.get(name, (0, ""))[1]:
                saved[block_of[name]] = saved.get(block_of[name], 0) + size
        return max(saved.values(), default=0)

    def _recompute_whole_blocks(
        self, block_of: Mapping[str, tuple[int, str]], communication: bool
    ) -> dict[str, Recompute]:
        return {
            name: Recompute(block, communication) for name, (_, block) in block_of.items() if block
        }

    def _recompute_cheap_ops(
        self, block_of: Mapping[str, tuple[int, str]], lean: bool = False
    ) -> dict[str, Recompute]:
        """The recomputation of all operators without matrix products.

        Args:
            lean: without operators at the start of a segment that save nothing for their backward
                pass (biases, views, sums): recomputing these frees nothing.
        """
        recompute: dict[str, Recompute] = {}
        cheap: dict[str, Op] = {}
        for op in self._free:
            saved, makers = self._saved[op.name], map(self.graph.producer.get, op.inputs)
            is_needed = saved.inputs or saved.outputs or saved.others or not lean
            # Operators without matrix products only move bytes; recomputing them costs little for
            # what it frees.
            if work_of(op).forward_flops == 0 and (
                is_needed or any(maker is not None and maker.name in cheap for maker in makers)
            ):
                cheap[op.name] = op
        add_segments(self.graph, recompute, list(cheap.values()), communication=False)
        return {name: each for name, each in recompute.items() if name in block_of}

    def _blocks(
        self, block_of: Mapping[str, tuple[int, str]], plain: SavedBytes
    ) -> tuple[RecomputeBlock, ...]:
        options: dict[tuple[int, str], dict[str, tuple[KnapsackItem, RecomputeByOp]]] = {}
        alternatives = {
            "lean": self._recompute_cheap_ops(block_of, lean=True),
            "cheap": self._recompute_cheap_ops(block_of),
            "kept": self._recompute_whole_blocks(block_of, False),
            "again": self._recompute_whole_blocks(block_of, True),
        }
        for option, recompute in alternatives.items():
            flow = self._flow(recompute)
            saved = self._estimate.saved_bytes(flow)
            freed: dict[tuple[int, str], int] = {}
            for name, block in block_of.items():
                freed[block] = freed.get(block, 0) + plain.get(name, 0) - saved.get(name, 0)
            recompute_by_block: dict[tuple[int, str], dict[str, Recompute]] = {}
            for name, each in recompute.items():
                recompute_by_block.setdefault(block_of[name], {})[name] = each
            work = self._work(flow, block_of)
            for block, size in freed.items():
                # An option that frees nothing here is none: recomputing a block of views keeps its
                # inputs instead.
                if size > 0 and block in recompute_by_block:
                    item = KnapsackItem(size, work.get(block, 0.0))
                    options.setdefault(block, {})[option] = (item, recompute_by_block[block])
        return tuple(RecomputeBlock(*block, by_name) for block, by_name in options.items())

    def _flow(self, recompute_by_op: RecomputeByOp) -> Communication:
        """The communication with some recomputation, without buckets.

        The result is valid until the next call: all share the transfers, and each call changes the
        segments with which these are repeated.
        """
        for transfer in self._plain_flow.transfers:
            # Computing routes anew for each option would take longer than all else; only segments
            # differ.
            transfer.segment, transfer.is_repeated = None, False
        recompute = {**self.decisions.recompute, **recompute_by_op}
        segments = recompute_segments(self.graph, recompute, self._transfers)
        assign_recomputed_transfers(segments, self._transfers, self.decisions)
        return replace(self._plain_flow, segments=segments)

    def _saved_with(self, recompute: RecomputeByOp) -> SavedBytes:
        return self._estimate.saved_bytes(self._flow(recompute))

    def _work(
        self, flow: Communication, block_of: Mapping[str, tuple[int, str]]
    ) -> dict[tuple[int, str], float]:
        """The operations that a device repeats, by block; bytes count by their prices."""
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
            for name in self._recomputed_ops(segment.ops):
                if (block := block_of.get(name)) is not None:
                    operations[block] = operations.get(block, 0.0) + self._operations(name)
        return operations

    def _recomputed_ops(self, names: Sequence[str]) -> list[str]:
        """The operators of a segment that checkpointing runs again.

        It stops once all saved tensors exist: before the last operator that saves any, unless that
        saves its outputs.
        """
        # PyTorch's checkpointing stops early, once the last saved tensor has been recomputed.
        last = max(number for number, name in enumerate(names) if self._saved[name])
        saves_output = self._saved[names[last]].outputs or self._saved[names[last]].others
        return list(names[: last + 1 if saves_output else last])

    def _operations(self, name: str) -> float:
        """Operations of a device for the forward pass of an operator."""
        op, cuts = self.graph.by_name[name], self.decisions.cuts.get(name, {})
        work = work_of(op)
        key = (id(work), *cuts.items())
        if key not in self._cached_operations:
            rule = rule_of(op)
            shard_counts = rule.shard_counts(self.mesh, cuts) if rule is not None else {}
            moved = sum(
                size / prod(shard_counts.get(factor, 1) for factor in factors)
                for size, factors in work.forward_bytes
            )
            flops = work.forward_flops / prod(shard_counts.values())
            self._cached_operations[key] = flops + self.prices.moved * moved
        return self._cached_operations[key]


SavedBytes = dict[str, int]
"""For each operator the bytes on a device that it computes and the backward pass needs."""


class ActivationEstimate:
    """Estimates of the bytes of activations that autograd saves.

    Args:
        saved: for each operator the tensors that autograd saves.
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
        """Return the bytes saved: the inputs of recomputed segments, and what autograd saves of all
        other operators. Tensors that share memory count once."""
        saved: SavedBytes = {}
        seen: set[object] = set()
        for op_name, key, size in self._tensors(flow):
            if key not in seen:
                seen.add(key)
                saved[op_name] = saved.get(op_name, 0) + size
        return saved

    def _tensors(self, flow: Communication) -> Iterator[tuple[str, object, int]]:
        first_ops = _first_ops(self.graph, flow)
        for op in self.graph.ops:
            segment = flow.segment_of.get(op.name)
            if segment is None:
                saved = self.saved[op.name]
                for index in saved.inputs:
                    yield from self._read_tensor(op, index, flow, first_ops)
                for index in saved.outputs:
                    yield self._computed_tensor(op.outputs[index], flow)
                for number, (shape, dtype) in enumerate(saved.others):
                    size = prod(shape) * dtype.itemsize * self._local_share(op, shape, flow)
                    yield op.name, (op.name, number), int(size)
                continue
            for index, value in enumerate(op.inputs):
                producer = self.graph.producer.get(value)
                inside = producer is not None and producer.name in segment.ops
                route = flow.routes[op.name, index]
                is_repeated = any(transfer.segment == segment.name for transfer in route)
                if not inside or (route and not is_repeated):
                    yield from self._read_tensor(op, index, flow, first_ops, segment.name)

    def _local_share(self, op: Op, shape: Sequence[int], flow: Communication) -> float:
        """The share on a device of a tensor that only the backward pass needs.

        That of the output or an input of equal shape, as the softmax that a loss saves; else that
        of the output if it is large enough, or of the largest input. A tensor larger than all of
        these, as experts save for each expert of a token, is sharded like the computation.
        """
        used = zip(op.inputs, flow.input_layouts[op.name], strict=True)
        layouts = [(op.output, flow.initial_layouts[op.output]), *used]
        same_shape = (each for each in layouts if tuple(each[0].shape) == tuple(shape))
        if (reference := next(same_shape, None)) is None:
            fits = op.output.numel >= prod(shape)
            reference = layouts[0] if fits else max(layouts, key=lambda each: each[0].numel)
        value, layout = reference
        if value.numel < prod(shape):
            return 1 / prod(map(self._mesh.size, self._cuts.get(op.name, {}).values()))
        return _local_numel(value, layout) / max(value.numel, 1)

    def _read_tensor(
        self,
        op: Op,
        index: int,
        flow: Communication,
        first_ops: dict[Transfer, str],
        segment: str = "",
    ) -> Iterator[tuple[str, object, int]]:
        """The tensor of an input that is saved: before the redistributions that a segment
        repeats."""
        # Parameters are stored anyway, and saving one takes no memory.
        value = op.inputs[index]
        if value.kind is Kind.PARAMETER:
            return
        route = [t for t in flow.routes[op.name, index] if t.segment != segment or not segment]
        sent = [transfer for transfer in route if transfer.forward_bytes]
        if sent:
            yield (
                first_ops[sent[-1]],
                sent[-1],
                _local_numel(value, route[-1].step.target) * value.itemsize,
            )
        elif value.kind is Kind.ACTIVATION:
            yield self._computed_tensor(value, flow)

    def _computed_tensor(self, value: Value, flow: Communication) -> tuple[str, object, int]:
        root = self._roots.get(value, value)
        producer = self.graph.producer.get(root)
        if producer is None:
            return "", root, 0
        return producer.name, root, _local_numel(root, flow.initial_layouts[root]) * root.itemsize


def _first_ops(graph: Graph, flow: Communication) -> dict[Transfer, str]:
    """The first operator that needs each transfer."""
    first_ops: dict[Transfer, str] = {}
    for op in graph.ops:
        for index in range(len(op.inputs)):
            for transfer in flow.routes[op.name, index]:
                first_ops.setdefault(transfer, op.name)
    return first_ops


def _shares_memory(op: Op) -> bool:
    return bool(op.inputs) and len(op.outputs) == 1 and is_view(op)


def _local_numel(value: Value, layout: TensorLayout) -> int:
    return prod(layout.shard_shape(value.shape))
