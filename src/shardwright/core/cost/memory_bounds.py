"""A lower bound on the memory of each stage, without a dry run."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch

from shardwright.core.cost.border_bytes import (
    local_bytes,
    received_bytes,
)
from shardwright.core.cost.memory import trained_shards
from shardwright.core.cost.optimizer_state import (
    optimizer_bytes,
    table_shapes_of,
)
from shardwright.core.graph.graph import Value
from shardwright.core.graph.local_map import is_opaque
from shardwright.core.graph.saved_tensors import needed_in_backward
from shardwright.core.layout.layout import TensorLayout, interned_layout
from shardwright.core.partition.chunk import Chunk
from shardwright.core.partition.communication import default_storage, initial_layout
from shardwright.core.partition.decisions import ZERO_LEVELS, Decisions
from shardwright.core.partition.partitioned import Partitioned


def memory_lower_bounds(
    partitioned: Partitioned, optimizer: str | torch.optim.Optimizer
) -> list[int]:
    """Return for each stage a lower bound on its peak memory in bytes, valid for any choice of
    recomputed operators.

    The bound needs no dry run. It is the sum of

    - stored parameters, their gradients and optimizer state,
    - parameters and gradients that the ZeRO level leaves unsharded between micro-batches; with a
      single micro-batch, in place of gradients if that is more, the gathered parameters that are
      alive between its passes,
    - the inputs of all micro-batches, and
    - the tensors that one micro-batch receives from the previous chunk.

    Raises:
        PlanError: if the optimizer is unknown.
    """
    stages, leaves = [], {each for each in partitioned.graph.inputs if isinstance(each, Value)}
    table_shapes = table_shapes_of(partitioned.graph)
    for number in range(partitioned.pipeline.stages):
        chunks = partitioned.chunks_of(number)
        shards = trained_shards(chunks, table_shapes)
        # Trained parameters only: without the frozen ones the sum is still a lower bound.
        stored = sum(prod(shard.shape) * shard.dtype.itemsize for shard in shards)
        # The gradients, which the optimizer reads in the layout of storage.
        live = stored
        if partitioned.pipeline.micro_batches > 1:
            live += sum(map(_live_bytes_between_micro_batches, chunks))
        else:
            # There are no gradients yet between the passes of the only micro-batch.
            live = max(live, *map(_gathered_bytes_between_passes, chunks))
        needed = stored + optimizer_bytes(optimizer, shards).state + live
        inputs = sum(_input_bytes(chunk, leaves) for chunk in chunks)
        # The largest: the received tensors of two chunks need not be alive at the same time.
        received = max(received_bytes(chunk) for chunk in chunks)
        stages.append(needed + inputs * partitioned.pipeline.micro_batches + received)
    return stages


def _input_bytes(chunk: Chunk, model_inputs: set[Value]) -> int:
    """Return the bytes per device and micro-batch of the model inputs that a chunk reads.

    Args:
        model_inputs: tensors in the arguments of the model.
    """
    return sum(
        local_bytes(value, chunk, value.stored_dtype)
        for value in chunk.graph.input_values
        if value in model_inputs
    )


def _gathered_bytes_between_passes(chunk: Chunk) -> int:
    """Return the bytes of gathered parameters that stay alive from the forward to the backward pass
    of a micro-batch, whatever is recomputed."""
    # level3 gathers them again, and a recomputed segment keeps its inputs at other levels.
    if not _keeps_gathered(chunk.decisions):
        return 0
    graph, gathered_bytes = chunk.graph, 0
    read_in_backward = {
        graph.by_name[name].inputs[index]
        for name, index in needed_in_backward(graph)
        # Assumed to read all inputs.
        if not is_opaque(graph.by_name[name].target)
    }
    for value, stored, as_used in _trained_layouts(chunk):
        if value in read_in_backward and stored.axes != as_used.axes:
            gathered_bytes += prod(as_used.shard_shape(value.shape)) * value.itemsize
    return gathered_bytes


def _live_bytes_between_micro_batches(chunk: Chunk) -> int:
    """Return the bytes of parameters and gradients that stay alive between the micro-batches of a
    step, beyond the stored shards.

    They are gathered or cast copies of parameters, and with ZeRO-1 full gradients.
    """
    decisions = chunk.decisions
    level = None if decisions.sharding is None else decisions.sharding.level
    keeps_gathered = _keeps_gathered(decisions)
    trained = [each for each in chunk.graph.parameters if each.requires_grad]
    # Neither a second copy nor a full gradient, whatever the layouts are.
    if not keeps_gathered and all(each.dtype == each.stored_dtype for each in trained):
        return 0
    unsharded_bytes = 0
    for value, stored, as_used in _trained_layouts(chunk):
        full_numel, shard_numel = (
            prod(each.shard_shape(value.shape)) for each in (as_used, stored)
        )
        # A parameter that is stored as it is used has a second copy only if it is cast. For other
        # parameters level1 (ZeRO-1) keeps the gathered parameter and its full gradient over
        # micro-batches, level2 (ZeRO-2) the gathered parameter, and level3 (ZeRO-3) neither.
        if stored.axes == as_used.axes:
            unsharded_bytes += (
                full_numel * value.itemsize if value.dtype != value.stored_dtype else 0
            )
        elif keeps_gathered:
            unsharded_bytes += full_numel * value.itemsize
            if level == ZERO_LEVELS[0]:
                unsharded_bytes += (full_numel - shard_numel) * value.stored_dtype.itemsize
    return unsharded_bytes


def _keeps_gathered(decisions: Decisions) -> bool:
    """Whether the ZeRO level keeps gathered parameters until the backward pass has read them."""
    return decisions.sharding is not None and decisions.sharding.level != ZERO_LEVELS[2]


def _trained_layouts(chunk: Chunk) -> Iterator[tuple[Value, TensorLayout, TensorLayout]]:
    """Yield each trained parameter with its layouts (as stored, as used)."""
    used_axes = default_storage(chunk.graph, chunk.mesh, chunk.decisions.cuts)
    for value in chunk.graph.parameters:
        if value.requires_grad:
            stored = initial_layout(value, chunk.mesh, chunk.decisions)
            yield value, stored, interned_layout(chunk.mesh, used_axes[value.name])
