"""Execute calls of a planned model on this rank.

A program is valid for one *specialization*: the Python state that `forward` reads, the training
mode, which parameters are trained, the autocast dtype, and the shapes, dtypes and structure of the
arguments. Each specialization is captured on its first call and its program cached.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from shardwright.core.capture.filled_state import check_filled
from shardwright.core.graph.graph import Graph, Value
from shardwright.core.graph.python_call import ONCE_PER_BATCH
from shardwright.core.lower.program import Program, lower
from shardwright.core.misuse.batch_guard import BatchGuard
from shardwright.core.misuse.before_backward import (
    before_backward,
    refuse_other_draws,
    refuse_transforms,
)
from shardwright.core.misuse.between_outputs import OutputsOffPath
from shardwright.core.misuse.gradient_guard import GradientGuard, WatchGradient
from shardwright.core.misuse.planned_parameters import PlannedParameters
from shardwright.core.parallel.bound_program import BoundProgram, BoundStep
from shardwright.core.parallel.call import Call, argument_key
from shardwright.core.parallel.call_leaves import CallLeaves, full_leaves, has_dtensors
from shardwright.core.parallel.module_tensors import ModuleTensors
from shardwright.core.parallel.python_calls import ProgramResults
from shardwright.core.parallel.recapture import Recapture
from shardwright.core.parallel.step_outputs import StepOutputs
from shardwright.core.parallel.train_step import (
    GradientAccumulation,
    StepInputs,
    StepResults,
    TrainStep,
    loss_of,
)
from shardwright.core.parallel.unavailable import Unavailable
from shardwright.core.parallel.uninitialized import Initialization
from shardwright.core.partition.fold_axes import dtensor_axes
from shardwright.core.partition.partitioned import Partitioned, random_operators
from shardwright.core.runtime.clip_grad import clip_grad_norm_
from shardwright.core.runtime.devices import Devices
from shardwright.core.runtime.dtensor import add_gradients, local_shards, stored_shards
from shardwright.core.runtime.micro_batches import (
    SampleDims,
    micro_batch,
    num_micro_batches_of_call,
)
from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.hooks import (
    HooksOfModules,
    forward_hooks,
    renumbered_forward_hooks,
)
from shardwright.core.torch_internals.modules import alias_module
from shardwright.errors import PlanError

log = logging.getLogger(__name__)

MAX_CACHED_PROGRAMS = 64
"""Capacity of the caches of programs and of training steps; the least recently used is evicted.

