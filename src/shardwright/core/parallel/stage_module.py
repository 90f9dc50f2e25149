"""A pipeline chunk as a module: its forward pass is the program of the chunk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.core.graph.graph import Graph, Value
from shardwright.core.lower.program import Program
from shardwright.core.micro_batches.buffer_updates import BufferUpdates
from shardwright.core.parallel.train_step import StepInputs
from shardwright.core.parallel.unsharded_parameters import UnshardedParameters
from shardwright.core.parallel.whole_batch_values import (
    GlobalBatchValues,
)
from shardwright.core.partition.chunk import Chunk
from shardwright.core.partition.partitioned import Partitioned
from shardwright.core.runtime.random import micro_batch_seed
from shardwright.core.torch_internals.pipelining import (
    SENDS_ONLY_GRADIENTS,
)


@dataclass
class StepContext:
    """State that the chunks of one stage share during a step.

    Args:
        micro_batch_leaves: for each micro-batch, the leaves of the call's arguments.
        buffers: buffers by name, which chunks read and update.
        seed: random seed of the step.
        global_batch_values: for each micro-batch, the values of the global batch that chunks read
            as buffers (e.g. the number of valid targets), by buffer name.
        outputs: for each output that the step returns, by name, its local tensors of the
            micro-batches that have run on this stage, detached.
    """

    micro_batch_leaves: Sequence[Sequence[Any]]
    buffers: BufferUpdates
    seed: int
    global_batch_values: Sequence[Mapping[str, Tensor]]
    outputs: dict[str, list[Tensor]]

    @classmethod
    def of(
        cls, inputs: StepInputs, partitioned: Partitioned, whole_batch: GlobalBatchValues
    ) -> StepContext:
        global_batch_values = whole_batch(inputs.leaves, inputs.buffers)
        micro_batch_leaves = inputs.micro_batches(partitioned.pipeline.micro_batches)
        buffers = BufferUpdates(partitioned.graph, inputs.buffers)
        outputs: dict[str, list[Tensor]] = {name: [] for name in inputs.outputs}
        return cls(micro_batch_leaves, buffers, inputs.seed, global_batch_values, outputs)


class StageModule(nn.Module):
    """One chunk of a model as a module that PyTorch's schedules call.

    Args:
        chunk: operators of one stage that a schedule runs without interruption.
        program: the program of `chunk` on this rank.
        model_graph: the graph of the full model, whose inputs the chunk reads.
    """

    step: StepContext

    def __init__(self, chunk: Chunk, program: Program, model_graph: Graph) -> None:
        super().__init__()
        self.chunk = chunk
        self.program = program
        self.unsharded = UnshardedParameters(program)
        self._input_indices = [
            index
            for index, leaf in enumerate(model_graph.inputs)
            # A model in one chunk reads all leaves of the call, also those that are no tensors.
            if chunk.graph is model_graph or leaf in chunk.graph.input_values
        ]

    def begin_step(self, step: StepContext, inputs: StepInputs) -> None:
        self.step = step
        self.unsharded.begin_step(
            {v.name: inputs.shards[v.name] for v in self.chunk.graph.parameters}
        )

    def forward(self, *received: Tensor, number: Tensor | int) -> Tensor | tuple[Tensor, ...]:
        micro_batch = int(number)
        inputs = stage_boundary(received)
        outputs, updates = self.program(
            self.unsharded.tensors(),
            {**self.step.buffers.values, **self.step.global_batch_values[micro_batch]},
            self.read(micro_batch, inputs),
            micro_batch_seed(self.step.seed, micro_batch),
        )
        # Not in place: several micro-batches are in flight, and autograd may have saved the old
        # values for their backward passes.
        changed = (buffer.name for buffer, _ in self.chunk.graph.updates)
        self.step.buffers.add(zip(changed, updates, strict=True))
        outputs_by_value = dict(zip(self.chunk.graph.outputs, outputs, strict=True))
        for value in self.chunk.returned:
            if value.name in self.step.outputs:
                # Detached, so that outputs keep no autograd graph alive.
                self.step.outputs[value.name].append(outputs_by_value[value].detach())
        if self.chunk.graph.loss is not None:
            # The schedule's loss function only scales it.
            loss: Tensor = outputs_by_value[self.chunk.graph.loss]
            return loss
        sent = [
            _detach_unless_trained(value, outputs_by_value[value]) for value in self.chunk.leaving
        ]
        # Only a split backward pass, which walks from results to inputs of the stage, needs a path
        # between the two, for which one input suffices (`stage_boundary`).
        anchors = [
            tensor for tensor in inputs if tensor.requires_grad and self.chunk.splits_backward
        ]
        return stage_boundary(sent, anchors[:1])

    def read(self, micro_batch: int, received: Sequence[Tensor]) -> list[Any]:
        """Return the program's inputs: the model inputs that it reads, then the received
        tensors."""
        leaves = self.step.micro_batch_leaves[micro_batch]
        return [*(leaves[index] for index in self._input_indices), *received]

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield the tensors in which a step accumulates gradients, instead of `nn.Parameter`s.

        A split backward pass differentiates with respect to the tensors that `parameters()` yields.
        """
        return iter(self.unsharded.leaves())  # type: ignore[arg-type]


