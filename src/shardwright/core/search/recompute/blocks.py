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

from collections.abc import Callable, Mapping, Sequence
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


@dataclass(frozen=True)
class _OptionEffects:
    """Effects of a recomputation option that all blocks take.

    Args:
        recompute: `Recompute` decisions of the option, by operator name.
        freed: bytes that a device no longer saves for the backward pass, by operator name.
        flops: recomputed FLOPs, by operator name.
        repeated: names of the operators whose kernels run again.
    """

    recompute: RecomputeByOp
    freed: Mapping[str, int]
    flops: Mapping[str, float]
    repeated: Sequence[str]


DEFAULT_COSTS = RecomputeCosts()

PEAK_TOLERANCE = 1.25
"""Maximum estimated peak memory with blocks at a depth, relative to the lowest estimate over all
depths, for the depth to be tried."""


class RecomputeBlocks:
    """Modules of a model at each depth of its module tree, as blocks with recomputation options.

    All divisions into stages share them.

    Args:
        costs: cost of moved and sent bytes in FLOPs.
    """

    def __init__(
        self,
        graph: Graph,
        mesh: DeviceMatrix,
        decisions: Decisions,
        costs: RecomputeCosts = DEFAULT_COSTS,
    ) -> None:
        self.costs = costs
        self.graph, self.mesh, self.decisions = graph, mesh, decisions
        self._saved = {op.name: saved_tensors(op) for op in graph.ops}
        self._estimate = ActivationEstimate(graph, self._saved, mesh, decisions)
        # With the recomputation that the user has marked, and no other.
        self._plain_flow = communication(graph, mesh, decisions)
        flow = self._plain_flow
        self._transfers = OperatorTransfers(graph, flow.routes, flow.reductions)
        self._free_ops = [op for op in graph.ops if op.name not in decisions.recompute]
        self._cached_operations: dict[object, float] = {}
        self._cached_effects: dict[int, dict[str, _OptionEffects]] = {}

    def blocks(
        self, depth: int, stage_of: Callable[[Op], int] = lambda _: 0
    ) -> tuple[RecomputeBlock, ...]:
        """Return the blocks of all stages at a depth of the module tree, each with the options that
        free memory.

        Operators that the user recomputes belong to no block.

        Args:
            stage_of: function from an operator to the index of its pipeline stage.
        """
        call_of = self._call_by_op(depth)
        block_of = {op.name: (stage_of(op), call_of[op.name]) for op in self._free_ops}
        options: dict[tuple[int, str], dict[str, tuple[KnapsackItem, RecomputeByOp]]] = {}
        for option, effects in self._option_effects(depth).items():
            freed: dict[tuple[int, str], int] = {}
            for name, size in effects.freed.items():
                freed[block_of[name]] = freed.get(block_of[name], 0) + size
            flops: dict[tuple[int, str], float] = {}
            for name, number in effects.flops.items():
                if (block := block_of.get(name)) is not None:
                    flops[block] = flops.get(block, 0.0) + number
            recompute_by_block: dict[tuple[int, str], dict[str, Recompute]] = {}
            for name, each in effects.recompute.items():
                recompute_by_block.setdefault(block_of[name], {})[name] = each
            for block, size in freed.items():
                # An option may free no memory: recomputing a block of views saves its inputs
                # instead.
                if size > 0 and block in recompute_by_block:
                    item = KnapsackItem(size, flops.get(block, 0.0))
                    options.setdefault(block, {})[option] = (item, recompute_by_block[block])
        return tuple(RecomputeBlock(*block, by_name) for block, by_name in options.items())

    def depths(self, stage_of: Callable[[Op], int] = lambda _: 0) -> tuple[tuple[int, ...], ...]:
        """Groups of depths of the module tree at which modules may be blocks, to try in this order.

        Each peak is estimated with all blocks recomputed, as if it occurred inside a block. The
        first group has the depth with the lowest peak, then the depths within `PEAK_TOLERANCE` of
        it. Further groups have one outer depth each, which saves fewer bytes than the groups
        before. They help if the peak is outside of blocks, as in a loss over a large vocabulary.

        Args:
            stage_of: function from an operator to the index of its pipeline stage; a module in
                several stages is as many blocks.
        """
        saved = self._saved_bytes_by_depth
        # All that stays saved, and one block whose activations exist again while it is recomputed.
        peaks = {
            depth: size + self._largest_block_bytes(depth, stage_of)
            for depth, size in saved.items()
        }
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

    def _call_by_op(self, depth: int) -> dict[str, str]:
        """Return the module call of each operator at a depth of the module tree, by operator name;
        "" outside of modules at this depth."""
        return {op.name: op.calls[depth] if depth < len(op.calls) else "" for op in self._free_ops}

    @cached_property
    def _saved_bytes_by_depth(self) -> dict[int, int]:
        """Bytes that a device saves for the backward pass if all blocks at a depth of the module
        tree are recomputed, by depth."""
        num_depths = max((len(op.calls) for op in self._free_ops), default=0)
        return {
            depth: sum(
                self._saved_bytes_with_recompute(
                    self._recompute_full_blocks(self._call_by_op(depth), True)
                ).values()
            )
            # Depth 0 is the model itself, which is never recomputed as one block: without modules
            # only the cheap options remain.
            for depth in range(1, num_depths) or (0,)
        }

    def _largest_block_bytes(self, depth: int, stage_of: Callable[[Op], int]) -> int:
        """Return the bytes that the largest block at a depth of the module tree saves for its
        backward pass."""
        saved: dict[tuple[int, str], int] = {}
        for op in self._free_ops:
            # Operators without a module at this depth form no block that is recomputed as a whole.
            if depth < len(op.calls):
                block = stage_of(op), op.calls[depth]
                saved[block] = saved.get(block, 0) + self.saved_without_blocks.get(op.name, 0)
        return max(saved.values(), default=0)

    def _recompute_full_blocks(
        self, call_of: Mapping[str, str], communication: bool
    ) -> dict[str, Recompute]:
        # One object per block: a search keeps the decisions of thousands of candidates.
        blocks = {call: Recompute(call, communication) for call in set(call_of.values())}
        # Operators outside of modules at this depth form no block that can run as one function.
        return {name: blocks[call] for name, call in call_of.items() if call}

    def _recompute_cheap_ops(
        self, call_of: Mapping[str, str], lean: bool = False
    ) -> dict[str, Recompute]:
        """Return the decisions that recompute all operators without matrix products, by operator
        name.

        Args:
            call_of: module call of each operator that may be recomputed, by name.
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
        return {name: each for name, each in recompute.items() if name in call_of}

    def _option_effects(self, depth: int) -> dict[str, _OptionEffects]:
        """Return the effects of each recomputation option, by name, if all modules at a depth of
        the module tree take it."""
        if depth not in self._cached_effects:
            call_of = self._call_by_op(depth)
            self._cached_effects[depth] = {
                option: self._compute_effects(recompute, call_of)
                for option, recompute in self._recompute_by_option(call_of).items()
            }
        return self._cached_effects[depth]

    def _compute_effects(
        self, recompute: RecomputeByOp, call_of: Mapping[str, str]
    ) -> _OptionEffects:
        flow = self._communication_with_recompute(recompute)
        saved_before, saved = self.saved_without_blocks, self._estimate.saved_bytes(flow)
        freed = {name: saved_before.get(name, 0) - saved.get(name, 0) for name in call_of}
        repeated = [name for segment in flow.segments for name in segment.repeated_ops]
        return _OptionEffects(recompute, freed, self._count_recomputed_flops(flow), repeated)

    def freed_and_recomputed(self, depth: int) -> list[list[tuple[int, list[str]]]]:
        """Return the recomputation options of each block at a depth of the module tree, without
        those that repeat communication.

        An option is (bytes that it frees, names of the operators that it recomputes).
        """
        call_of = self._call_by_op(depth)
        options: dict[str, list[tuple[int, list[str]]]] = {}
        for option, effects in self._option_effects(depth).items():
            if option == "block_and_communication":
                continue
            recomputed: dict[str, list[str]] = {}
            for name in effects.repeated:
                if (call := call_of.get(name)) is not None:
                    recomputed.setdefault(call, []).append(name)
            freed: dict[str, int] = {}
            for name, size in effects.freed.items():
                freed[call_of[name]] = freed.get(call_of[name], 0) + size
            for call, size in freed.items():
                if size > 0:
                    options.setdefault(call, []).append((size, recomputed.get(call, [])))
        return list(options.values())

    def _recompute_by_option(self, call_of: Mapping[str, str]) -> dict[str, dict[str, Recompute]]:
        """Return, by name of each option, the `Recompute` decisions of operators if all blocks take
        the option."""
        return {
            "lean": self._recompute_cheap_ops(call_of, lean=True),
            "cheap": self._recompute_cheap_ops(call_of),
            "block": self._recompute_full_blocks(call_of, False),
            "block_and_communication": self._recompute_full_blocks(call_of, True),
        }

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

    def _count_recomputed_flops(self, flow: Communication) -> dict[str, float]:
        """Return the FLOPs that a device recomputes, by operator name.

        Moved and sent bytes are converted to FLOPs by `RecomputeCosts`. The communication of a
        segment counts for its first operator.

        Args:
            flow: communication with recomputation.
        """
        # By segment name; transfers outside of segments are not repeated.
        sent: dict[str, int] = {}
        for transfer in flow.transfers:
            if transfer.segment is not None:
                size = sent.get(transfer.segment, 0)
                sent[transfer.segment] = size + transfer.forward_bytes
        flops = {
            segment.ops[0]: self.costs.flops_per_sent_byte * sent[segment.name]
            for segment in flow.segments
            if segment.name in sent
        }
        for segment in flow.segments:
            for name in segment.repeated_ops:
                flops[name] = flops.get(name, 0.0) + self._count_forward_flops(name)
        return flops

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
