"""Blocks of a model that may be recomputed in the backward pass, with options for each.

The modules at one depth of the module tree are its blocks. Small blocks need less memory while they
are recomputed; large blocks save fewer inputs. Each block has up to four options:

| option | recomputed | redistributions inside |
|---|---|---|
| `lean` | as `cheap`, without biases, views and sums at the start of a segment | saved |
| `cheap` | operators without matrix products | saved |
| `block` | all operators of the block | saved |
| `block_and_communication` | all operators of the block | repeated |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import torch

from shardwright.core.constraints.recompute import add_segments
from shardwright.core.cost.cluster import Cluster
from shardwright.core.cost.flops import work_of
from shardwright.core.graph.graph import Graph, Op
from shardwright.core.graph.saved_tensors import saved_tensors
from shardwright.core.layout.layout import DeviceMatrix
from shardwright.core.partition.communication import Communication, communication
from shardwright.core.partition.decisions import Decisions, Recompute
from shardwright.core.partition.recompute_segments import (
    OperatorTransfers,
    assign_recomputed_transfers,
    recompute_segments,
)
from shardwright.core.rules import rule_of
from shardwright.core.search.recompute.activation_estimate import ActivationEstimate, SavedBytes
from shardwright.core.search.recompute.knapsack import KnapsackItem

RecomputeByOp = Mapping[str, Recompute]
"""The `Recompute` decision of each recomputed operator, by operator name."""


@dataclass(frozen=True)
class RecomputeCosts:
    """FLOPs that take as long as moving a byte in memory or sending a byte.

    The defaults are the ratios of an A100: 312e12 operations per second in bfloat16, 2e12 bytes per
    second in memory, and 300e9 bytes per second over NVLink in one direction (NVIDIA's data sheet).

    Args:
        flops_per_moved_byte: FLOPs per byte that is read or written in device memory.
        flops_per_sent_byte: FLOPs per byte that is sent over the fastest links.
    """

    flops_per_moved_byte: float = 156.0
    flops_per_sent_byte: float = 1040.0

    @classmethod
    def of_cluster(cls, cluster: Cluster, dtype: torch.dtype) -> RecomputeCosts:
        """Return the costs in FLOPs of moved and sent bytes on a device of `cluster` that computes
        in `dtype`."""
        rate = cluster.device.rate(dtype)
        # One rate for all redistributions, whose axes are not known here.
        fastest = max(level.bandwidth for level in cluster.levels)
        return cls(rate / cluster.device.stream_bandwidth, rate / fastest)


@dataclass(frozen=True)
class RecomputeBlock:
    """The operators of one module call on one pipeline stage, as a unit of recomputation.

    Args:
        stage: index of the pipeline stage.
        name: name of the module call; empty for operators outside of modules.
        options: for each recomputation option, by name: the bytes that it frees on a device with
            its cost in FLOPs, and the operators that it recomputes.
    """

    stage: int
    name: str
    options: Mapping[str, tuple[KnapsackItem, RecomputeByOp]]


DEFAULT_COSTS = RecomputeCosts()

PEAK_TOLERANCE = 1.25
"""Maximum estimated peak memory with blocks at a depth, relative to the lowest estimate over all
depths, for the depth to be tried."""


class RecomputeBlocks:
    """Modules of a model at each depth of its module tree, as blocks with recomputation options.

    Args:
        stage_of: function from an operator to the index of its pipeline stage.
        costs: cost of moved and sent bytes in FLOPs.
    """

    def __init__(
        self,
        graph: Graph,
        mesh: DeviceMatrix,
        decisions: Decisions,
        stage_of: Callable[[Op], int],
        costs: RecomputeCosts = DEFAULT_COSTS,
    ) -> None:
        self.costs = costs
        self.graph, self.mesh, self.decisions, self.stage_of = graph, mesh, decisions, stage_of
        self._saved = {op.name: saved_tensors(op) for op in graph.ops}
        self._estimate = ActivationEstimate(graph, self._saved, mesh, decisions)
        # With the recomputation that the user has marked, and no other.
        self._plain_flow = communication(graph, mesh, decisions)
        flow = self._plain_flow
        self._transfers = OperatorTransfers(graph, flow.routes, flow.reductions)
        self._free_ops = [op for op in graph.ops if op.name not in decisions.recompute]
        self._cached_operations: dict[object, float] = {}
        self._cached_blocks: dict[int, tuple[RecomputeBlock, ...]] = {}

    def blocks(self, depth: int) -> tuple[RecomputeBlock, ...]:
        """Return the blocks of all stages at a depth of the module tree.

        Operators that the user recomputes belong to no block.
        """
        if depth not in self._cached_blocks:
            self._cached_blocks[depth] = self._build_blocks(self._block_by_op(depth))
        return self._cached_blocks[depth]

    @cached_property
    def depths(self) -> tuple[tuple[int, ...], ...]:
        """Groups of depths of the module tree at which modules may be blocks, to try in this order.

        Each peak is estimated with all blocks recomputed, as if it occurred inside a block. The
        first group has the depth with the lowest peak, then the depths within `PEAK_TOLERANCE` of
        it. Further groups have one outer depth each, which saves fewer bytes than the groups
        before. They help if the peak is outside of blocks, as in a loss over a large vocabulary.
        """
        num_depths = max((len(op.calls) for op in self._free_ops), default=0)
        saved = {
            depth: self._saved_bytes_if_all_recomputed(depth)
            # Depth 0 is the model itself, which is never recomputed as one block: without modules
            # only the cheap options remain.
            for depth in range(1, num_depths) or (0,)
        }
        # All that stays saved, and one block whose activations exist again while it is recomputed.
        peaks = {depth: size + self._largest_block_bytes(depth) for depth, size in saved.items()}
        # Deep blocks save many inputs, and shallow blocks recompute many operators at once: the
        # lowest peak is in between.
        best_depth = min(peaks, key=lambda depth: peaks[depth])
        competing = (
            depth for depth in sorted(peaks) if peaks[depth] <= PEAK_TOLERANCE * peaks[best_depth]
        )
        # False sorts before True: the best depth is the first of its group.
        groups = [tuple(sorted(competing, key=lambda depth: depth != best_depth))]
        for depth in range(best_depth - 1, 0, -1):
            if depth not in groups[0] and saved[depth] < saved[groups[-1][0]]:
                groups.append((depth,))
        return tuple(groups)

    @cached_property
    def saved_without_blocks(self) -> SavedBytes:
        """Bytes that each operator saves for its backward pass if no block is recomputed, by
        operator name."""
        return self._saved_bytes_with_recompute({})

    def _block_by_op(self, depth: int) -> dict[str, tuple[int, str]]:
        """Return the block of each operator at a depth of the module tree, by operator name.

        A block is (stage index, module call); the call is "" outside of modules at this depth.
        """
        return {
            op.name: (self.stage_of(op), op.calls[depth] if depth < len(op.calls) else "")
            for op in self._free_ops
        }

    def _saved_bytes_if_all_recomputed(self, depth: int) -> int:
        """Return the bytes that a device saves for the backward pass if all blocks at a depth of
        the module tree are recomputed."""
        return sum(
            self._saved_bytes_with_recompute(
                self._recompute_full_blocks(self._block_by_op(depth), True)
            ).values()
        )

    def _largest_block_bytes(self, depth: int) -> int:
        """Return the bytes that the largest block at a depth of the module tree saves for its
        backward pass."""
        block_of = self._block_by_op(depth)
        saved: dict[tuple[int, str], int] = {}
        for name, size in self.saved_without_blocks.items():
            # Operators without a module at this depth form no block that is recomputed as a whole.
            if block_of.get(name, (0, ""))[1]:
                saved[block_of[name]] = saved.get(block_of[name], 0) + size
        return max(saved.values(), default=0)

    def _recompute_full_blocks(
        self, block_of: Mapping[str, tuple[int, str]], communication: bool
    ) -> dict[str, Recompute]:
        # Operators outside of modules at this depth form no block that can run as one function.
        return {
            name: Recompute(block, communication) for name, (_, block) in block_of.items() if block
        }

    def _recompute_cheap_ops(
        self, block_of: Mapping[str, tuple[int, str]], lean: bool = False
    ) -> dict[str, Recompute]:
        """Return the decisions that recompute all operators without matrix products, by operator
        name.

        Args:
            block_of: (stage, module call) of each operator that may be recomputed, by name.
            lean: whether to omit operators at the start of a segment that save no tensors for their
                backward pass (biases, views, sums): recomputing them frees no memory.
        """
        recompute: dict[str, Recompute] = {}
        cheap_ops: dict[str, Op] = {}
        for op in self._free_ops:
            saved, producers = self._saved[op.name], map(self.graph.producer.get, op.inputs)
            is_needed = saved.inputs or saved.outputs or saved.others or not lean
            # Operators without matrix products only move bytes; recomputing them costs little
            # compared with the bytes that it frees.
            if work_of(op).forward_flops == 0 and (
                is_needed
                or any(
                    producer is not None and producer.name in cheap_ops for producer in producers
                )
            ):
                cheap_ops[op.name] = op
        add_segments(self.graph, recompute, list(cheap_ops.values()), communication=False)
        # Segments may have taken in operators that the user recomputes, which belong to no block.
        return {name: each for name, each in recompute.items() if name in block_of}

    def _build_blocks(self, block_of: Mapping[str, tuple[int, str]]) -> tuple[RecomputeBlock, ...]:
        """Return the blocks, each with the options that free memory.

        Args:
            block_of: (stage, module call) of each operator that may be recomputed, by name.
        """
        options: dict[tuple[int, str], dict[str, tuple[KnapsackItem, RecomputeByOp]]] = {}
        # All blocks take the option at once: one pass over the graph gives the bytes of each.
        for option, recompute in self._recompute_by_option(block_of).items():
            flow = self._communication_with_recompute(recompute)
            freed = self._freed_bytes_by_block(flow, block_of)
            recompute_by_block: dict[tuple[int, str], dict[str, Recompute]] = {}
            for name, each in recompute.items():
                recompute_by_block.setdefault(block_of[name], {})[name] = each
            operations = self._count_recomputed_flops_by_block(flow, block_of)
            for block, size in freed.items():
                # An option may free no memory: recomputing a block of views saves its inputs
                # instead.
                if size > 0 and block in recompute_by_block:
                    item = KnapsackItem(size, operations.get(block, 0.0))
                    options.setdefault(block, {})[option] = (item, recompute_by_block[block])
        return tuple(RecomputeBlock(*block, by_name) for block, by_name in options.items())

    def freed_and_recomputed(
        self, depth: int
    ) -> dict[tuple[int, str], list[tuple[int, list[str]]]]:
        """Return the recomputation options of each block at a depth of the module tree, without
        those that repeat communication.

        An option is (bytes that it frees, names of the operators that it recomputes); a block is
        (stage index, module call).
        """
        block_of = self._block_by_op(depth)
        options: dict[tuple[int, str], list[tuple[int, list[str]]]] = {}
        for option, recompute in self._recompute_by_option(block_of).items():
            if option == "block_and_communication":
                continue
            flow = self._communication_with_recompute(recompute)
            recomputed: dict[tuple[int, str], list[str]] = {}
            for segment in flow.segments:
                for name in segment.repeated_ops:
                    if (block := block_of.get(name)) is not None:
                        recomputed.setdefault(block, []).append(name)
            for block, size in self._freed_bytes_by_block(flow, block_of).items():
                if size > 0:
                    options.setdefault(block, []).append((size, recomputed.get(block, [])))
        return options

    def _recompute_by_option(
        self, block_of: Mapping[str, tuple[int, str]]
    ) -> dict[str, dict[str, Recompute]]:
        """Return, by name of each option, the `Recompute` decisions of operators if all blocks take
        the option."""
        return {
            "lean": self._recompute_cheap_ops(block_of, lean=True),
            "cheap": self._recompute_cheap_ops(block_of),
            "block": self._recompute_full_blocks(block_of, False),
            "block_and_communication": self._recompute_full_blocks(block_of, True),
        }

    def _freed_bytes_by_block(
        self, flow: Communication, block_of: Mapping[str, tuple[int, str]]
    ) -> dict[tuple[int, str], int]:
        """Return the activation bytes that recomputation frees on a device, by block.

        Args:
            flow: communication with recomputation.
            block_of: (stage, module call) of each operator that may be recomputed, by name.
        """
        saved_before, saved = self.saved_without_blocks, self._estimate.saved_bytes(flow)
        freed: dict[tuple[int, str], int] = {}
        for name, block in block_of.items():
            freed_by_op = saved_before.get(name, 0) - saved.get(name, 0)
            freed[block] = freed.get(block, 0) + freed_by_op
        return freed

    def _communication_with_recompute(self, recompute_by_op: RecomputeByOp) -> Communication:
        """Return the communication of the model with additional recomputation, without buckets of
        parameters.

        The next call invalidates the result: results share transfers, and each call changes the
        segments of the transfers.

        Args:
            recompute_by_op: additional recomputation, by operator name.
        """
        for transfer in self._plain_flow.transfers:
            # Only segments differ; computing routes again for each option would take longer than
            # the rest of the search.
            transfer.segment, transfer.is_repeated = None, False
        recompute = {**self.decisions.recompute, **recompute_by_op}
        segments = recompute_segments(self.graph, recompute, self._transfers)
        assign_recomputed_transfers(segments, self._transfers, self.decisions)
        return replace(self._plain_flow, segments=segments)

    def _saved_bytes_with_recompute(self, recompute: RecomputeByOp) -> SavedBytes:
        return self._estimate.saved_bytes(self._communication_with_recompute(recompute))

    def _count_recomputed_flops_by_block(
        self, flow: Communication, block_of: Mapping[str, tuple[int, str]]
    ) -> dict[tuple[int, str], float]:
        """Return the FLOPs that a device recomputes, by block.

        Moved and sent bytes are converted to FLOPs by `RecomputeCosts`.

        Args:
            flow: communication with recomputation.
            block_of: (stage, module call) of each operator that may be recomputed, by name.
        """
        # By segment name; transfers outside of segments are not repeated.
        sent: dict[str, int] = {}
        for transfer in flow.transfers:
            if transfer.segment is not None:
                size = sent.get(transfer.segment, 0)
                sent[transfer.segment] = size + transfer.forward_bytes
        operations: dict[tuple[int, str], float] = {}
        for segment in flow.segments:
            # The communication of a segment across blocks counts for the block of its first
            # operator.
            if (first_block := block_of.get(segment.ops[0])) is not None:
                sending = self.costs.flops_per_sent_byte * sent.get(segment.name, 0)
                operations[first_block] = operations.get(first_block, 0.0) + sending
            for name in segment.repeated_ops:
                if (block := block_of.get(name)) is not None:
                    operations[block] = operations.get(block, 0.0) + self._count_forward_flops(name)
        return operations

    def _count_forward_flops(self, op_name: str) -> float:
        """Return the FLOPs of an operator's forward pass on a device.

        Bytes moved in memory are converted to FLOPs by `RecomputeCosts`.
        """
        op, cuts = self.graph.by_name[op_name], self.decisions.cuts.get(op_name, {})
        work = work_of(op)
        # Repeated layers with equal cuts have equal FLOPs.
        key = (id(work), *cuts.items())
        if key not in self._cached_operations:
            rule = rule_of(op)
            shard_counts = rule.shard_counts(self.mesh, cuts) if rule is not None else {}
            moved_bytes = sum(
                size / prod(shard_counts.get(factor, 1) for factor in factors)
                for size, factors in work.forward_bytes
            )
            # Every cut factor divides the FLOPs, contracted ones too.
            flops = work.forward_flops / prod(shard_counts.values())
            self._cached_operations[key] = flops + self.costs.flops_per_moved_byte * moved_bytes
        return self._cached_operations[key]
