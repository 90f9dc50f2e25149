"""Runs the chunks of a model that this rank's stage owns, on `torch.distributed.pipelining`.

PyTorch's schedules decide when a chunk runs which micro-batch, and send activations and gradients
between stages. Sender and receiver have the same rank within their stages, and a value is sent in
the layout of its chunk, so both know its local shape before anything is sent.

A chunk slices the model's inputs from the whole batch itself: the schedule passes it only the index
of the micro-batch. Received and sent tensors pass a `border`, where they are detached from views
and their gradients become contiguous.
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
from shardwright.core.parallel.train_step import StepInputs, StepResults, loss_weight
from shardwright.core.parallel.unsharded_parameters import UnshardedParameters
from shardwright.core.parallel.whole_batch_values import (
    WholeBatchValues,
    prologue_axes,
    whole_batch_of,
)
from shardwright.core.partition.chunk import Chunk
from shardwright.core.partition.decisions import CutAxes
from shardwright.core.partition.partitioned import Partitioned
from shardwright.core.partition.pipeline_spec import PipelineSpec
from shardwright.core.runtime.devices import Devices
from shardwright.core.runtime.named_ranges import PASSES, SCHEDULE, in_range
from shardwright.core.runtime.random import micro_batch_seed
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
        pieces: leaves of the call's arguments, for each micro-batch.
        buffers: buffers by name; chunks put updated values here.
        seed: random seed of the step.
        of_batch: for each micro-batch what it reads of the whole batch, by the names of buffers.
        returned: results of all micro-batches for each returned value; None in training.
    """

    pieces: Sequence[Sequence[Any]]
    buffers: dict[str, Tensor]
    seed: int
    of_batch: Sequence[Mapping[str, Tensor]]
    returned: dict[str, list[Tensor]] | None = None

    @classmethod
    def of(
        cls, inputs: StepInputs, micro_batches: int, whole_batch: WholeBatchValues
    ) -> StepContext:
        of_batch = whole_batch(inputs.leaves, inputs.buffers)
        pieces = inputs.micro_batches(micro_batches)
        return cls(pieces, dict(inputs.buffers), inputs.seed, of_batch)


