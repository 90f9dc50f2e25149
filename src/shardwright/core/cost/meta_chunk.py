"""A chunk on the meta device: runs its passes as in training, and measures their memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from shardwright.core.cost.pipeline_actions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
)
from shardwright.core.cost.tensor_tracking import (
    META,
    PARAMETERS,
    DryRunMode,
    LiveBytes,
    TrackedStorage,
    bytes_by_category,
    events_at_peak,
)
from shardwright.core.graph.graph import Value
from shardwright.core.layout.layout import TensorLayout
from shardwright.core.lower.emit_program import lower
from shardwright.core.micro_batches.buffer_updates import BufferUpdates
from shardwright.core.parallel.stage_module import StageModule, StepContext, can_split_backward
from shardwright.core.partition.chunk import Chunk
from shardwright.core.partition.partitioned import Partitioned
from shardwright.core.runtime.devices import Devices
from shardwright.core.torch_internals.pipelining import (
    stage_backward,
    stage_backward_input,
    stage_backward_weight,
)
from shardwright.progress import OnShare, track

BATCH, BUFFERS, GRADIENTS, ACTIVATIONS = "batch", "buffers", "gradients", "activations"


TEMPORARY = ""


MAX_LARGEST_TENSORS = 8
"""Maximum number of tensors in `Phase.largest`."""


BytesByCategory = Mapping[str, int]
"""Bytes by category of tensor: stored `parameters`, the `batch` (inputs of a micro-batch),
`buffers` and constants, `weights` (gathered or cast parameters), `gradients` of parameters,
`activations` saved for backward, received ones included, and temporary tensors (``""``): gradients
of activations, flat buffers of collectives, intermediate results."""


@dataclass(frozen=True)
class Phase:
    """Memory of one action (forward or backward pass of a micro-batch), relative to its start.

    Args:
        peak_bytes: change in bytes from the start of the action to its memory peak, by category of
            tensor.
        change: change in bytes from the start of the action to its end, by category of tensor.
        largest: (category of tensor, index of the operator that produces or first reads the tensor,
            bytes) of the largest tensors of the micro-batch at the peak, in descending order.
    """

    peak_bytes: BytesByCategory
    change: BytesByCategory
    largest: tuple[tuple[str, int, int], ...] = ()


@dataclass
class MetaChunk:
    """A pipeline chunk on the meta device, with the state of its dry run.

    Args:
        module: the chunk as a module.
        stored: stored parameters by name.
        received_activations: tensors with the shapes of the activations from the previous chunk.
        received_gradients: tensors with the shapes of the gradients from the next chunk; None for
            a value without a gradient.
        splits_backward: whether input and weight gradients are computed in separate passes.
        live_bytes: record of allocated and freed storages.
        micro_batch: index of the current micro-batch, an int64 scalar.
        outputs: outputs of the current micro-batch.
        inputs: inputs of the current micro-batch.
        gradients: received gradients of the current micro-batch.
        parameter_groups: parameter groups from `stage_backward_input` for `stage_backward_weight`.
        retained_tensors: tensors that stay alive from the pass of input gradients to the pass of
            weight gradients.
        reduced_gradients: gradients after the reductions at the end of the step, by parameter name.
        accumulated_gradients: (number of earlier allocations, storage) of each gradient that the
            current backward pass accumulates into a gradient of an earlier micro-batch.
    """

    module: StageModule
    stored: dict[str, Tensor]
    received_activations: list[Tensor]
    received_gradients: list[Tensor | None]
    splits_backward: bool
    live_bytes: LiveBytes
    # On the CPU, as `plan` may be called in a context of the meta device.
    micro_batch: Tensor = field(default_factory=lambda: torch.tensor(0, device="cpu"))
    outputs: tuple[Tensor, ...] = ()
    inputs: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor | None] = field(default_factory=list)
    parameter_groups: list[dict[str, Any]] = field(default_factory=list)
    retained_tensors: list[Tensor | None] = field(default_factory=list)
    reduced_gradients: dict[str, Tensor] = field(default_factory=dict)
    accumulated_gradients: list[tuple[int, TrackedStorage]] = field(default_factory=list)

    @classmethod
    def from_chunk(
        cls,
        partitioned: Partitioned,
        chunk: Chunk,
        splits_backward: bool,
        cached_results: dict[Any, Any],
    ) -> MetaChunk:
        mesh = chunk.mesh
        # The last rank needs the most memory: with causal attention its queries read the most keys.
        coordinates = mesh.coordinates(mesh.ranks[-1])
        devices = Devices(mesh, META, lambda function: function(coordinates))
        # PyTorch rejects operators whose arguments are on the meta device and on another one.
        constants = {value: tensor.to(META) for value, tensor in chunk.graph.constants.items()}
        if constants:
            chunk = replace(chunk, graph=replace(chunk.graph, constants=constants))
        # With a single chunk and micro-batch, the program itself gathers parameters.
        is_full_model = not chunk.arriving and not chunk.leaving
        unsharded = partitioned.pipeline.micro_batches > 1 or not is_full_model
        program = lower(chunk, devices, unsharded)
        module = StageModule(chunk, program, partitioned.graph)
        layouts = program.communication.initial_layouts

        def local(value: Value, dtype: torch.dtype | None = None) -> Tensor:
            shape = layouts[value].shard_shape(value.shape)
            return torch.empty(shape, dtype=dtype or value.dtype, device=META)

        arriving = [local(v).requires_grad_(v.requires_grad) for v in chunk.arriving]
        run = cls(
            module,
            {v.name: local(v, v.stored_dtype) for v in chunk.graph.parameters},
            arriving,
            [_make_received_gradient(chunk, value) for value in chunk.leaving],
            splits_backward and can_split_backward(module),
            DryRunMode(cached_results),
        )
        chunk_inputs = set(chunk.graph.input_values)
        leaves = [
            local(leaf, leaf.stored_dtype)
            # An input that only other chunks read stays a `Value`: its tensor is not on this
            # device.
            if isinstance(leaf, Value) and leaf in chunk_inputs
            else leaf
            for leaf in partitioned.graph.inputs
        ]
        buffers = {value.name: local(value) for value in chunk.graph.buffers}
        # Any seed: random operators draw nothing on the meta device.
        updates = BufferUpdates(partitioned.graph, buffers)
        module.step = StepContext([leaves], updates, 0, [{}], outputs={})
        tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor))
        run.live_bytes.watch(tensors, BATCH)
        run.live_bytes.watch(run.stored.values(), PARAMETERS)
        run.live_bytes.watch([*constants.values(), *buffers.values()], BUFFERS)
        return run

    def label_live_tensors(self, category: str) -> int:
        """Label all unlabeled live tensors with `category`, and return the number of allocations
        and frees so far."""
        self.live_bytes.label(category)
        return len(self.live_bytes.history)

    def run_phase(self, function: Callable[[], None], category: str) -> Phase:
        """Run `function`, label the tensors that it leaves alive with `category`, and return its
        memory."""
        start = len(self.live_bytes.history)
        function()
        # Labeled before bytes are summed: events refer to storages, whose categories are set here.
        end = self.label_live_tensors(category)
        num_events = self.live_bytes.events_until_peak(start, end)
        peak_bytes, change = (
            self.live_bytes.bytes_between(num_events, start),
            self.live_bytes.bytes_between(end, start),
        )
        return Phase(peak_bytes, change, self._largest_tensors(num_events))

    def run_actions(
        self, pass_types: Sequence[str], has_several_micro_batches: bool, on_share: OnShare
    ) -> tuple[dict[str, Phase], dict[str, Phase]]:
        """Return the memory of each action in the first and in a later micro-batch, by action (`F`,
        `B`, `I`, `W`).

        With several micro-batches, usually only a later micro-batch runs, and
        `_first_micro_batch_phase` derives the first, which halves the time of a dry run.

        Args:
            has_several_micro_batches: whether a step has several micro-batches; if not, the second
                result is {}.
        """
        # `stage_backward_weight` calls `torch.autograd.grad` and adds to `grad` itself, so the
        # hooks that mark accumulations would not run.
        if self.splits_backward or not has_several_micro_batches:
            first = {
                pass_type: self.run_action(pass_type) for pass_type in track(pass_types, on_share)
            }
            return first, {
                each: self.run_action(each) for each in pass_types
            } if has_several_micro_batches else {}
        first, later = {}, {}
        for pass_type in track(pass_types, on_share):
            start = len(self.live_bytes.history)
            if pass_type == FORWARD:
                # Gathers finish in the first micro-batch, not in a later micro-batch.
                self.module.unsharded.tensors()
            later[pass_type] = self.run_action(pass_type)
            first[pass_type] = self._first_micro_batch_phase(start, later[pass_type])
            # The graph of the outputs tells which parameters the backward pass reaches.
            if pass_type == FORWARD:
                self._allocate_accumulated_gradients()
        return first, later

    def _first_micro_batch_phase(self, start_event: int, later_phase: Phase) -> Phase:
        """Return the memory of an action of the first micro-batch, derived from `later_phase`.

        A later micro-batch adds its gradients to existing ones, then frees its own. As the first
        micro-batch does not free its gradients, an allocation is inserted at each accumulation.

        Args:
            start_event: number of allocations and frees before the action of `later_phase`.
            later_phase: memory of the same action of a later micro-batch.
        """
        events = self.live_bytes.history[start_event:]
        # Last position first, so that an insertion does not shift the positions that follow.
        for position, gradient in reversed(self.accumulated_gradients):
            # After the event that frees the added tensor.
            events.insert(position + 1 - start_event, (gradient, True))
        self.accumulated_gradients.clear()
        peak_bytes = bytes_by_category(events[: events_at_peak(events)])
        return Phase(peak_bytes, bytes_by_category(events), later_phase.largest)

    def _allocate_accumulated_gradients(self) -> None:
        """Allocate a gradient of each parameter that the backward pass reaches, as an earlier
        micro-batch would have done."""
        # Received activations are leaves too, but get new gradients in each micro-batch.
        leaves = {id(leaf) for leaf in self.module.unsharded.leaves()}
        for leaf in filter(lambda leaf: id(leaf) in leaves, _reachable_leaves(self.outputs)):
            leaf.grad = torch.empty(leaf.shape, dtype=leaf.dtype, device=META)
            self.live_bytes.watch([leaf.grad], GRADIENTS)
            gradient = self.live_bytes.storage_of(leaf.grad)
            # The hook runs when the gradient has been accumulated, where `_first_micro_batch_phase`
            # inserts an allocation.
            leaf.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda _, gradient=gradient: self.accumulated_gradients.append(
                    (len(self.live_bytes.history), gradient)
                )
            )

    def _largest_tensors(self, num_events: int) -> tuple[tuple[str, int, int], ...]:
        """Return the largest live tensors after the first `num_events` allocations and frees.

        Returns:
            (category of tensor, operator index, bytes) in descending order; tensors of one category
            and operator are summed.
        """
        sizes: dict[tuple[str, int], int] = {}
        for (category, line), size in self.live_bytes.bytes_by_line(num_events).items():
            if line in self._operator_index_by_line and size:
                key = category, self._operator_index_by_line[line]
                sizes[key] = sizes.get(key, 0) + size
        largest = sorted(sizes.items(), key=lambda entry: -entry[1])[:MAX_LARGEST_TENSORS]
        return tuple((*key, size) for key, size in largest)

    @cached_property
    def _operator_index_by_line(self) -> dict[int, int]:
        """Operator that each line of the generated program runs, as its index in the graph by line
        number; for a redistribution, the index of the next operator."""
        indices = {op.name: index for index, op in enumerate(self.module.chunk.graph.ops)}
        operators: dict[int, int] = {}
        next_operator: int | None = None
        lines = self.module.program.source.splitlines()
        # The program has a comment with the operator's name above each operator's line.
        for line_number, line_text in reversed(list(enumerate(lines, start=1))):
            name = re.match(r"\s*# (.*?)[:;]", line_text)
            if name is not None and name[1] in indices:
                operators[line_number + 1] = next_operator = indices[name[1]]
            elif next_operator is not None:
                operators[line_number] = next_operator
        return operators

    def run_action(self, pass_type: str) -> Phase:
        """Run a pass (`F`, `B`, `I` or `W`) of one micro-batch, and return its memory."""
        function = {
            FORWARD: self.forward,
            BACKWARD: self.backward,
            BACKWARD_INPUT: self.backward_input,
            BACKWARD_WEIGHT: self.backward_weight,
        }[pass_type]
        # A later pass reads what these leave alive: saved activations, or intermediate gradients
        # that the pass of weight gradients needs.
        saves = pass_type in (FORWARD, BACKWARD_INPUT)
        return self.run_phase(function, ACTIVATIONS if saves else GRADIENTS)

    def begin(self) -> None:
        self.module.unsharded.begin_step(self.stored)

    def end(self) -> None:
        self.reduced_gradients = self.module.unsharded.end_step()

    def forward(self) -> None:
        # Gathers finish before a micro-batch begins.
        self.module.unsharded.tensors()
        # Allocated for each micro-batch, as a stage receives them.
        self.inputs = [
            torch.empty_like(tensor).requires_grad_(tensor.requires_grad)
            for tensor in self.received_activations
        ]
        if self.module.chunk.graph.loss is None and not self.module.chunk.leaving:
            self.outputs = self._run_forward_without_loss()
            return
        outputs = self.module(*self.inputs, number=self.micro_batch)
        self.outputs = outputs if isinstance(outputs, tuple) else (outputs,)

    def _run_forward_without_loss(self) -> tuple[Tensor, ...]:
        """Run the forward pass of a model without a loss, and return the outputs that require a
        gradient."""
        module, step = self.module, self.module.step
        tensors = module.unsharded.tensors()
        # Not by calling the module, which returns the loss or the values for the next chunk only.
        outputs, _ = module.program(tensors, step.buffers.values, module.read(0, self.inputs))
        return tuple(t for t in outputs if isinstance(t, Tensor) and t.requires_grad)

    def _receive_gradients(self) -> None:
        self.gradients = [
            None if gradient is None else torch.empty_like(gradient)
            for gradient in self.received_gradients
        ]

    def _take_micro_batch_tensors(
        self,
    ) -> tuple[tuple[Tensor, ...], list[Tensor | None] | None, list[Tensor]]:
        """Return the outputs of the micro-batch, their gradients, or None if it has none, and its
        inputs.

        Drops the references to these tensors, so that the backward pass frees them as in a pipeline
        schedule.
        """
        # `backward_input` of the first chunk has received them already.
        if not self.gradients:
            self._receive_gradients()
        tensors = self.outputs, self.gradients or None, self.inputs
        self.outputs, self.gradients, self.inputs = (), [], []
        return tensors

    def backward(self) -> None:
        outputs, gradients, inputs = self._take_micro_batch_tensors()
        if gradients:
            stage_backward(outputs, gradients, inputs)
        # For a model without a loss, the user passes a gradient for each output.
        elif outputs:
            torch.autograd.backward(outputs, [torch.empty_like(output) for output in outputs])

    def backward_input(self) -> None:
        # The first chunk has no inputs to differentiate: its backward pass runs in
        # `backward_weight`.
        if not self.splits_backward:
            self.backward()
        elif self.module.chunk.number:
            outputs, gradients, inputs = self._take_micro_batch_tensors()
            # The stub does not allow None, which schedules pass for an output without a gradient.
            _, self.parameter_groups = stage_backward_input(
                list(outputs),
                gradients,  # type: ignore[arg-type]
                inputs,
                self.module.parameters(),
            )
            # PyTorch's stages keep them for the weight pass, which may run many passes later.
            self.retained_tensors = [*outputs, *(gradients or ()), *inputs]
        else:
            self._receive_gradients()

    def backward_weight(self) -> None:
        if self.splits_backward and self.module.chunk.number:
            parameter_groups, self.parameter_groups = self.parameter_groups, []
            stage_backward_weight(self.module.parameters(), parameter_groups)
            self.retained_tensors = []
        elif self.splits_backward:
            self.backward()


def _reachable_leaves(outputs: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the leaf tensors in the autograd graph of `outputs`."""
    pending: list[Any] = [output.grad_fn for output in outputs]
    # `next_functions` has None for inputs that need no gradient.
    visited = {None}
    while pending:
        node = pending.pop()
        if node not in visited:
            visited.add(node)
            pending += [next_node for next_node, _ in node.next_functions]
            # Only the `AccumulateGrad` nodes of leaves have a `variable`.
            if isinstance(leaf := getattr(node, "variable", None), Tensor):
                yield leaf


def _make_received_gradient(chunk: Chunk, value: Value) -> Tensor | None:
    """Return an empty meta tensor that stands for the gradient that the next pipeline chunk sends
    back for `value`; None for a value without a gradient."""
    if not value.requires_grad:
        return None
    layout = TensorLayout(chunk.mesh, chunk.decisions.departures[value.name])
    return torch.empty(layout.shard_shape(value.shape), dtype=value.dtype, device=META)


def sum_by_category(first: BytesByCategory, *others: BytesByCategory) -> BytesByCategory:
    """Return the sum of several dicts of bytes by category of tensor."""
    names = {name for each in (first, *others) for name in each}
    return {name: sum(each.get(name, 0) for each in (first, *others)) for name in names}
