"""Memory of the tensors that a chunk exchanges with its neighbors."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from shardwright.core.cost.pipeline_actions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
)
from shardwright.core.graph.graph import Value
from shardwright.core.partition.chunk import Chunk
from shardwright.core.partition.communication import initial_layout
from shardwright.core.partition.pipeline_spec import PipelineSpec


def received_bytes(chunk: Chunk) -> int:
    """Return the bytes per micro-batch of the tensors that `chunk` receives from the previous
    chunk."""
    return sum(local_bytes(value, chunk, value.dtype) for value in chunk.arriving)


def local_bytes(value: Value, chunk: Chunk, dtype: torch.dtype) -> int:
    """Return the bytes on a device of a parameter, buffer or input of `chunk` in `dtype`."""
    layout = initial_layout(value, chunk.mesh, chunk.decisions)
    return prod(layout.shard_shape(value.shape)) * dtype.itemsize


@dataclass(frozen=True)
class BorderBytes:
    """Corrections of a chunk's dry run for tensors that it exchanges with neighboring chunks, in
    bytes per micro-batch.

    A dry run of one chunk allocates its inputs and the gradients of its outputs, and frees both at
    the end of the backward pass. A neighbor on the same stage owns these tensors, so they must not
    count twice and may live longer.

    Args:
        inputs: bytes of inputs that are outputs of the previous chunk on the same stage.
        gradients: bytes of gradients of outputs that the next chunk on the same stage computes.
        returned: bytes of gradients of inputs, which outlive the backward pass.
        is_previous_on_stage: whether the previous chunk, which reads the `returned` gradients, is
            on the same stage. Otherwise they are sent, and those of one micro-batch are alive at a
            time.
    """

    inputs: int = 0
    gradients: int = 0
    returned: int = 0
    is_previous_on_stage: bool = False

    def shared_bytes(self, pass_type: str) -> int:
        """Return the bytes that the dry run of a pass counts, but that a neighboring chunk on the
        same stage has allocated.

        Args:
            pass_type: pass, one of `F`, `B`, `I`, `W`.
        """
        if pass_type == FORWARD:
            return self.inputs
        return self.gradients if pass_type in (BACKWARD, BACKWARD_INPUT) else 0

    def border_change(self, pass_type: str, repeats_pass: bool) -> int:
        """Return the bytes that stay allocated after a pass, although its dry run frees them.

        Args:
            pass_type: pass, one of `F`, `B`, `I`, `W`.
            repeats_pass: whether the chunk has run this pass before, for an earlier micro-batch.
        """
        border_change = 0
        if pass_type in (BACKWARD, BACKWARD_INPUT):
            # Sent gradients replace those of the micro-batch before: only the first pass adds.
            border_change += self.returned if self.is_previous_on_stage or not repeats_pass else 0
        if pass_type in (BACKWARD, BACKWARD_WEIGHT):
            # The dry run frees its inputs; here the previous chunk owns and frees them.
            border_change += self.inputs
        return border_change


def border_bytes(chunk: Chunk, pipeline: PipelineSpec) -> BorderBytes:
    """Return the corrections of the dry run of `chunk`, which runs without its neighboring
    chunks."""

    def on_same_stage(index: int) -> bool:
        return 0 <= index < pipeline.num_chunks and pipeline.stage_of(index) == chunk.stage

    is_previous_on_stage = on_same_stage(chunk.number - 1)
    return BorderBytes(
        inputs=received_bytes(chunk) if is_previous_on_stage else 0,
        gradients=chunk.received_gradient_bytes if on_same_stage(chunk.number + 1) else 0,
        returned=chunk.border_bytes[1],
        is_previous_on_stage=is_previous_on_stage,
    )