class StageModule(nn.Module):
    """One chunk of a model, as PyTorch's schedules call it.

    Args:
        whole: the graph of the model, whose inputs the chunk reads.
    """

    step: StepContext

    def __init__(self, chunk: Chunk, program: Program, whole: Graph) -> None:
        super().__init__()
        self.chunk = chunk
        self.program = program
        self.unsharded = UnshardedParameters(program)
        self._inputs = [
            index
            for index, leaf in enumerate(whole.inputs)
            if chunk.graph is whole or leaf in chunk.graph.input_values
        ]

    def begin_step(self, step: StepContext, inputs: StepInputs) -> None:
        self.step = step
        self.unsharded.begin_step(
            {v.name: inputs.shards[v.name] for v in self.chunk.graph.parameters}
        )

    def forward(self, *arrived: Tensor, number: Tensor | int) -> Tensor | tuple[Tensor, ...]:
        micro_batch = int(number)
        received = border(arrived)
        outputs, updates = self.program(
            self.unsharded.tensors(),
            {**self.step.buffers, **self.step.of_batch[micro_batch]},
            self.read(micro_batch, received),
            micro_batch_seed(self.step.seed, micro_batch),
        )
        # Not in place: autograd may have saved the old values for other micro-batches.
        changed = (buffer.name for buffer, _ in self.chunk.graph.updates)
        self.step.buffers.update(zip(changed, updates, strict=True))
        tensors = dict(zip(self.chunk.graph.outputs, outputs, strict=True))
        if self.step.returned is not None:
            for value in self.chunk.returned:
                self.step.returned.setdefault(value.name, []).append(tensors[value].detach())
        if self.chunk.graph.loss is not None:
            loss: Tensor = tensors[self.chunk.graph.loss]
            return loss
        leaving = [_with_gradient(value, tensors[value]) for value in self.chunk.leaving]
        follows = [
            tensor for tensor in received if tensor.requires_grad and self.chunk.splits_backward
        ]
        return border(leaving, follows[:1])

    def read(self, micro_batch: int, arrived: Sequence[Tensor]) -> list[Any]:
        """The inputs of the program: the model's inputs that it reads, then received tensors."""
        piece = self.step.pieces[micro_batch]
        return [*(piece[index] for index in self._inputs), *arrived]

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The leaf tensors in which gradients accumulate."""
        return iter(self.unsharded.leaves())  # type: ignore[arg-type]


def _with_gradient(value: Value, tensor: Tensor) -> Tensor:
    """Detach the tensor unless a gradient of the loss flows into the value."""
    return tensor if value.requires_grad else tensor.detach()


@dataclass
class RankStages:
    """A training step in several stages: this rank's chunks, run by PyTorch's schedule.

    Args:
        partitioned: the model, with the number of micro-batches of the step.
    """

    partitioned: Partitioned
    devices: Devices
    modules: tuple[StageModule, ...] = field(init=False)
    _shared: dict[str, dist.ProcessGroup] = field(init=False)
    _training: PipelineSchedule | None = None
    _forward: PipelineSchedule | None = None

    def __post_init__(self) -> None:
        self._create_groups()
        graph = self.partitioned.graph
        self.modules = tuple(
            StageModule(chunk, lower(chunk, self.devices, unsharded=True), graph)
            for chunk in self.partitioned.chunks_of(self.devices.stage)
        )
        read = (v for module in self.modules for v in module.chunk.graph.buffers)
        self._whole_batch = WholeBatchValues(self.partitioned, self.devices, read)
        self._weight = loss_weight(self.partitioned)
        self._stages: list[PipelineStageBase] = [self._stage(m) for m in self.modules]

    @property
    def pipeline(self) -> PipelineSpec:
        return self.partitioned.pipeline

    @property
    def micro_batches(self) -> int:
        return self.pipeline.micro_batches

    @property
    def _last_stage(self) -> int:
        return self.partitioned.chunks[-1].stage

    def compile(self, compiler: Callable[[Program], Program]) -> None:
        if self.pipeline.schedule_spec.splits_backward:
            raise PlanError(
                f"{self.pipeline.schedule} runs backward passes in two halves, which compiled"
                " programs do not have: compile a plan with another schedule"
            )
        for module in self.modules:
            module.program = compiler(module.program)

    def train(self, inputs: StepInputs) -> StepResults:
        step = self._begin(inputs)
        if self._training is None:
            self._training = self._schedule(self._weighted)
        losses: list[Tensor] = []
        numbers = torch.arange(self.micro_batches)
        named = record_function(SCHEDULE) if self.devices.named_ranges else nullcontext()
        with named, self.devices.waits.measure():
            self._training.step(number=numbers, target=numbers, losses=losses, return_outputs=False)
        gradients: dict[str, Tensor] = {}
        for module in self.modules:
            for name, gradient in module.unsharded.end_step().items():
                gradients[name] = gradients[name] + gradient if name in gradients else gradient
        self._sum_shared(inputs.shards, gradients)
        loss = torch.stack(losses).sum().detach() if losses else self._no_loss()
        self._from_stage(self._last_stage, loss)
        return loss, gradients, inputs.changed(step.buffers)

    def evaluate(self, inputs: StepInputs) -> tuple[dict[str, list[Tensor]], dict[str, Tensor]]:
        """Run forward over all micro-batches.

        Returns:
            For each value that this stage returns, the local tensors of all micro-batches; and the
            new values of buffers.
        """
        with torch.no_grad():
            step = self._begin(inputs)
            step.returned = {}
            if self._forward is None:
                self._forward = self._schedule(None)
            self._forward.step(number=torch.arange(self.micro_batches), return_outputs=False)
            for module in self.modules:
                module.unsharded.end_step()
        return step.returned, inputs.changed(step.buffers)

    def reduction_of(self, value: Value) -> float | None:
        """Weight of each micro-batch's in the value of the batch; None for others than means and
        sums over samples."""
        if value is self.partitioned.graph.loss:
            return self._weight
        reductions = dict(whole_batch_of(self.partitioned.graph).outputs)
        weights = {"mean": 1 / self.micro_batches, "sum": 1.0}
        return weights.get(reductions.get(value.name, ""))

    def _weighted(self, loss: Tensor, number: Tensor | int) -> Tensor:
        return loss * self._weight

    def _begin(self, inputs: StepInputs) -> StepContext:
        step = StepContext.of(inputs, self.micro_batches, self._whole_batch)
        for module in self.modules:
            module.begin_step(step, inputs)
        return step

    # Groups and schedules

    def _create_groups(self) -> None:
        """Create the groups of all stages, in the same order on every rank. Collective."""
        needed = groups_of(self.partitioned)
        for axes in dict.fromkeys((*needed, *prologue_axes(self.partitioned))):
            self.devices.group(axes)
        self._shared = {}
        parameters = self.partitioned.graph.parameters
        self._trained = {value.name for value in parameters if value.requires_grad}
        for name, stages in sorted(self.partitioned.stages_of_parameters.items()):
            if len(stages) > 1:
                group = self.devices.peers_of_stages(stages)
                if self.devices.stage in stages and group is not None:
                    self._shared[name] = group

    def _stage(self, module: StageModule) -> PipelineStageBase:
        chunk, decisions = module.chunk, module.chunk.decisions
        arriving = tuple(_like(v, decisions.arrivals[v.name], chunk) for v in chunk.arriving)
        leaving = tuple(_like(v, decisions.departures[v.name], chunk) for v in chunk.leaving)
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
            dw_builder=None if can_split_backward(module) else _at_once,
        )
        for method, what in PASSES.items():
            computes = self.devices.waits.exclude(getattr(stage, method))
            if self.devices.named_ranges:
                computes = in_range(f"{what} of chunk {chunk.number}", computes)
            setattr(stage, method, computes)
        return stage

    def _schedule(self, loss: Any) -> PipelineSchedule:
        count = self.micro_batches
        schedule = self.pipeline.schedule_spec.torch_class(count, self.pipeline.stages)
        if issubclass(schedule, PipelineScheduleSingle):
            return schedule(self._stages[0], count, loss, scale_grads=False)
        many = schedule(self._stages, count, loss, scale_grads=False)
        if loss is None:
            _forward_only(many)
        return many

    # Communication between stages

    def _sum_shared(self, shards: Mapping[str, Tensor], gradients: dict[str, Tensor]) -> None:
        """All-reduce the gradients of parameters that several stages own."""
        for name, group in self._shared.items():
            if name in self._trained:
                gradient = gradients.get(name)
                total = (
                    torch.zeros_like(shards[name]) if gradient is None else gradient.contiguous()
                )
                with self.devices.waits.measure():
                    dist.all_reduce(total, group=group)
                gradients[name] = total

    def _no_loss(self) -> Tensor:
        loss = self.partitioned.graph.loss
        assert loss is not None
        return torch.empty((), dtype=loss.dtype, device=self.devices.device)

    def _from_stage(self, stage: int, tensor: Tensor) -> None:
        with self.devices.waits.measure():
            dist.broadcast(tensor, group=self.devices.peers_of_all_stages, group_src=stage)


def groups_of(partitioned: Partitioned) -> tuple[tuple[int, ...], ...]:
    """The joined axes over which any chunk communicates, in a fixed order."""
    devices = Devices.of_rank(partitioned.mesh, 0)
    for chunk in partitioned.chunks:
        lower(chunk, devices, unsharded=True)
    return devices.groups


def _like(value: Value, axes: CutAxes, chunk: Chunk) -> Tensor:
    """A meta tensor with the local shape of a value that is sent between stages."""
    shape = TensorLayout(chunk.mesh, axes).shard_shape(value.shape)
    empty = torch.empty(shape, dtype=value.dtype, device="meta")
    return empty.requires_grad_(value.requires_grad)


def can_split_backward(module: StageModule) -> bool:
    """Whether the backward pass can be split into gradients of inputs and gradients of parameters.

    Some input must require a gradient. No bucket may join parameters of different operators, and no
    parameter may be read twice, as PyTorch would run the operators between the reads twice. No
    operator may be recomputed, as each half would recompute it. PyTorch 2.11 never splits
    correctly: it needs a gradient of all sent tensors, and counts some of parameters twice.
    """
    if not SENDS_ONLY_GRADIENTS:
        return False
    chunk = module.chunk
    uses = chunk.graph.consumers
    apart = all(bound.bucket.reduces_once for bound in module.program.buckets) and all(
        len(uses[value]) == 1 for value in chunk.graph.parameters if value.requires_grad
    )
    apart = apart and not module.program.communication.segments
    return apart and (chunk.number == 0 or any(v.requires_grad for v in chunk.arriving))


def _at_once() -> Any:
    """`dw_builder` of chunks that compute gradients of parameters with those of inputs."""
    return _nothing


def _nothing(*_: Any) -> None:
    return None


def _forward_only(schedule: PipelineScheduleMulti) -> None:
    """Replace the backward passes of a schedule with several chunks per stage by nothing."""
    for kind in (FULL_BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT):
        schedule.register_custom_function(kind, _nothing)  # type: ignore[attr-defined]


class _Border(torch.autograd.Function):
    """Detaches tensors, and makes their gradients contiguous."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.others = len(tensors) - count
        return tuple(tensor.detach() for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        whole = (None if g is None else g.contiguous() for g in gradients)
        return None, *whole, *(None,) * ctx.others


def border(tensors: Sequence[Tensor], follows: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
    """Make tensors contiguous and independent of views, to send or receive them.

    Args:
        follows: tensors that autograd sees as inputs of all results, with no gradient. A split
            backward pass only finds parameters whose results meet a tensor that depends on an
            input of the stage; so each result is made to depend on one.
    """
    with_gradient = [tensor for tensor in tensors if tensor.requires_grad]
    passed = iter(())
    if with_gradient:
        passed = iter(_Border.apply(len(with_gradient), *with_gradient, *follows))  # type: ignore[no-untyped-call]
    return tuple((next(passed) if t.requires_grad else t.detach()).contiguous() for t in tensors)