def _detach_unless_trained(value: Value, tensor: Tensor) -> Tensor:
    """Detach `tensor`, the result for `value`, unless gradients flow back through it."""
    # Both sides of the boundary must agree on which values get a gradient back.
    return tensor if value.requires_grad else tensor.detach()


def can_split_backward(module: StageModule) -> bool:
    """Whether the backward pass can be split into input gradients (I) and weight gradients (W).

    Zero-bubble schedules (Qi et al., 2023) run W later. PyTorch splits where the paths to inputs
    and to parameters diverge in the autograd graph, which is correct only if

    - some input requires a gradient;
    - no bucket joins parameters of different operators in one autograd node;
    - no parameter is read twice: operators between the reads would run twice;
    - no operator is recomputed: I and W would each recompute it.

    PyTorch 2.11 never splits correctly: it needs a gradient of every sent tensor, and counts some
    gradients of parameters twice.
    """
    if not SENDS_ONLY_GRADIENTS:
        return False
    chunk = module.chunk
    consumers = chunk.graph.consumers
    is_separable = all(bound.bucket.reduces_once for bound in module.program.buckets) and all(
        len(consumers[value]) == 1 for value in chunk.graph.parameters if value.requires_grad
    )
    is_separable = is_separable and not module.program.communication.segments
    return is_separable and (chunk.number == 0 or any(v.requires_grad for v in chunk.arriving))


class _StageBoundaryFunction(torch.autograd.Function):
    """Detach tensors, and make their gradients contiguous: `isend` rejects strided tensors."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        # Without this, outputs that get no gradient would allocate zeros.
        ctx.set_materialize_grads(False)
        ctx.num_anchors = len(tensors) - count
        return tuple(tensor.detach() for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        contiguous = (None if g is None else g.contiguous() for g in gradients)
        return None, *contiguous, *(None,) * ctx.num_anchors


def stage_boundary(tensors: Sequence[Tensor], anchors: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
    """Return `tensors`, sent to or received from another stage, contiguous and not as views.

    PyTorch's stages free the autograd graph of a sent tensor by detaching it in place, which is not
    possible for a view: its activations would stay in memory.

    Args:
        tensors: the tensors that cross the boundary.
        anchors: inputs of the stage that become autograd inputs of every result, with no gradient.
            A split backward pass finds only parameters on paths from results to inputs, so a result
            that depends on no input would lose the gradients of its parameters.
    """
    # Integer and frozen tensors need no autograd node.
    trained = [tensor for tensor in tensors if tensor.requires_grad]
    boundary_outputs = iter(())
    if trained:
        boundary_outputs = iter(_StageBoundaryFunction.apply(len(trained), *trained, *anchors))  # type: ignore[no-untyped-call]
    return tuple(
        (next(boundary_outputs) if t.requires_grad else t.detach()).contiguous() for t in tensors
    )
