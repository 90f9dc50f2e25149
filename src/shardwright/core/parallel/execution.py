"""Execute calls of a planned model on this rank, with one program per situation."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardwright.core.capture.autocast import Autocast
from shardwright.core.capture.build_graph import CapturedCall
from shardwright.core.capture.shapes import Captures
from shardwright.core.graph.graph import Graph, Value
from shardwright.core.graph.local_map import bind_modules
from shardwright.core.lower.program import Program, lower
from shardwright.core.micro_batches.whole_batch import with_whole_batch
from shardwright.core.misuse.batch_guard import BatchGuard
from shardwright.core.misuse.before_backward import (
    before_backward,
    refuse_other_draws,
    refuse_transforms,
)
from shardwright.core.misuse.between_outputs import OutputsOffPath
from shardwright.core.misuse.gradient_guard import GradientGuard
from shardwright.core.misuse.original import OriginalModel
from shardwright.core.misuse.paired_batch import BatchSizes
from shardwright.core.misuse.planned_parameters import PlannedParameters
from shardwright.core.misuse.whole_batch import (
    batch_sizes,
    output_batches,
    to_plain_tensor,
    to_plain_tensors,
)
from shardwright.core.parallel.bound_program import BoundProgram, BoundStep
from shardwright.core.parallel.call import PlannedCall, key_of
from shardwright.core.parallel.output_tensor import in_parts
from shardwright.core.parallel.python_state import PythonState
from shardwright.core.parallel.tensor_places import TensorPlaces
from shardwright.core.parallel.train_step import (
    GradientAccumulation,
    StepInputs,
    TrainStep,
    check_whole_batch,
    loss_of,
)
from shardwright.core.parallel.uninitialized import Initialization
from shardwright.core.partition.decisions import adapt_decisions
from shardwright.core.partition.fold_axes import dtensor_axes, fold_axes, split_axes
from shardwright.core.partition.partitioned import Partitioned, random_operators
from shardwright.core.partition.pipeline_spec import PipelineSpec
from shardwright.core.runtime.clip_grad import clip_grad_norm_
from shardwright.core.runtime.devices import Devices
from shardwright.core.runtime.dtensor import (
    add_gradients,
    as_dtensor,
    local_shards,
    stored_shards,
)
from shardwright.core.runtime.micro_batches import (
    global_leaves,
    micro_batch,
    num_micro_batches_of_call,
    of_micro_batches,
)
from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.hooks import HooksOfModules, without_saved_tensor_hooks
from shardwright.core.torch_internals.modules import alias_module

log = logging.getLogger(__name__)

MOST_SITUATIONS = 64
"""Number of cached programs; the least recently used one is dropped."""

Bound = TypeVar("Bound")


class Execution:
    """Runs calls of a parallel module on the devices of the running process group.

    For another mode (`eval()`), other arguments of `forward` or other shapes than planned, it
    captures the model once more, and keeps the plan's sharding where it divides the shapes.

    Args:
        module: the model, with parameters stored as planned.
        template: a copy on the meta device, to capture from.
        partitioned: the partitioned graph for the mode and shapes of the plan.
        hooks: the forward hooks of the given model, whose handles the user has.
    """

    def __init__(
        self,
        module: nn.Module,
        template: nn.Module,
        partitioned: Partitioned,
        devices: Devices,
        hooks: HooksOfModules,
    ) -> None:
        self.module = module
        self.template = template
        self.devices = devices
        self.inside = nn.Module()
        """Has the forward hooks and the instance's `forward` that programs contain."""
        self.random_seed = devices.common_seed()
        self.random_step = 0
        self.original: OriginalModel | None = None
        """The model that `module` was copied from with `copy=True`."""
        self.initialization: Initialization | None = None
        """Pending initialization of parameters from the meta device; None once they have values."""
        self._compiler: Callable[[Program], Program] | None = None
        self._user_module = alias_module(module)
        self.partitioned = partitioned = self._with_local_maps(partitioned)
        graph = partitioned.graph
        self._parameters_as_planned = PlannedParameters(module, graph.frozen)
        self._forwards: dict[tuple[Any, ...], BoundProgram] = {}
        self._train_steps: dict[tuple[Any, ...], BoundStep] = {}
        self._guard = BatchGuard(devices, partitioned.graph, partitioned.decisions.arrivals)
        self._gradients = GradientGuard(devices)
        self._state = PythonState(module, graph.attributes, hooks)
        self._planned_call = PlannedCall(template.forward, graph)
        leaves = tuple(key_of(leaf) for leaf in graph.inputs)
        state = self._state.key(), (), None
        self._planned_situation: tuple[Any, ...] = (*state, graph.in_spec, leaves)
        # A call with the shapes of a micro-batch has a loss of its own.
        prefix = ("micro-batch",) if graph.is_term_of_batch else ()
        self._planned_program: tuple[Any, ...] = (*prefix, *self._planned_situation)
        self._captures = Captures(graph, state)
        self._bind_planned()

    @property
    def programs(self) -> tuple[Program, ...]:
        """What this rank runs in the mode and for the shapes of the plan; `print` shows them."""
        return (self._forwards[self._planned_program].program,)

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call and return what the model returns.

        Raises:
            PlanError: if called by a transform of `torch.func`, or by a backward pass for a model
                that draws random numbers.
            CaptureError: if the model cannot be captured in another situation than planned.
        """
        several = self.devices.matrix.num_devices > 1
        if several:
            refuse_transforms()
        self.take_values()
        call = self._planned_call.arranged(args, kwargs)
        leaves, spec = _whole_inputs(call)
        numbers = self._planned_call.planned_inputs(spec)
        whole = self._whole_leaves(leaves, numbers)
        situation = self._situation(spec, [key_of(leaf) for leaf in whole])
        inputs = self._on_device(leaves)
        kind = ("forward", self.module.training, torch.is_grad_enabled(), *situation)
        self._guard.begin(kind, inputs, numbers)
        if situation not in self._forwards:
            with torch.inference_mode(False):  # A later call may train this program.
                captured = self._capture(*pytree.tree_unflatten(whole, spec))
                self._make_room(self._forwards)
                self._forwards[situation] = self._compiled(self._bind_program(captured))
        bound = _used(self._forwards, situation)
        if several and bound.draws:
            refuse_other_draws()
        parameters, buffers = bound.places.read()
        checks = self._parameters_as_planned.checks_before_backward(bound.recomputes)
        shards = local_shards(parameters, self.devices.matrix)
        if self.module.training:
            self.random_step += 1
        seed = self.random_seed + self.random_step
        with self._guard.explaining_errors(), self._autocast.disabled():
            outputs, updates = bound.program(shards, buffers, inputs, seed)
        if several:
            before_backward(outputs, checks)
        names = (buffer.name for buffer, _ in bound.graph.updates)
        bound.places.write(dict(zip(names, updates, strict=True)))
        returned = self._returned(bound, outputs, batch_sizes(leaves, whole))
        result = pytree.tree_unflatten(returned, bound.graph.out_spec)
        bound.off_path.watch(returned, result)
        return result

    def train_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Run forward and backward over all micro-batches, and accumulate gradients.

        Returns:
            The loss of the whole batch, on every rank.

        Raises:
            PlanError: if the model returns no loss or several, a call has other arguments than
                planned, or the batch cannot be divided as planned.
        """
        bound, leaves = self._step_for(args, kwargs)
        loss_of(bound.step.partitioned.graph)
        parameters, buffers = bound.places.read()
        self.random_step += 1
        with self._guard.explaining_errors(), self._autocast.disabled():
            seed = self.random_seed + self.random_step
            inputs = StepInputs(stored_shards(parameters), buffers, leaves, seed)
            loss, gradients, changed = bound.step.train(inputs)
        add_gradients(parameters, gradients)
        bound.places.write(changed)
        return loss

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the norm of all gradients, over all devices, to `max_norm`.

        Returns:
            The norm before clipping, on every rank.
        """
        return clip_grad_norm_(self.module.named_parameters(), max_norm, self.devices)

    def compile(self, args: tuple[Any, ...], kwargs: dict[str, Any], regional: bool) -> None:
        """Compile the programs with `torch.compile` and its arguments.

        Args:
            regional: whether only the repeated blocks of a program are compiled, once.
        """
        self._compiler = lambda program: program.compiled(
            lambda function: torch.compile(function, *args, **kwargs), regional
        )
        self._forwards = {key: self._compiled(bound) for key, bound in self._forwards.items()}
        for bound in self._train_steps.values():
            bound.step.compile(self._compiler)

    def take_values(self) -> None:
        """Complete the initialization of parameters from the meta device. Collective.

        Does nothing once they have values.

        Raises:
            PlanError: if a parameter or buffer that the program reads has no values.
        """
        if self.initialization is None:
            return
        graph = self.partitioned.graph
        used = {value.name for value in (*graph.parameters, *graph.module_buffers)}
        self.initialization.check_has_values(self.module, used)
        self.initialization.take_values(self.module)
        self.initialization.end(self.module)
        self.initialization = None
        self._bind_tensors()  # `to_empty` may have replaced them.

    def of_copy(self, module: nn.Module, memo: dict[int, Any]) -> Execution:
        """The execution of `module`, a deep copy of this one's: the same programs, on its tensors.
        It communicates nothing.

        Args:
            memo: that of the deep copy.
        """
        result, graph = copy.copy(self), self.partitioned.graph
        result.module, result.original = module, None
        result.template, result.inside = copy.deepcopy((self.template, self.inside), memo)
        if self.initialization is not None:
            result.initialization = self.initialization.of_copy()
        result._guard = BatchGuard(self.devices, graph, self.partitioned.decisions.arrivals)
        result._state = self._state.of_copy(module, result.inside)
        result._bind_tensors()
        return result

    def _bind_tensors(self) -> None:
        """Bind all programs to the current tensors of the module."""
        module = self.module
        self._parameters_as_planned = PlannedParameters(module, self.partitioned.graph.frozen)
        self._forwards = {
            key: replace(b, places=self._places(b.graph)) for key, b in self._forwards.items()
        }
        self._train_steps = {
            key: replace(b, places=self._places_of_step(b.step.partitioned))
            for key, b in self._train_steps.items()
        }

    def forget_removed_hooks(self) -> None:
        """Remove the forward hooks that the user has removed from the model."""
        self._state.forget_removed_hooks()

    def _bind_planned(self) -> None:
        """Make the program for the situation of the plan, before the first call."""
        self._forwards[self._planned_program] = self._bind_program(self.partitioned)

    def _bind_program(self, partitioned: Partitioned) -> BoundProgram:
        graph, (whole,) = partitioned.graph, partitioned.chunks
        places = self._places(graph)
        recomputes, devices = bool(partitioned.decisions.recompute), self._along(partitioned)
        draws, program = bool(random_operators(graph)), lower(whole, devices)
        # Outputs of the whole batch are marked by one more autograd function.
        marked = bool(self.partitioned.decisions.arrivals)
        off_path = OutputsOffPath(graph, program.communication, all_off_path=marked)
        return BoundProgram(graph, program, places, recomputes, draws, devices, off_path)

    def _places(self, graph: Graph) -> TensorPlaces:
        return TensorPlaces.of(self.module, graph.parameters, graph.module_buffers)

    def _compiled(self, bound: BoundProgram) -> BoundProgram:
        if self._compiler is None:
            return bound
        program = self._compiler(bound.program)
        off_path = OutputsOffPath(bound.graph, program.communication, all_off_path=True)
        return replace(bound, program=program, off_path=off_path)

    def _step_for(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[BoundStep, list[Any]]:
        """Return the training step for the situation of a call, and the leaves of its arguments."""
        self.take_values()
        call = self._planned_call.arranged(args, kwargs)
        leaves, spec = _whole_inputs(call)
        numbers = self._planned_call.planned_inputs(spec)
        count = num_micro_batches_of_call(leaves, self.partitioned.pipeline)
        piece = self._whole_leaves(micro_batch(leaves, 0, count), numbers)
        situation = self._situation(spec, [key_of(leaf) for leaf in piece])
        key = (*situation, count)
        inputs = self._on_device(leaves)
        self._guard.begin(key, inputs, numbers)
        if key not in self._train_steps:
            partitioned = self.partitioned
            planned = situation == self._planned_situation
            if not planned or count != partitioned.pipeline.micro_batches:
                of_args, of_kwargs = pytree.tree_unflatten(piece, spec)
                partitioned = self._capture(of_args, of_kwargs, count)
            self._make_room(self._train_steps)
            self._train_steps[key] = self._bind_step(partitioned)
        return _used(self._train_steps, key), inputs

    def _bind_step(self, partitioned: Partitioned) -> BoundStep:
        step = self._make_step(partitioned)
        if self._compiler is not None:
            step.compile(self._compiler)
        return BoundStep(step, self._places_of_step(partitioned))

    def _places_of_step(self, partitioned: Partitioned) -> TensorPlaces:
        return TensorPlaces.of(self.module, *partitioned.tensors_of(self.devices.stage))

    def _make_step(self, partitioned: Partitioned) -> TrainStep:
        return GradientAccumulation(partitioned, self._along(partitioned))

    def _along(self, partitioned: Partitioned) -> Devices:
        return self.devices.with_matrix(partitioned.mesh, dtensor_axes(partitioned))

    def _on_device(self, leaves: Sequence[Any]) -> list[Any]:
        device = self.devices.device
        return [
            to_plain_tensor(leaf).to(device) if isinstance(leaf, Tensor) else leaf
            for leaf in leaves
        ]

    def _whole_leaves(self, leaves: list[Any], numbers: Sequence[int | None]) -> list[Any]:
        graph, arrivals = self.partitioned.graph, self.partitioned.decisions.arrivals
        planned = [None if number is None else graph.inputs[number] for number in numbers]
        ordinary_leaves = to_plain_tensors(planned, arrivals, leaves)
        return global_leaves(planned, self.devices.matrix, arrivals, ordinary_leaves)

    def _situation(self, spec: pytree.TreeSpec, leaves: list[Any]) -> tuple[Any, ...]:
        """The key of a program: Python state of all submodules, parameters frozen or unfrozen since
        the plan, the autocast dtype, and the arguments of the call.

        Raises:
            PlanError: for a parameter, hook or submodule that was replaced since the plan.
        """
        if self.original is not None:
            self.original.check(self.module)
        return *self._module_state(), spec, tuple(leaves)

    def _module_state(self) -> tuple[Hashable, Hashable, Hashable]:
        frozen = self._parameters_as_planned.frozen_or_unfrozen()
        return self._state.key(), frozen, self._autocast.dtype

    @property
    def _autocast(self) -> Autocast:
        """The caller's autocast region. Programs run outside of it: their casts are operators."""
        return Autocast.around(self.devices.device)

    def _capture(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], micro_batches: int = 1
    ) -> Partitioned:
        """Capture the model in another situation than planned, and adapt the plan's decisions.

        Args:
            args, kwargs: a call, with one of `micro_batches` micro-batches.

        Raises:
            PlanError: if a tensor has another dtype than planned.
            CaptureError: if the model cannot be captured in this situation.
            MixedSamplesError: if micro-batches do not make the loss of the batch.
        """
        planned, template = self.partitioned, self.template
        call = CapturedCall(template, args, kwargs, self._autocast)
        self._planned_call.check(args, kwargs)
        self._state.copy_to(template)
        for name, parameter, *_ in self._parameters_as_planned.all:
            template.get_parameter(name).requires_grad_(parameter.requires_grad)
        leaves, spec = pytree.tree_flatten((args, kwargs))

        def captured(count: int) -> Graph:
            batch = pytree.tree_unflatten(of_micro_batches(leaves, count), spec)
            of_args, of_kwargs = batch
            return self._captured(CapturedCall(template, of_args, of_kwargs, self._autocast))

        graph = self._captured(call)
        pipeline = replace(planned.pipeline, micro_batches=micro_batches)
        if pipeline.averages_micro_batches:
            graph = with_whole_batch(graph, micro_batches, captured)
            check_whole_batch(graph, micro_batches)
        self._state.watch(graph.attributes)
        log.info(
            "captured the model for %s, training=%s, in %.1f s",
            *(graph.input_values, self.module.training, graph.capture_seconds),
        )
        graph = bind_modules(graph, self._user_module)
        mesh, decisions = split_axes(planned.mesh, planned.decisions)
        decisions = adapt_decisions(decisions, graph, mesh)
        pipeline = replace(self._pipeline_of(graph), micro_batches=micro_batches)
        partitioned = Partitioned(graph, mesh, decisions, pipeline)
        return fold_axes(partitioned, unjoined_mesh=planned.mesh)

    def _captured(self, call: CapturedCall) -> Graph:
        # The user's saved-tensor hooks must not see the tensors of capture.
        with without_saved_tensor_hooks():
            dtype = self.partitioned.graph.compute_dtype
            return self._captures.graph(call, dtype, self._module_state())

    def _with_local_maps(self, partitioned: Partitioned) -> Partitioned:
        """The same, with the modules that run as they are those of `module`."""
        graph = bind_modules(partitioned.graph, self._user_module)
        return partitioned if graph is partitioned.graph else replace(partitioned, graph=graph)

    def _make_room(self, bound: dict[tuple[Any, ...], Any]) -> None:
        """Drop the least recently used programs, except those of the planned situation."""
        planned = self._planned_situation
        others = [
            key for key in bound if key != self._planned_program and key[: len(planned)] != planned
        ]
        for key in others[: max(0, len(bound) + 1 - MOST_SITUATIONS)]:
            del bound[key]

    def _pipeline_of(self, graph: Graph) -> PipelineSpec:
        """Assign another captured graph to the planned stages."""
        return self.partitioned.pipeline

    def _returned(
        self, bound: BoundProgram, outputs: list[Any], sizes: BatchSizes | None
    ) -> list[Any]:
        """Wrap sharded and partial outputs in DTensors."""
        flow, name = bound.program.communication, type(self.module).__name__
        batches = output_batches(name, bound.graph.out_spec, sizes, self._gradients.watch)
        result = []
        for value, tensor, batch in zip(bound.graph.outputs, outputs, batches, strict=True):
            if isinstance(value, Value):
                where = flow.returned(value)
                if where.sharded or where.partial:
                    like = torch.empty(value.shape, device="meta")
                    tensor = in_parts(as_dtensor(tensor, like, where, bound.devices), batch)
                elif batch is not None:
                    tensor = batch.mark(tensor)
            result.append(tensor)
        return result


def _used(bound: dict[tuple[Any, ...], Bound], key: tuple[Any, ...]) -> Bound:
    """Return the entry of `key`, and mark it as the most recently used."""
    bound[key] = bound.pop(key)
    return bound[key]


def _whole_inputs(call: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Leaves and structure of a call; DTensors, such as outputs of earlier calls, are gathered."""
    leaves, spec = pytree.tree_flatten(call)
    return [leaf.full_tensor() if isinstance(leaf, DTensor) else leaf for leaf in leaves], spec
