"""Peak memory of a published run, with the tensors that the run's framework allocates.

A dry run measures the memory of the plan in Shardwright. The framework that trained the run may
need more or less (`Software`): gradients in another dtype, other copies of logits in the loss, and
fewer saved activations with fused kernels or a regather in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod

import torch

from shardwright.core.cost.flops import is_view
from shardwright.core.cost.memory import Memory, StageMemory
from shardwright.core.cost.meta_chunk import ACTIVATIONS
from shardwright.core.cost.pipeline_actions import (
    BACKWARD,
    BACKWARD_INPUT,
    FORWARD,
    Action,
    actions,
)
from shardwright.core.graph.custom_ops import cross_entropy, experts
from shardwright.core.graph.graph import Graph, Op, Origin, Value
from shardwright.core.graph.saved_tensors import saved_tensors
from shardwright.core.layout.layout import DeviceMatrix
from shardwright.core.partition.chunk import Chunk
from shardwright.core.partition.partitioned import Partitioned
from shardwright.core.rules import rule_of
from shardwright.core.rules.notation import call_arguments
from shardwright.core.rules.rule import Cuts
from shardwright.tools.compare.published_software import Software

aten = torch.ops.aten

_ACTIVATIONS = {aten.silu.default, aten.gelu.default}
"""Operators that are activation functions of gated MLPs."""


def framework_peak_bytes(
    memory: Memory, partitioned: Partitioned, software: Software, recomputes: bool
) -> int:
    """Return the peak memory of a published run: bytes per device of the stage with most memory.

    Args:
        memory: memory of the same plan in Shardwright, as measured by dry runs.
        partitioned: the partitioned model of the plan.
        software: memory settings of the framework that trained the run.
        recomputes: whether blocks are recomputed, so that they save only their inputs.
    """
    orders = actions(partitioned.pipeline)
    peaks = []
    for stage in memory.stages:
        chunks = partitioned.chunks_of(stage.stage)
        stage_peak = stage.peak - _compute_excess_loss_bytes(stage, chunks, software)
        # The dry run has gradients and stored state in float32, of 4 bytes.
        stage_peak -= int(stage.gradients * (1 - software.gradient_bytes / 4))
        stage_peak -= int(stage.parameters * (1 - software.master_bytes / 4))
        stage_peak -= int(stage.optimizer * (1 - software.moment_bytes / 4))
        # A pass in flight is of one chunk.
        passes = max_passes_in_flight(orders[stage.stage])
        if not recomputes:
            unsaved = sum(unsaved_bytes(chunk, software) for chunk in chunks) / len(chunks)
            stage_peak -= int(unsaved * passes)
        if software.frees_outputs:
            sent = sum(chunk.border_bytes[0] for chunk in chunks if chunk.leaving) / len(chunks)
            # The outputs of the current pass have yet to be sent.
            stage_peak -= int(sent * (passes - 1))
        peaks.append(stage_peak)
    return max(peaks)


def unsaved_bytes(chunk: Chunk, software: Software) -> float:
    """Return the bytes of activations per micro-batch that Shardwright saves for the backward pass
    in a dry run of `chunk`, and the published framework does not save."""
    unsaved = 0.0
    if software.fuses_activations:
        unsaved += sum(_iterate_unsaved_activation_bytes(chunk))
    if software.gathers_again:
        unsaved += sum(_iterate_regathered_input_bytes(chunk))
    return unsaved


def _iterate_unsaved_activation_bytes(chunk: Chunk) -> Iterator[float]:
    """Yield the bytes of each activation function's output that a fused kernel does not save.

    As in SwiGLU, a kernel that fuses the activation function with the following product saves only
    the inputs of both.
    """
    graph = chunk.graph
    readers: dict[Value, list[Op]] = {}
    for op in graph.ops:
        # An operator that reads a value twice is one reader.
        for value in set(op.inputs):
            readers.setdefault(value, []).append(op)
    for op in graph.ops:
        if op.target is experts:
            yield _count_unsaved_expert_bytes(op, chunk)
        elif op.target in _ACTIVATIONS and all(
            reader.target is aten.mul.Tensor for reader in readers.get(op.output, [])
        ):
            yield local_output_bytes(op, chunk.mesh, chunk.decisions.cuts)


def _count_unsaved_expert_bytes(op: Op, chunk: Chunk) -> float:
    """Return the bytes per device of expert activations that fused kernels do not save.

    These are the output of the gate's activation function and its product with the up projection.
    """
    arguments = call_arguments(op)
    inner: int = arguments["down"].shape[-1]
    rule = rule_of(op)
    assert rule is not None
    counts = rule.shard_counts(chunk.mesh, chunk.decisions.cuts.get(op.name, {}))
    # One copy of a token for each of its experts.
    num_copies: int = arguments["ids"].numel
    return 2.0 * num_copies * inner * op.output.itemsize / prod(counts.values())


def _iterate_regathered_input_bytes(chunk: Chunk) -> Iterator[float]:
    """Yield the bytes per device that Megatron-LM saves by regathering an input of linear layers.

    With sequence parallelism Megatron-LM keeps only the shard of an all-gathered input. It gathers
    the input again in the backward pass, overlapped with the input gradient (Korthikanti et al.,
    "Reducing activation recomputation in large transformer models", 2022).
    """
    gathered = {}
    for op in chunk.graph.ops:
        if op.target is aten.linear.default:
            # The layer reads the result of the last step of the route.
            for transfer in chunk.communication.routes[op.name, 0][-1:]:
                # By identity, since layers that share an all-gather save its result once.
                gathered[id(transfer)] = transfer
    for transfer in gathered.values():
        step, value = transfer.step, transfer.value
        # Gathered parameters are not activations.
        if step.operation == "all_gather" and value.origin is not Origin.PARAMETER:
            source, target = (
                prod(layout.shard_shape(value.shape)) for layout in (step.source, step.target)
            )
            yield float(value.itemsize * (target - source))


def local_output_bytes(op: Op, mesh: DeviceMatrix, cuts: Mapping[str, Cuts]) -> float:
    """Return the bytes of the output of `op` on one device.

    Args:
        cuts: the axes of each factor of each operator, by operator name.
    """
    rule = rule_of(op)
    assert rule is not None
    shard_counts = rule.shard_counts(mesh, cuts.get(op.name, {}))
    # Neither a dimension without a factor nor one that no input has, as of a mask that is created,
    # is sharded.
    output_counts = (shard_counts.get(factor or "", 1) for factor in rule.outputs[0])
    return op.output.numel * op.output.itemsize / prod(output_counts)


def saved_producers(
    graph: Graph, not_recomputed: Sequence[Op], recomputed: Iterable[Op]
) -> list[Op]:
    """Return the operators of `not_recomputed` whose results the backward pass needs.

    Autograd saves these results, or `recomputed` operators read them when they run again.
    """
    saved: list[Value] = [value for op in recomputed for value in op.inputs]
    for op in not_recomputed:
        indices = saved_tensors(op)
        saved += [op.inputs[index] for index in indices.inputs]
        saved += [op.outputs[index] for index in indices.outputs]
    producers = {}
    for value in saved:
        producer = graph.producer.get(value)
        # A view has the memory of what it views.
        while producer is not None and is_view(producer):
            producer = graph.producer.get(producer.inputs[0])
        if producer is not None:
            producers[producer.name] = producer
    return [op for op in not_recomputed if op.name in producers]


def _compute_excess_loss_bytes(
    stage: StageMemory, chunks: Iterable[Chunk], software: Software
) -> int:
    """Return the bytes that Shardwright's loss needs beyond the published framework's loss.

    Counts only if memory of `stage` peaks in the backward pass of the loss; otherwise returns 0.
    """
    if software.logit_bytes is None:
        return 0
    for chunk in chunks:
        for op in (op for op in chunk.graph.ops if op.target is cross_entropy):
            entries = (
                size
                for name, category, size in stage.largest
                if (name, category) == (op.name, ACTIVATIONS)
            )
            # Empty if memory peaks elsewhere: the loss is then not among the largest tensors.
            if saved := sum(entries):
                # The shard of one device, as the loss keeps logits sharded along the vocabulary.
                layout = chunk.communication.input_layouts[op.name][0]
                logits = prod(layout.shard_shape(op.inputs[0].shape))
                return saved + stage.temporary - int(software.logit_bytes * logits)
    return 0


def max_passes_in_flight(order: Iterable[Action]) -> int:
    """Return the maximum number of micro-batches in flight on a stage, over all of its chunks: a
    micro-batch counts once per chunk.

    Args:
        order: the forward and backward passes of the stage, in order.
    """
    alive = largest = 0
    for action in order:
        alive += 1 if action.pass_type == FORWARD else 0
        # Counted before a backward pass frees its activations.
        largest = max(largest, alive)
        alive -= 1 if action.pass_type in (BACKWARD, BACKWARD_INPUT) else 0
    return largest