Most runs have a few specializations; without a limit, caches of runs with many sequence lengths
would grow without bound."""

Bound = TypeVar("Bound")


class StepCall(NamedTuple):
    """A call of a training step.

    Args:
        bound: the step.
        leaves: leaves of the call's arguments, on this rank's device.
        dims: batch dimension of each leaf; empty if all of them are 0.
        call: the arguments, as Python code sees them.
    """

    bound: BoundStep
    leaves: list[Any]
    dims: SampleDims
    call: Call


class Execution(Recapture):
    """Executor of the calls of a planned model on the devices of the running process group.

    A call in another mode (`eval()`), or with other arguments or shapes than planned, captures the
    model again, and keeps the plan's sharding where it divides the shapes.

    Args:
        module: the model, with parameters stored as planned.
        template: a copy of `module` on the meta device, which is captured.
        partitioned: the partitioned graph for the mode and shapes of the plan.
        devices: this rank's view of the devices.
        hooks: forward hooks of the user's model, to which the user's handles refer.
    """

    def __init__(
        self,
        module: nn.Module,
        template: nn.Module,
        partitioned: Partitioned,
        devices: Devices,
        hooks: HooksOfModules,
    ) -> None:
        super().__init__(module, template, partitioned, devices, hooks)
        partitioned, graph = self.partitioned, self.partitioned.graph
        pipeline = partitioned.pipeline
        if (
            pipeline.micro_batches > 1
            and not pipeline.averages_micro_batches
            and graph.python is not None
            and graph.python.depends_on_calls
        ):
            raise PlanError(ONCE_PER_BATCH)
        self.captured_hooks = nn.Module()
        """Owner of the root module's forward hooks, and of a `forward` set on its instance, both of
        which programs contain. A model captured by TorchDynamo keeps its hooks, which run around
        the program."""
        # Rank 0's seed on all ranks, so that ranks with equal shards draw equal random numbers.
        self.random_seed = devices.common_seed()
        self.random_step = 0
        self.initialization: Initialization | None = None
        """Pending initialization of parameters on the meta device; None once all are
        initialized."""
        self._compiler: Callable[[Program], Program] | None = None
        self._forwards: dict[tuple[Any, ...], BoundProgram] = {}
        self._train_steps: dict[tuple[Any, ...], BoundStep] = {}
        self._guard = BatchGuard(devices, graph, partitioned.decisions.arrivals)
        self._watch_gradient: WatchGradient | None = None
        if partitioned.decisions.arrivals:
            # Only with local batches can ranks compute different losses, each from its own samples.
            self._watch_gradient = GradientGuard(devices).watch
        self._leaves = CallLeaves(partitioned, devices)
        leaves = tuple(argument_key(leaf) for leaf in graph.inputs)
        self._planned_specialization: tuple[Any, ...] = (
            *self._planned_state,
            graph.in_spec,
            leaves,
        )
        # A call with the shapes of a micro-batch has a loss of its own.
        prefix = ("micro-batch",) if graph.is_term_of_batch else ()
        self._planned_program: tuple[Any, ...] = (*prefix, *self._planned_specialization)
        self._cache_planned_program()

    @property
    def programs(self) -> tuple[Program, ...]:
        """This rank's programs for the mode and shapes of the plan; `print` shows their code."""
        return (self._forwards[self._planned_program].program,)

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call and return the model's result.

        Raises:
            PlanError: if called under a `torch.func` transform, or in a backward pass although the
                model draws random numbers.
            CaptureError: if the model cannot be captured in this specialization.
        """
        return self.call(args, kwargs)[0]

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Graph, list[Any]]:
        """Run a call of the model.

        Returns:
            (the model's result, the graph that ran, the outputs of the graph).

        Raises:
            PlanError: if called under a `torch.func` transform, or in a backward pass although the
                model draws random numbers.
            CaptureError: if the model cannot be captured in this specialization.
        """
        is_distributed = self.devices.matrix.num_devices > 1
        # One device runs the operators of the model alone, to which all transforms apply.
        if is_distributed:
            refuse_transforms()
        self.complete_initialization()
        call = self._planned_call.reorder_arguments(args, kwargs)
        leaves, spec = full_leaves(call)
        planned_indices = self._planned_call.planned_indices(spec)
        # Programs are made for global shapes; a local batch is only this rank's part of them.
        global_leaves = self._leaves.with_global_shapes(leaves, planned_indices)
        specialization = self._make_specialization_key(
            spec, [argument_key(leaf) for leaf in global_leaves]
        )
        inputs = self._leaves.on_device(leaves, planned_indices)
        # With the gradient mode, as only a call with gradients is followed by a backward pass.
        call_key = ("forward", self.module.training, torch.is_grad_enabled(), *specialization)
        # Before capture, which is local: ranks with different calls would run different programs,
        # and wait for each other in their collectives.
        self._guard.begin(call_key, inputs, planned_indices)
        # The guards and the captured Python expect the ordinary tensors of the capture.
        call = pytree.tree_unflatten(leaves, spec) if has_dtensors(call) else call
        self._reachable.update()
        state_key = self._reachable.key(specialization)
        with renumbered_forward_hooks(self._state.modules_with_added_hooks):
            key = self._python.matching_program_key(self._forwards, state_key, call)
        if key not in self._forwards:
            # Tensors made in inference mode cannot be saved for backward, and a later call may
            # train this program.
            gradients = torch.is_grad_enabled()
            with torch.inference_mode(False), torch.set_grad_enabled(gradients):
                captured = self._capture_specialization(*pytree.tree_unflatten(global_leaves, spec))
                # After the capture, so that a capture that fails evicts no program.
                self._evict_least_recently_used(self._forwards)
                self._forwards[key] = self._compile_program(self._bind_program(captured))
        bound = _touch_cache_entry(self._forwards, key)
        check_filled(bound.graph.filled, self._filled)
        if is_distributed and bound.draws_random_numbers:
            refuse_other_draws()
        if bound.graph.python is None:
            outputs, result = self._run_program(bound, inputs)
            return result, bound.graph, outputs
        outputs = []

        def program(constants: Mapping[str, Tensor]) -> ProgramResults:
            # In place, as the captured Python calls this function, and `call` returns the outputs.
            outputs[:], _ = self._run_program(bound, inputs, constants)
            return self._python.results(bound.graph, outputs)

        with renumbered_forward_hooks(self._state.modules_with_added_hooks):
            result = self._python.run(bound.graph.python, program, call)
        self._state.forget_removed_hooks()
        return result, bound.graph, outputs

    def _run_program(
        self,
        bound: BoundProgram,
        inputs: list[Any],
        constants: Mapping[str, Tensor] | None = None,
    ) -> tuple[list[Any], Any]:
        """Run a program on the inputs of a call.

        Args:
            bound: the program, with the module tensors that it reads and updates.
            inputs: leaves of the call as plain tensors on this rank's device.
            constants: current values of the graph's constants, by name.

        Returns:
            The outputs of the graph, and the result of the model.
        """
        is_distributed = self.devices.matrix.num_devices > 1
        parameters, buffers = bound.tensors.read()
        buffers |= self._python.on_device(constants or {})
        # Before the program runs: the checks compare parameter versions with those of this moment.
        checks = self._parameters_as_planned.checks_before_backward(bound.recomputes)
        shards = local_shards(parameters, self.devices.matrix)
        # Evaluation does not count: how often a run evaluates must not change its dropout masks.
        if self.module.training:
            self.random_step += 1
        seed = self.random_seed + self.random_step
        with self._guard.explaining_errors(), self._caller_autocast.disabled():
            outputs, updates = bound.program(shards, buffers, inputs, seed)
        if is_distributed:
            before_backward(outputs, [*checks, self._guard.check_step])
        if not torch.is_grad_enabled():
            # No backward pass of an evaluation will check the call.
            self._guard.check_step()
        # After the program: its operators have read the old values.
        names = (buffer.name for buffer, _ in bound.graph.updates)
        bound.tensors.write(dict(zip(names, updates, strict=True)))
        name = type(self.module).__name__
        returned = bound.wrap_outputs(outputs, name, self._watch_gradient)
        result = bound.graph.result(returned)
        bound.off_path.watch(returned, result)
        return returned, result

    @property
    def _contains_root_hooks(self) -> bool:
        return any(forward_hooks(self.captured_hooks))

    def train_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Run forward and backward over all micro-batches, and accumulate gradients.

        Returns:
            The loss of the global batch, on every rank.

        Raises:
            PlanError: if gradients are disabled, the model returns no loss or several, an argument
                does not match the plan, the batch cannot be split as planned, or the model itself
                has a forward hook that no program contains.
        """
        # Programs would compute a loss without gradients, and the optimizer would change nothing.
        if not torch.is_grad_enabled():
            raise PlanError(
                "`train_step` runs a backward pass, which has no gradients under `torch.no_grad()`"
                " and `torch.inference_mode()`\n"
                "call it outside of such a region; to evaluate, call the model"
            )
        self.forget_removed_hooks()
        if any(forward_hooks(self.module)):
            raise PlanError(
                "`train_step` does not call the forward hooks of the model itself\n"
                "call the model and then `loss.backward()`, or register the hook on a submodule"
            )
        python = self.partitioned.graph.python
        depends_on_calls = python is not None and python.depends_on_calls
        self._reachable.update()
        # The program of a later Python state may change objects.
        self._state.key()
        changes_python = (
            depends_on_calls or self._state.modules_with_added_hooks or self._reachable.version
        )
        if changes_python and not self._has_micro_batches_or_stages:
            return self._train_with_python_side_effects(args, kwargs)
        step_call = self._get_or_capture_step(args, kwargs)
        graph, python = step_call.bound.step.partitioned.graph, step_call.bound.python
        # Before anything runs: a model without a loss, or with several, cannot be trained by a
        # step.
        loss = loss_of(graph)
        self.random_step += 1
        if python is None or not python.depends_on_calls:
            return self._run_step(step_call, {}).loss
        names = [leaf.name if isinstance(leaf, Value) else "" for leaf in graph.outputs]
        stored, losses = frozenset(names[index] for index in python.stored), list[Tensor]()

        def program(constants: Mapping[str, Tensor]) -> ProgramResults:
            results = self._run_step(step_call, constants, stored)
            losses.append(results.loss)
            outputs = self._assemble_outputs(step_call.bound.step, results.outputs, stored)
            outputs.setdefault(loss.name, results.loss)
            missing = Unavailable("a training step with micro-batches returns the loss only")
            leaves = [
                outputs.get(leaf.name, missing) if isinstance(leaf, Value) else leaf
                for leaf in graph.outputs
            ]
            return self._python.results(graph, leaves)

        with renumbered_forward_hooks(self._state.modules_with_added_hooks):
            self._python.run(python, program, step_call.call)
        self._state.forget_removed_hooks()
        return losses[0]

    def _run_step(
        self,
        step_call: StepCall,
        constants: Mapping[str, Tensor],
        outputs: frozenset[str] = frozenset(),
    ) -> StepResults:
        """Run a training step, and accumulate its gradients in the parameters.

        Args:
            step_call: the step and its inputs.
            constants: current values of the graph's constants, by name.
            outputs: names of the outputs to collect.
        """
        bound = step_call.bound
        parameters, buffers = bound.tensors.read()
        # Detached shards: a step runs its own backward passes and adds the gradients once, without
        # DTensor's autograd functions in between.
        shards = stored_shards(parameters)
        inputs = self._make_step_inputs(step_call, shards, buffers, constants, outputs)
        with (
            self._guard.explaining_errors(),
            self._caller_autocast.disabled(),
            # The captured Python code may run in a region without gradients.
            torch.enable_grad(),
        ):
            results = bound.step.train(inputs)
        self._guard.check_step()
        add_gradients(parameters, results.gradients)
        bound.tensors.write(results.buffers)
        return results

    def _make_step_inputs(
        self,
        step_call: StepCall,
        shards: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        constants: Mapping[str, Tensor],
        outputs: frozenset[str],
    ) -> StepInputs:
        buffers = {**buffers, **self._python.on_device(constants)}
        seed = self.random_seed + self.random_step
        return StepInputs(shards, buffers, step_call.leaves, seed, step_call.dims, outputs)

    def _assemble_outputs(
        self, step: TrainStep, local_outputs: Mapping[str, list[Tensor]], names: frozenset[str]
    ) -> dict[str, Any]:
        """Return the outputs of a step with these names for the global batch, or for the local
        batch of this rank. Collective."""
        partitioned = step.partitioned
        outputs = StepOutputs(partitioned, self.devices, self._make_program_devices(partitioned))
        # In the order of the graph, as all ranks must issue collectives in one order.
        values = {leaf.name: leaf for leaf in partitioned.graph.output_values if leaf.name in names}
        return {name: outputs.assemble(leaf, local_outputs) for name, leaf in values.items()}

    def _train_with_python_side_effects(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Tensor:
        """Run forward and backward over one batch, without micro-batches, for a model whose Python
        code changes objects.

        Returns:
            The loss of the global batch, on every rank.

        Raises:
            PlanError: if the model returns no loss or several, or an argument does not match the
                plan.
        """
        with torch.enable_grad():
            _, graph, outputs = self.call(args, kwargs)
            loss: Tensor = outputs[graph.outputs.index(loss_of(graph))]
            loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the global gradient norm to `max_norm`.

        Returns:
            The norm before clipping, on every rank.
        """
        return clip_grad_norm_(self.module.named_parameters(), max_norm, self.devices)

    def compile(self, args: tuple[Any, ...], kwargs: dict[str, Any], regional: bool) -> None:
        """Compile all programs with `torch.compile`, including programs of later captures.

        Args:
            args, kwargs: arguments of `torch.compile`.
            regional: whether to compile only the repeated blocks of a program, each once.
        """
        self._compiler = lambda program: program.compiled(
            lambda function: torch.compile(function, *args, **kwargs), regional
        )
        self._forwards = {
            key: self._compile_program(bound) for key, bound in self._forwards.items()
        }
        # Steps replace their programs in place; bound programs are immutable, and replaced above.
        for bound in self._train_steps.values():
            bound.step.compile(self._compiler)

    def complete_initialization(self) -> None:
        """Initialize parameters that were planned on the meta device. Collective.

        Returns at once if all parameters are initialized.

        Raises:
            PlanError: if a parameter or buffer that the program reads is uninitialized.
        """
        if self.initialization is None:
            return
        graph = self.partitioned.graph
        # Tensors that no operator reads may stay uninitialized.
        used = {value.name for value in (*graph.parameters, *graph.module_buffers)}
        self.initialization.check_initialized(self.module, used)
        self.initialization.replay_record(self.module)
        self.initialization.end(self.module)
        self.initialization = None
        self._bind_programs_to_tensors()  # `to_empty` may have replaced parameters and buffers.

    def for_copy(self, module: nn.Module, memo: dict[int, Any]) -> Execution:
        """Return the execution of `module`, a deep copy of this execution's module. Not collective.

        Both executions share their programs; tensors, guards and state are separate.

        Args:
            module: the copy.
            memo: the memo of the `deepcopy` that made `module`.
        """
        result, graph = copy.copy(self), self.partitioned.graph
        # A shallow copy: programs, plan and process groups are shared.
        result.module, result.original = module, None
        result.template, result.captured_hooks = copy.deepcopy(
            (self.template, self.captured_hooks), memo
        )
        if self.initialization is not None:
            result.initialization = self.initialization.of_copy()
        result._guard = BatchGuard(self.devices, graph, self.partitioned.decisions.arrivals)
        result._state = self._state.of_copy(
            module, result.captured_hooks if graph.python is None else module
        )
        result._python = self._python.of_copy(module, result.template)
        user_module = alias_module(module, type(self._user_module))
        result._reachable = self._reachable.of_copy(user_module, module)
        result._filled = dict(self._filled)
        result._bind_programs_to_tensors()
        return result

    def _bind_programs_to_tensors(self) -> None:
        """Bind all programs to the current parameters and buffers of the module."""
        module = self.module
        # Parameters of the copy or after `to_empty` are other objects, with other storages.
        self._parameters_as_planned = PlannedParameters(module, self.partitioned.graph.frozen)
        self._forwards = {
            key: replace(b, tensors=self._collect_graph_tensors(b.graph))
            for key, b in self._forwards.items()
        }
        self._train_steps = {
            key: replace(b, tensors=self._collect_step_tensors(b.step.partitioned))
            for key, b in self._train_steps.items()
        }

    def forget_removed_hooks(self) -> None:
        """Drop captured forward hooks that the user has removed by their handles."""
        self._state.forget_removed_hooks()

    def _cache_planned_program(self) -> None:
        """Lower the program for the planned mode, state and input shapes, before the first call."""
        self._forwards[self._planned_program] = self._bind_program(self.partitioned)

    def _bind_program(self, partitioned: Partitioned) -> BoundProgram:
        graph, (chunk,) = partitioned.graph, partitioned.chunks
        tensors = self._collect_graph_tensors(graph)
        recomputes = bool(partitioned.decisions.recompute)
        devices = self._make_program_devices(partitioned)
        current = graph.python.current if graph.python is not None else frozenset()
        draws, program = bool(random_operators(graph)), lower(chunk, devices, current=current)
        # The gradients of local outputs are scaled, so the returned tensor is not the one from
        # which other outputs are computed.
        local = partitioned.local_outputs
        off_path = OutputsOffPath(graph, program.communication, all_off_path=bool(local))
        counts = {name: partitioned.mesh.size(chain(*axes)) for name, axes in local.items()}
        return BoundProgram(graph, program, tensors, recomputes, draws, devices, off_path, counts)

    def _collect_graph_tensors(self, graph: Graph) -> ModuleTensors:
        return ModuleTensors.of(self.module, graph.parameters, graph.module_buffers)

    def _compile_program(self, bound: BoundProgram) -> BoundProgram:
        if self._compiler is None:
            return bound
        program = self._compiler(bound.program)
        # A compiled program is one autograd node, which computes all outputs.
        off_path = OutputsOffPath(bound.graph, program.communication, all_off_path=True)
        return replace(bound, program=program, off_path=off_path)

    def _get_or_capture_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepCall:
        """Return the training step for a call, with the call's inputs."""
        self.complete_initialization()
        call = self._planned_call.reorder_arguments(args, kwargs)
        leaves, spec = full_leaves(call)
        planned_indices = self._planned_call.planned_indices(spec)
        dims = self._leaves.sample_dims(planned_indices)
        micro_batches = num_micro_batches_of_call(leaves, self.partitioned.pipeline, dims)
        micro_batch_leaves = self._leaves.with_global_shapes(
            micro_batch(leaves, 0, micro_batches, dims), planned_indices
        )
        # A step runs the program of one micro-batch; the number of micro-batches is part of the key
        # because the schedule depends on it.
        specialization = self._make_specialization_key(
            spec, [argument_key(leaf) for leaf in micro_batch_leaves]
        )
        key = (*specialization, micro_batches)
        inputs = self._leaves.on_device(leaves, planned_indices)
        self._guard.begin(key, inputs, planned_indices)
        # The guards and the captured Python expect the ordinary tensors of the capture.
        call = pytree.tree_unflatten(leaves, spec) if has_dtensors(call) else call
        key = self._python.matching_program_key(self._train_steps, self._reachable.key(key), call)
        if key not in self._train_steps:
            partitioned = self.partitioned
            # The graph of the plan serves only for its own number of micro-batches, which its
            # operators may contain.
            is_planned = key == (*self._planned_specialization, micro_batches)
            is_planned &= micro_batches == partitioned.pipeline.micro_batches
            if not (is_planned and self._python.guards_hold(partitioned.graph.python, call)):
                of_args, of_kwargs = pytree.tree_unflatten(micro_batch_leaves, spec)
                partitioned = self._capture_specialization(of_args, of_kwargs, micro_batches, dims)
            self._evict_least_recently_used(self._train_steps)
            self._train_steps[key] = self._bind_train_step(partitioned)
        bound = _touch_cache_entry(self._train_steps, key)
        check_filled(bound.step.partitioned.graph.filled, self._filled)
        return StepCall(bound, inputs, dims, call)

    def _bind_train_step(self, partitioned: Partitioned) -> BoundStep:
        step = self._make_train_step(partitioned)
        if self._compiler is not None:
            step.compile(self._compiler)
        return BoundStep(step, self._collect_step_tensors(partitioned))

    def _collect_step_tensors(self, partitioned: Partitioned) -> ModuleTensors:
        return ModuleTensors.of(self.module, *partitioned.tensors_of(self.devices.stage))

    def _make_train_step(self, partitioned: Partitioned) -> TrainStep:
        return GradientAccumulation(partitioned, self._make_program_devices(partitioned))

    def _make_program_devices(self, partitioned: Partitioned) -> Devices:
        return self.devices.with_matrix(partitioned.mesh, dtensor_axes(partitioned))

    def _evict_least_recently_used(self, cache: dict[tuple[Any, ...], Any]) -> None:
        """Make room for one entry in `cache`; programs of the planned specialization stay."""
        planned = self._planned_specialization
        # Step keys extend the planned specialization by the number of micro-batches.
        other_keys = [
            key for key in cache if key != self._planned_program and key[: len(planned)] != planned
        ]
        # One entry is about to be added, hence `+ 1`.
        for key in other_keys[: max(0, len(cache) + 1 - MAX_CACHED_PROGRAMS)]:
            del cache[key]


def _touch_cache_entry(cache: dict[tuple[Any, ...], Bound], key: tuple[Any, ...]) -> Bound:
    """Move the entry of `key` to the end of `cache`, and return it."""
    # Dictionaries keep the order of insertion.
    cache[key] = cache.pop(key)
    return cache[key]
