"""Run the chunks of this rank's stage with the schedules of `torch.distributed.pipelining`.

A schedule runs chunks on micro-batches in some order, and sends activations and gradients between
stages. Sender and receiver have the same rank within their stages, and a value is sent in the
layout in which its chunk returns it. Local shapes follow from the plan, so no metadata is
exchanged.

A schedule passes a chunk only the index of the micro-batch. The chunk reads the model's inputs from
the batch, which every stage has, so that inputs need not be sent from stage to stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FULL_BACKWARD,
    PipelineScheduleMulti,
    PipelineScheduleSingle,
)
from torch.profiler import record_function

from shardwright.core.graph.graph import Graph, Value
from shardwright.core.layout.layout import TensorLayout
from shardwright.core.lower.program import Program, lower
from shardwright.core.micro_batches.buffer_updates import BufferUpdates
from shardwright.core.parallel.train_step import StepInputs, StepResults, loss_weight
from shardwright.core.parallel.unsharded_parameters import UnshardedParameters
from shardwright.core.parallel.whole_batch_values import (
    GlobalBatchValues,
    prologue_axes,
)
from shardwright.core.partition.chunk import Chunk
from shardwright.core.partition.decisions import CutAxes
from shardwright.core.partition.partitioned import Partitioned
from shardwright.core.partition.pipeline_spec import PipelineSpec
from shardwright.core.runtime.devices import Devices
from shardwright.core.runtime.named_ranges import PASSES, SCHEDULE, wrap_pass
from shardwright.core.runtime.random import micro_batch_seed
from shardwright.core.runtime.sent_dtypes import broadcast
from shardwright.core.torch_internals.pipelining import (
    SENDS_ONLY_GRADIENTS,
    PipelineStageBase,
    pipeline_stage,
)
from shardwright.errors import PlanError

PipelineSchedule = PipelineScheduleSingle | PipelineScheduleMulti


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


@dataclass
class RankStages:
    """A training step with pipeline stages: this rank's chunks, run by PyTorch's schedule.

    Args:
        partitioned: the partitioned model, with the number of micro-batches of the step.
        devices: this rank's view of the devices.
    """

    partitioned: Partitioned
    devices: Devices
    modules: tuple[StageModule, ...] = field(init=False)
    _groups_of_shared_parameters: dict[str, dist.ProcessGroup] = field(init=False)
    _train_schedule: PipelineSchedule | None = None
    _forward_schedule: PipelineSchedule | None = None

    def __post_init__(self) -> None:
        self._create_process_groups_of_stages()
        graph = self.partitioned.graph
        current = graph.python.current if graph.python is not None else frozenset()
        self.modules = tuple(
            StageModule(
                chunk, lower(chunk, self.devices, unsharded=True, python_state=current), graph
            )
            for chunk in self.partitioned.chunks_of(self.devices.stage)
        )
        read = (v for module in self.modules for v in module.chunk.graph.buffers)
        self._whole_batch = GlobalBatchValues(self.partitioned, self.devices, read)
        self._loss_weight = loss_weight(self.partitioned)
        self._stages: list[PipelineStageBase] = [self._make_pipeline_stage(m) for m in self.modules]

    @property
    def pipeline(self) -> PipelineSpec:
        return self.partitioned.pipeline

    @property
    def micro_batches(self) -> int:
        return self.pipeline.micro_batches

    @property
    def _last_stage_index(self) -> int:
        return self.partitioned.chunks[-1].stage

    def compile(self, compiler: Callable[[Program], Program]) -> None:
        if self.pipeline.schedule_spec.splits_backward:
            raise PlanError(
                f"schedule {self.pipeline.schedule!r} computes input and weight gradients in "
                "separate passes, which compiled programs do not support\nplan with a schedule of "
                "undivided backward passes, such as '1f1b'"
            )
        for module in self.modules:
            module.program = compiler(module.program)

    def train(self, inputs: StepInputs) -> StepResults:
        step = self._make_step_context(inputs)
        if self._train_schedule is None:
            self._train_schedule = self._make_pipeline_schedule(self._multiply_by_loss_weight)
        losses: list[Tensor] = []
        # The schedule chunks its arguments on dimension 0: each micro-batch gets its index.
        indices = torch.arange(self.micro_batches)
        trace_range = record_function(SCHEDULE) if self.devices.named_ranges else nullcontext()
        # All of the schedule counts as waiting; `_make_pipeline_stage` subtracts passes of chunks.
        with trace_range, self.devices.waits.measure():
            self._train_schedule.step(
                number=indices, target=indices, losses=losses, return_outputs=False
            )
        gradients: dict[str, Tensor] = {}
        for module in self.modules:
            for name, gradient in module.unsharded.end_step().items():
                # Chunks of one stage may share a parameter.
                gradients[name] = gradients[name] + gradient if name in gradients else gradient
        # After `end_step`, which sums over the replicas of this stage: then one all-reduce of
        # shards over the stages suffices.
        self._reduce_shared_gradients(inputs.shards, gradients)
        # The schedule collects losses on the last stage only.
        loss = torch.stack(losses).sum().detach() if losses else self._make_empty_loss()
        self._broadcast_from_stage(self._last_stage_index, loss)
        return StepResults(
            loss, gradients, self._collect_buffer_updates(step, inputs), step.outputs
        )

    def evaluate(self, inputs: StepInputs) -> tuple[dict[str, list[Tensor]], dict[str, Tensor]]:
        """Run forward over all micro-batches.

        Returns:
            `StepResults.outputs`, and the new values of buffers by name.
        """
        with torch.no_grad():
            step = self._make_step_context(inputs)
            if self._forward_schedule is None:
                self._forward_schedule = self._make_pipeline_schedule(None)
            self._forward_schedule.step(
                number=torch.arange(self.micro_batches), return_outputs=False
            )
            # Frees the gathered parameters; without a backward pass there are no gradients.
            for module in self.modules:
                module.unsharded.end_step()
            updated = self._collect_buffer_updates(step, inputs)
        return step.outputs, updated

    def _multiply_by_loss_weight(self, loss: Tensor, index: Tensor | int) -> Tensor:
        # Called by the schedule as `loss_fn(output, target)`: the target is the index of the
        # micro-batch.
        return loss * self._loss_weight

    def _collect_buffer_updates(self, step: StepContext, inputs: StepInputs) -> dict[str, Tensor]:
        """Return the new values of the buffers of this stage, including buffers that another stage
        updates. Collective."""
        updated = step.buffers.end_step()
        for name, (source, stages) in sorted(self.partitioned.shared_updates.items()):
            if self.devices.stage not in stages:
                continue
            before = inputs.buffers[name]
            value = (
                updated.get(name, before)
                .to(before.dtype)
                .clone(memory_format=torch.contiguous_format)
            )
            with self.devices.waits.measure():
                group = self.devices.peers_of_stages(stages)
                broadcast(value, group, stages.index(source))
            updated[name] = value
        return updated

    def _make_step_context(self, inputs: StepInputs) -> StepContext:
        step = StepContext.of(inputs, self.partitioned, self._whole_batch)
        for module in self.modules:
            module.begin_step(step, inputs)
        return step

    # Groups and schedules

    def _create_process_groups_of_stages(self) -> None:
        """Create the process groups of all stages. Collective.

        `new_group` is a collective of all ranks, members or not. So every rank creates the groups
        of all chunks here, in one order: if each group were created on first use, stages would call
        `new_group` at different times, and deadlock.
        """
        group_axes = groups_of(self.partitioned)
        for axes in dict.fromkeys((*group_axes, *prologue_axes(self.partitioned))):
            self.devices.group(axes)
        owners = {stages for _, stages in self.partitioned.shared_updates.values()}
        for stages in sorted(owners):
            self.devices.peers_of_stages(stages)
        self._groups_of_shared_parameters = {}
        parameters = self.partitioned.graph.parameters
        self._trained_names = {value.name for value in parameters if value.requires_grad}
        # Sorted, so that all ranks create the groups in one order.
        for name, stages in sorted(self.partitioned.stages_of_parameters.items()):
            if len(stages) > 1:
                group = self.devices.peers_of_stages(stages)
                # Ranks of other stages have created the group too, but take no part in its
                # all-reduces.
                if self.devices.stage in stages and group is not None:
                    self._groups_of_shared_parameters[name] = group

    def _make_pipeline_stage(self, module: StageModule) -> PipelineStageBase:
        chunk, decisions = module.chunk, module.chunk.decisions
        arriving = tuple(
            _make_boundary_meta_tensor(v, decisions.arrivals[v.name], chunk) for v in chunk.arriving
        )
        leaving = tuple(
            _make_boundary_meta_tensor(v, decisions.departures[v.name], chunk)
            for v in chunk.leaving
        )
        # The last stage sends nothing, but PyTorch wants to know the shape of its output.
        if not leaving and chunk.graph.loss is not None:
            leaving = (torch.empty((), dtype=chunk.graph.loss.dtype, device="meta"),)
        stage = pipeline_stage(
            module,
            chunk.number,
            len(self.partitioned.chunks),
            self.devices.device,
            arriving,
            leaving,
            self.devices.peers_of_all_stages,
            # Zero-bubble schedules call W of every chunk; those that cannot split do all work in I.
            dw_builder=None if can_split_backward(module) else _make_empty_weight_gradient_pass,
        )
        # Wrapped on the instance, as schedules call these methods of the stage by name.
        for method_name, pass_name in PASSES.items():
            method = self.devices.waits.exclude(getattr(stage, method_name))
            if self.devices.named_ranges:
                method = wrap_pass(f"{pass_name} of chunk {chunk.number}", method)
            setattr(stage, method_name, method)
        return stage

    def _make_pipeline_schedule(self, loss_fn: Any) -> PipelineSchedule:
        micro_batches = self.micro_batches
        schedule_class = self.pipeline.schedule_spec.torch_class(
            micro_batches, self.pipeline.stages
        )
        if issubclass(schedule_class, PipelineScheduleSingle):
            # Not `scale_grads`, which divides by the number of micro-batches: the weights of losses
            # have scaled the gradients.
            return schedule_class(self._stages[0], micro_batches, loss_fn, scale_grads=False)
        schedule = schedule_class(self._stages, micro_batches, loss_fn, scale_grads=False)
        if loss_fn is None:
            _skip_backward_passes(schedule)
        return schedule

    # Communication between stages

    def _reduce_shared_gradients(
        self, shards: Mapping[str, Tensor], gradients: dict[str, Tensor]
    ) -> None:
        """All-reduce the gradients of parameters that several pipeline stages own."""
        for name, group in self._groups_of_shared_parameters.items():
            # Frozen parameters have no gradient on any stage.
            if name in self._trained_names:
                gradient = gradients.get(name)
                # A stage without a gradient takes part too, with zeros.
                total = (
                    torch.zeros_like(shards[name]) if gradient is None else gradient.contiguous()
                )
                # The wait for slower stages counts as communication that the device waits for.
                with self.devices.waits.measure():
                    dist.all_reduce(total, group=group)
                gradients[name] = total

    def _make_empty_loss(self) -> Tensor:
        loss = self.partitioned.graph.loss
        assert loss is not None
        return torch.empty((), dtype=loss.dtype, device=self.devices.device)

    def _broadcast_from_stage(self, stage: int, tensor: Tensor) -> None:
        with self.devices.waits.measure():
            broadcast(tensor, self.devices.peers_of_all_stages, stage)


def groups_of(partitioned: Partitioned) -> tuple[tuple[int, ...], ...]:
    """Return the sets of axes over which any chunk communicates, in a fixed order."""
    # Lowering requests the groups of a program; a `Devices` without process group records them.
    devices = Devices.of_rank(partitioned.mesh, 0)
    for chunk in partitioned.chunks:
        lower(chunk, devices, unsharded=True)
    return devices.groups


def _make_boundary_meta_tensor(value: Value, axes: CutAxes, chunk: Chunk) -> Tensor:
    """Return a meta tensor with the shape of a local shard that stages send.

    Args:
        value: the sent value.
        axes: mesh axes that shard each dimension of `value`.
        chunk: the chunk that sends or receives `value`.
    """
    shape = TensorLayout(chunk.mesh, axes).shard_shape(value.shape)
    empty = torch.empty(shape, dtype=value.dtype, device="meta")
    return empty.requires_grad_(value.requires_grad)


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


def _make_empty_weight_gradient_pass() -> Any:
    """Return an empty weight-gradient pass (W), for chunks whose input-gradient pass (I) computes
    all gradients.

    Passed to PyTorch's stages as `dw_builder`.
    """
    return _skip_pass


def _skip_pass(*_: Any) -> None:
    return None


def _skip_backward_passes(schedule: PipelineScheduleMulti) -> None:
    """Make a schedule with several chunks per stage skip its backward passes.

    `PipelineScheduleMulti` runs its full table of actions even without a loss function;
    `PipelineScheduleSingle` stops after the forward passes.
    """
    for computation in (FULL_BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT):
        schedule.register_custom_function(computation, _skip_pass)  # type: ignore[attr-defined]


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
