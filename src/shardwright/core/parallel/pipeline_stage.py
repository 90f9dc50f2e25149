"""Run the chunks of this rank's stage with the schedules of `torch.distributed.pipelining`.

A schedule runs chunks on micro-batches in some order, and sends activations and gradients between
stages. Sender and receiver have the same rank within their stages, and a value is sent in the
layout in which its chunk returns it. Local shapes follow from the plan, so no metadata is
exchanged.

A schedule passes a chunk only the index of the micro-batch. The chunk reads the model's inputs from
the batch, which every stage has, so that inputs need not be sent from stage to stage.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining.schedules import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FULL_BACKWARD,
    PipelineScheduleMulti,
    PipelineScheduleSingle,
)
from torch.profiler import record_function

from shardwright.core.graph.graph import Value
from shardwright.core.layout.layout import TensorLayout
from shardwright.core.lower.emit_program import lower
from shardwright.core.lower.program import Program
from shardwright.core.parallel.stage_module import StageModule, StepContext, can_split_backward
from shardwright.core.parallel.train_step import StepInputs, StepResults, loss_weight
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
from shardwright.core.runtime.sent_dtypes import broadcast
from shardwright.core.torch_internals.pipelining import (
    PipelineStageBase,
    pipeline_stage,
)
from shardwright.errors import PlanError

PipelineSchedule = PipelineScheduleSingle | PipelineScheduleMulti


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
