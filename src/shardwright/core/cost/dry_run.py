"""Dry run: run the program of a chunk on the meta device to measure its memory.

A dry run executes the program that a rank will run, forward and backward through PyTorch's own
autograd. Tensors have shapes and lifetimes but no data, so a model of any size takes about a
second. No memory model is needed: autograd saves and frees the same tensors, gradients accumulate,
and buckets and recomputed segments allocate as in training. Chunks that differ only in names share
one dry run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwright.core.cost.fused_kernels import FusedKernels
from shardwright.core.cost.meta_chunk import BUFFERS, GRADIENTS, BytesByCategory, MetaChunk, Phase
from shardwright.core.cost.pipeline_actions import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT
from shardwright.core.cost.tensor_tracking import (
    WEIGHTS,
)
from shardwright.core.partition.chunk import Chunk
from shardwright.core.partition.chunk_key import chunk_key
from shardwright.core.partition.partitioned import Partitioned
from shardwright.progress import OnShare, ignore_share, subrange


@dataclass(frozen=True)
class DryRun:
    """Memory of one chunk on one device over a step.

    Args:
        bytes_before_step: bytes allocated before the step, by category of tensor; with the inputs
            of one micro-batch.
        begin: memory of the start of the step, when parameters may be gathered.
        first: memory of each action of the first micro-batch, by action (`F`, `B`, `I`, `W`).
        later: memory of each action of later micro-batches, which accumulate into existing
            gradients.
        end: memory of the end of the step, when gradients are reduced.
    """

    bytes_before_step: BytesByCategory
    begin: Phase
    first: Mapping[str, Phase]
    later: Mapping[str, Phase]
    end: Phase


def dry_run_chunk(
    partitioned: Partitioned,
    chunk: Chunk,
    pass_types: Sequence[str],
    cached_results: dict[Any, Any],
    on_share: OnShare = ignore_share,
    kernels: FusedKernels | None = None,
) -> DryRun:
    """Return the memory of one chunk of a model, measured by a dry run.

    Args:
        pass_types: passes of a micro-batch (`F`, `B`, `I`, `W`), in order. Contains at most one of
            `B` and `I`, as both free the activations of the forward pass.
        cached_results: shapes of the results of operators that have run, by operator and arguments.
        on_share: called with the completed fraction of lowering and actions.
        kernels: kernels of the device type; by default those of this machine's devices.
    """
    run = MetaChunk.from_chunk(partitioned, chunk, BACKWARD_INPUT in pass_types, cached_results)
    kernels = kernels or FusedKernels()
    # The caller may plan inside `torch.no_grad` or `torch.inference_mode`.
    with torch.inference_mode(False), torch.enable_grad(), run.live_bytes, kernels:
        bytes_before_step = run.live_bytes.bytes_between(run.label_live_tensors(BUFFERS))
        begin = run.run_phase(run.begin, WEIGHTS)
        # Lowering counts as one part of the progress, and each pass as another.
        runs = subrange(on_share, 1, 1 + len(pass_types), size=len(pass_types))
        first, later = run.run_actions(pass_types, partitioned.pipeline.micro_batches > 1, runs)
        end = run.run_phase(run.end, GRADIENTS)
    return DryRun(bytes_before_step, begin, first, later, end)


class DryRunCache:
    """Cache of dry runs by chunk, so that a chunk of several candidate plans runs once.

    Args:
        on_accelerator: whether the devices are accelerators, which save other tensors for the
            backward pass than CPUs; by default whether this machine has one.
    """

    def __init__(self, on_accelerator: bool | None = None) -> None:
        self.kernels = FusedKernels(on_accelerator)
        self._runs: dict[object, DryRun] = {}
        # Shared by all chunks, whose repeated blocks call operators with equal shapes.
        self._operator_results: dict[Any, Any] = {}

    def of(
        self,
        partitioned: Partitioned,
        chunk: Chunk,
        pass_types: Sequence[str],
        on_share: OnShare = ignore_share,
    ) -> DryRun:
        """Return the memory of `chunk` from a dry run, or from the cache.

        Args:
            pass_types: passes of the micro-batches (`F`, `B`, `I`, `W`), in order. With both `B`
                and `I`, some micro-batches run `F`, `B` and others `F`, `I`, `W`.
            on_share: called with the completed fraction of the dry run.
        """
        # Only the presence of several micro-batches matters, which accumulate gradients.
        chunk_facts = chunk_key(chunk), chunk.mesh, partitioned.pipeline.micro_batches > 1

        def run(passes: tuple[str, ...], on_share: OnShare) -> DryRun:
            key = *chunk_facts, passes
            if key not in self._runs:
                cached_results = self._operator_results
                self._runs[key] = dry_run_chunk(
                    partitioned, chunk, passes, cached_results, on_share, self.kernels
                )
            return self._runs[key]

        if not (BACKWARD in pass_types and BACKWARD_INPUT in pass_types):
            return run(tuple(pass_types), on_share)
        # One run cannot measure both. Schedules that run only one of them share its run.
        split, full = (
            run(
                tuple(each for each in pass_types if each not in excluded),
                subrange(on_share, run_index, 2),
            )
            for run_index, excluded in enumerate(((BACKWARD,), (BACKWARD_INPUT, BACKWARD_WEIGHT)))
        )
        return replace(
            split, first={**full.first, **split.first}, later={**full.later, **split.later}
        )
