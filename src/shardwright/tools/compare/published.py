"""Predictions for published training runs described by model dimensions."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import nn

from shardwright.core.capture.capture import capture
from shardwright.core.constraints.recompute import recompute
from shardwright.core.constraints.shard import pins_of
from shardwright.core.cost.cluster import Cluster
from shardwright.core.cost.dry_run import DryRunCache
from shardwright.core.cost.memory import Memory
from shardwright.core.cost.pipeline_actions import actions
from shardwright.core.cost.predict import predict
from shardwright.core.graph.graph import Graph, Op
from shardwright.core.partition.decisions import Recompute
from shardwright.core.planner.candidate import Candidate, candidates
from shardwright.core.planner.captured_model import CapturedModel
from shardwright.core.planner.options import MB, PlanOptions
from shardwright.errors import ConfigError, ShardwrightError
from shardwright.models import build, example_batch
from shardwright.models.expert_sharding import expert_stages, paths_of_blocks, pin_expert
from shardwright.tools.compare.measured_run import MeasuredRun, check_below_peak
from shardwright.tools.compare.published_memory import (
    framework_peak_bytes,
    local_output_bytes,
    max_passes_in_flight,
    saved_producers,
)
from shardwright.tools.compare.published_rows import DTYPES, PublishedRun
from shardwright.tools.compare.published_software import Software, software_of_run
from shardwright.tools.compare.repeated_blocks import CAPTURED_BLOCKS, with_more_blocks

aten = torch.ops.aten

ZERO_LEVELS = {"none": None, "optimizer": "level1", "gradients": "level2", "parameters": "level3"}
"""Level of the option `hsdp` for each value of the key `sharded` of a published run."""

SAME_BLOCKS = {"head_dim", "decoder_sparse_step"}
"""Arguments of a `transformers` configuration by which at most every second block differs."""


class PlannedMeasurement(Protocol):
    """A published run, planned as its publication describes."""

    @property
    def run(self) -> MeasuredRun: ...

    @property
    def cluster(self) -> Cluster:
        """Cluster on which the run was measured."""

    @property
    def memory(self) -> int:
        """Predicted peak memory per device, in bytes."""

    def seconds(self, cluster: Cluster | None = None) -> float:
        """Predict the seconds of a step, by default on the cluster of the run."""


@dataclass(frozen=True)
class PlannedRun:
    """A run described by model dimensions, planned as published.

    The model is captured on first use, on the meta device. Of more than three equal blocks, one is
    captured and copied.
    """

    run: PublishedRun
    cluster: Cluster

    def __post_init__(self) -> None:
        """Raise ConfigError if the cluster has no rate for the dtype, or the run was faster than
        that peak rate."""
        if DTYPES[self.run.dtype] not in self.cluster.device.rates:
            raise ConfigError(
                f"row {self.run.id}: the cluster {self.cluster.name} has no peak rate for"
                f" {self.run.dtype}\ncheck `dtype`, or add the rate to the cluster file"
            )
        check_below_peak(self.run, self.cluster)

    def seconds(self, cluster: Cluster | None = None) -> float:
        """Predict the seconds of a step, by default on the cluster of the run."""
        # `blocking`, because published frameworks did not start redistributions early; and they
        # recompute whole segments, not only up to the last result that the backward pass needs.
        return predict(
            self.candidate.partitioned,
            cluster or self.cluster,
            blocking=True,
            repeats_segments=True,
        ).seconds

    @property
    def memory(self) -> int:
        """Predicted peak memory per device, in bytes."""
        candidate = self.candidate
        if self.run.recompute != "selective":
            return self._compute_peak_bytes(candidate.memory(), self.run.recompute == "full")
        # Selective recomputation in torchtitan saves the block's input and the results of operators
        # that are not recomputed. Ours also saves the inputs of the recomputed segments between
        # them, so memory is predicted with full recomputation plus the saved results.
        graph, decisions = candidate.model.graph, candidate.decisions
        blocks = {recompute.segment for recompute in decisions.recompute.values()}
        block_ops = {
            op.name: path for op in graph.ops if (path := _find_enclosing_block(op, blocks))
        }
        all_recomputed = {name: Recompute(path) for name, path in block_ops.items()}
        recomputed = candidate.memory(replace(decisions, recompute=all_recomputed))
        recomputed_peak = self._compute_peak_bytes(recomputed, recomputes=True)
        not_recomputed = [
            graph.by_name[name] for name in block_ops if name not in decisions.recompute
        ]
        # Megatron-LM keeps what autograd saves of the other operators; torchtitan keeps the results
        # of those that it selects.
        if self._recomputes_attention_only:
            not_recomputed = saved_producers(
                graph, not_recomputed, [graph.by_name[name] for name in decisions.recompute]
            )
        saved_bytes = sum(
            local_output_bytes(op, candidate.mesh, decisions.cuts) for op in not_recomputed
        )
        # A pass in flight is of one chunk.
        pipeline = candidate.partitioned.pipeline
        passes = max_passes_in_flight(actions(pipeline)[0])
        return recomputed_peak + int(saved_bytes / len(candidate.partitioned.chunks) * passes)

    def _compute_peak_bytes(self, memory: Memory, recomputes: bool) -> int:
        return framework_peak_bytes(memory, self.candidate.partitioned, self.software, recomputes)

    @property
    def software(self) -> Software:
        """Memory settings of the framework that trained the published run."""
        return software_of_run(self.run)

    @cached_property
    def candidate(self) -> Candidate:
        """Plan of the run. Raises ConfigError if the model cannot be sharded as published."""
        try:
            return self._plan_as_published()
        except ShardwrightError as error:
            raise ConfigError(f"row {self.run.id} cannot be planned: {error}") from error

    def _plan_as_published(self) -> Candidate:
        run = self.run
        net, graph, blocks = self._capture_blocks()
        # Parameters that stay gathered, and full gradients, are those of ZeRO-1.
        defers = self.software.defers_gradients and run.sharded == "parameters" and run.experts > 1
        level = ZERO_LEVELS["optimizer" if defers else run.sharded]
        # Nothing is searched: all shardings follow from the pins of the expert.
        options = PlanOptions(
            devices=run.devices,
            mode="sharding_propagation",
            cluster=self.cluster,
            stage_config=self._assign_stages(net, blocks),
            schedule=run.schedule_name,
            micro_batches=run.micro_batches,
            compute_dtype=None if self._autocast_dtype is None else "bfloat16",
            bucket_mb=self._compute_bucket_bytes(graph, blocks) / MB,
            hsdp=None if level is None else {"level": level, **self._shard_size},
        )
        # Copied blocks are not modules of the captured model.
        names = (*(name for name, _ in net.named_modules()), *blocks)
        # The runs were on accelerators, whatever this machine has.
        dry_runs = DryRunCache(on_accelerator=True)
        model = CapturedModel(graph, pins_of(graph), names, True, dry_runs=dry_runs)
        searched = candidates(model, options)
        # The propagation of pins has one result.
        candidate = searched[0].aligned
        if run.recompute != "selective":
            return candidate
        select = (
            _iterate_attention_ops_to_recompute
            if self._recomputes_attention_only
            else _iterate_block_ops_to_recompute
        )
        recompute_marks = dict(select(graph, blocks))
        return replace(candidate, decisions=replace(candidate.decisions, recompute=recompute_marks))

    @property
    def _shard_size(self) -> dict[str, int]:
        # Frameworks shard over the devices of context parallelism too.
        size, context = self.run.shard_size, self.run.context_parallel
        return {} if size is None else {"shard_size": size * context}

    def _capture_blocks(self) -> tuple[nn.Module, Graph, list[str]]:
        """Capture a model with few blocks; return it, the graph extended to all blocks, and the
        paths of all blocks."""
        layers = self.run.layers
        # Other further arguments may alternate blocks over more of them than are captured.
        if layers > CAPTURED_BLOCKS and self.run.hf.keys() <= SAME_BLOCKS:
            net, graph, blocks = self._capture_with_layers(CAPTURED_BLOCKS)
            # None if blocks differ; then all of them are captured.
            if (extended := with_more_blocks(graph, blocks, layers)) is not None:
                parent = blocks[0].rpartition(".")[0]
                return net, extended, [f"{parent}.{index}" for index in range(layers)]
        return self._capture_with_layers(layers)

    def _capture_with_layers(self, layers: int) -> tuple[nn.Module, Graph, list[str]]:
        """Return the model with `layers` blocks, its graph, and the paths of its blocks."""
        run = self.run
        with torch.device("meta"):
            net = build(
                run.sizes,
                num_layers=layers,
                attention="explicit" if run.has_explicit_attention else "fused",
                dtype=getattr(torch, self.software.parameter_dtype),
            )
            # The micro-batches of all replicas together.
            batch = example_batch(run.sizes, run.micro_batch * run.data_parallel)
        blocks = list(paths_of_blocks(net))
        if run.recompute == "full":
            for path in blocks:
                recompute(net.get_submodule(path))
        pin_expert(
            net,
            data_parallel=run.data_parallel,
            model_parallel=run.tensor_parallel,
            context_parallel=run.context_parallel,
            expert_parallel=run.expert_parallel,
            whole_experts=run.has_whole_experts,
            seq_parallel=run.sequence_parallel,
        )
        return net, capture(net, batch, {}, compute_dtype=self._autocast_dtype), blocks

    def _compute_bucket_bytes(self, graph: Graph, blocks: Sequence[str]) -> float:
        """Return the size of the framework's communication buckets, in bytes.

        Assumes buckets of one block, as in FSDP. The buckets of Megatron Core (40 million elements)
        and of DeepSpeed's ZeRO-1 (500 million) have at least the size of a block.
        """
        if not self.software.gathers_blocks and self.run.sharded == "parameters":
            # No two parameters fit into one bucket.
            return 1
        bytes_by_block = (
            sum(v.numel * v.itemsize for v in graph.parameters if v.name.startswith(f"{block}."))
            for block in blocks
        )
        return max(bytes_by_block) / self.run.tensor_parallel

    @property
    def _autocast_dtype(self) -> torch.dtype | None:
        """Compute dtype of mixed precision; None if all operators use the dtype of parameters."""
        if self.run.dtype == "fp32" or self.software.parameter_dtype == "bfloat16":
            return None
        # Captured in bfloat16 instead of float16, which has the same rates.
        return torch.bfloat16

    @property
    def _recomputes_attention_only(self) -> bool:
        """Whether selective recomputation recomputes only attention, as in Megatron-LM."""
        # A cluster names the software whose figures it has.
        return self.run.has_explicit_attention or "Megatron" in self.cluster.software

    def _assign_stages(self, net: nn.Module, blocks: Sequence[str]) -> dict[str, int] | None:
        run, layers = self.run, self.run.layers_of_stages
        if run.stages == 1:
            return None
        # With several chunks per stage, numbers of blocks of stages say nothing of their chunks.
        by_chunk = layers is not None and len(layers) == run.stages * run.chunks
        # With `blocks`, because `net` may have only the captured ones.
        return expert_stages(
            net, run.stages, layers if by_chunk else None, run.chunks, run.schedule_name, blocks
        )


def _iterate_block_ops_to_recompute(
    graph: Graph, blocks: Collection[str]
) -> Iterator[tuple[str, Recompute]]:
    """Yield the operators that torchtitan's selective checkpointing recomputes, by name.

    These are all operators of a block except attention and every second matrix product. Each block
    is one checkpointed segment.
    """
    products = dict.fromkeys(blocks, 0)
    for op in graph.ops:
        block = _find_enclosing_block(op, blocks)
        if block is None or op.target is aten.scaled_dot_product_attention.default:
            continue
        if op.target is aten.linear.default:
            products[block] += 1
            # The first, third, … product is saved.
            if products[block] % 2:
                continue
        yield op.name, Recompute(block)


def _iterate_attention_ops_to_recompute(
    graph: Graph, blocks: Collection[str]
) -> Iterator[tuple[str, Recompute]]:
    """Yield the operators that Megatron-LM's selective checkpointing recomputes, by name.

    These are the operators from the first to the last matrix product of unfused attention
    (Korthikanti et al., "Reducing activation recomputation in large transformer models", 2022).
    Each block is one checkpointed segment. Fused attention recomputes its scores by itself.
    """
    ops_of_block: dict[str, list[Op]] = {}
    for op in graph.ops:
        if block := _find_enclosing_block(op, blocks):
            ops_of_block.setdefault(block, []).append(op)
    for block, ops in ops_of_block.items():
        # `matmul` multiplies two activations; products with weights are `linear`.
        products = [index for index, op in enumerate(ops) if op.target is aten.matmul.default]
        for op in ops[products[0] : products[-1] + 1] if products else ():
            yield op.name, Recompute(block)


def _find_enclosing_block(op: Op, blocks: Collection[str]) -> str | None:
    names = op.module.split(".")
    paths = (".".join(names[:end]) for end in range(1, len(names) + 1))
    return next((path for path in paths if path in blocks), None)
