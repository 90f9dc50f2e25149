"""Run calls of a planned model on this rank.

A program is valid for one *specialization*: the Python state that `forward` reads, the training
mode, which parameters are trained, the autocast dtype, and the shapes, dtypes and structure of the
arguments. Each specialization is captured on its first call and its program cached.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shardwright.core.capture.filled_state import check_filled
from shardwright.core.graph.graph import Graph
from shardwright.core.graph.python_call import ONCE_PER_BATCH
from shardwright.core.lower.emit_program import lower
from shardwright.core.lower.program import Program
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
from shardwright.core.parallel.uninitialized import Initialization
from shardwright.core.partition.fold_axes import dtensor_axes
from shardwright.core.partition.partitioned import Partitioned, random_operators
from shardwright.core.runtime.devices import Devices
from shardwright.core.runtime.dtensor import local_shards
from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.hooks import (
    HooksOfModules,
    forward_hooks,
    renumbered_forward_hooks,
)
from shardwright.errors import PlanError

log = logging.getLogger(__name__)

MAX_CACHED_PROGRAMS = 64
"""Maximum number of cached programs, and of cached training steps; then the least recently used one
is evicted.

Most runs need few; without a limit, a run with many sequence lengths would cache a program for each
of them.
"""

Bound = TypeVar("Bound")


class ModelCalls(Recapture):
    """Calls of a planned model on the devices of the running process group.

    A call in another mode (`eval()`), or with other arguments or shapes than planned, captures the
    model again, with the plan's sharding as far as it divides the shapes.

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
        depends_on_calls = graph.python is not None and graph.python.depends_on_calls
        if depends_on_calls and partitioned.pipeline.sums_micro_batches:
            raise PlanError(ONCE_PER_BATCH)
        self.captured_hooks = nn.Module()
        """Owner of the root module's forward hooks, and of a `forward` set on its instance, while
        programs contain them: on the root module they would run twice.

        If TorchDynamo captured the model, hooks stay on the root module and run around the program.
        """
        # Rank 0's seed on all ranks, so that ranks with equal shards draw equal random numbers.
        self.random_seed = devices.common_seed()
        self.random_step = 0
        self.initialization: Initialization | None = None
        """Pending initialization of parameters on the meta device; None once all are
        initialized."""
        self._compiler: Callable[[Program], Program] | None = None
        self._forwards: dict[tuple[Any, ...], BoundProgram] = {}
        self._train_steps: dict[tuple[Any, ...], BoundStep] = {}
        self._guard = self._make_batch_guard()
        gradient_guard = GradientGuard.of(
            devices, has_local_batches=bool(partitioned.decisions.arrivals)
        )
        self._watch_gradient: WatchGradient | None = (
            gradient_guard.watch if gradient_guard is not None else None
        )
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

    def _make_batch_guard(self) -> BatchGuard:
        partitioned = self.partitioned
        return BatchGuard(
            self.devices,
            partitioned.graph,
            partitioned.decisions.arrivals,
            partitioned.pipeline.micro_batches,
        )

    @property
    def programs(self) -> tuple[Program, ...]:
        """This rank's programs for the mode and shapes of the plan; `print` shows their code."""
        return (self._forwards[self._planned_program].program,)

    @property
    def _has_gradients(self) -> bool:
        """Whether gradients are left from earlier backward passes, to which the next one adds.

        False with pipeline stages, whose ranks train different parameters.
        """
        if self.partitioned.pipeline.stages > 1:
            return False
        # One parameter stands for all, as `zero_grad` clears all gradients.
        parameter = next((p for p in self.module.parameters() if p.requires_grad), None)
        return parameter is not None and parameter.grad is not None

    def forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call and return the model's result.

        Raises:
            PlanError: if called under a `torch.func` transform, or in a backward pass although the
                model draws random numbers.
            CaptureError: if the model cannot be captured for this call.
        """
        return self.call(args, kwargs)[0]

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Graph, list[Any]]:
        """Run a call of the model, and return what the caller needs besides its result.

        Returns:
            (the model's result, the graph that ran, the outputs of the graph).

        Raises:
            PlanError: if called under a `torch.func` transform, or in a backward pass although the
                model draws random numbers.
            CaptureError: if the model cannot be captured for this call.
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
        self._guard.begin(
            call_key, inputs, planned_indices, self._has_gradients, self.module.parameters()
        )
        # The guards and the captured Python expect the ordinary tensors of the capture.
        call = pytree.tree_unflatten(leaves, spec) if has_dtensors(call) else call
        self._reachable.update()
        key = self._forward_key(spec, global_leaves, call)
        if key not in self._forwards:
            # Tensors made in inference mode cannot be saved for backward, and a later call may
            # train this program.
            gradients = torch.is_grad_enabled()
            with torch.inference_mode(False), torch.set_grad_enabled(gradients):
                captured = self._capture_specialization(*pytree.tree_unflatten(global_leaves, spec))
                # The capture may have found out that numbers vary, which are in no key then.
                key = self._forward_key(spec, global_leaves, call, is_captured=True)
                # After the capture, so that a capture that fails evicts no program.
                self._evict_least_recently_used(self._forwards)
                self._forwards[key] = self._compile_program(self._bind_program(captured))
        bound = touch_cache_entry(self._forwards, key)
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

    def _forward_key(
        self, spec: pytree.TreeSpec, leaves: Sequence[Any], call: Call, is_captured: bool = False
    ) -> tuple[Any, ...]:
        """Return the key of the program for a call, or the key for a new program.

        Args:
            spec: the structure of the call's arguments.
            leaves: the leaves of the arguments, with global shapes.
            is_captured: whether the new program has just been captured.
        """
        specialization = self._make_specialization_key(spec, list(map(argument_key, leaves)))
        state_key = self._reachable.key(specialization)
        with renumbered_forward_hooks(self._state.modules_with_added_hooks):
            return self._python.matching_program_key(
                self._forwards, state_key, call, is_captured=is_captured
            )

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

    def _bind_programs_to_tensors(self) -> None:
        """Bind all programs to the current parameters and buffers of the module."""
        module = self.module
        # Parameters of the copy or after `to_empty` are other objects, with other storages.
        self._parameters_as_planned = PlannedParameters(module, self.partitioned.graph.frozen)
        self._forwards = {
            key: replace(b, tensors=self._collect_graph_tensors(b.graph))
            for key, b in self._forwards.items()
        }

    def _cache_planned_program(self) -> None:
        """Lower the program for the planned mode, state and input shapes, before the first call."""
        self._forwards[self._planned_program] = self._bind_program(self.partitioned)

    def _bind_program(self, partitioned: Partitioned) -> BoundProgram:
        graph, (chunk,) = partitioned.graph, partitioned.chunks
        tensors = self._collect_graph_tensors(graph)
        recomputes = bool(partitioned.decisions.recompute)
        devices = self._make_program_devices(partitioned)
        current = graph.python.current if graph.python is not None else frozenset()
        draws, program = bool(random_operators(graph)), lower(chunk, devices, python_state=current)
        # The gradients of local outputs are scaled, so the returned tensor is not the one from
        # which other outputs are computed.
        local = partitioned.local_outputs
        off_path = OutputsOffPath(graph, program.communication, all_off_path=bool(local))
        counts = {name: partitioned.mesh.size(chain(*axes)) for name, axes in local.items()}
        return BoundProgram(
            *(graph, program, tensors, recomputes, draws, devices, off_path, counts),
            partitioned.outputs_without_samples,
        )

    def _collect_graph_tensors(self, graph: Graph) -> ModuleTensors:
        return ModuleTensors.of(self.module, graph.parameters, graph.module_buffers)

    def _compile_program(self, bound: BoundProgram) -> BoundProgram:
        if self._compiler is None:
            return bound
        program = self._compiler(bound.program)
        # A compiled program is one autograd node, which computes all outputs.
        off_path = OutputsOffPath(bound.graph, program.communication, all_off_path=True)
        return replace(bound, program=program, off_path=off_path)

    def _make_program_devices(self, partitioned: Partitioned) -> Devices:
        return self.devices.with_matrix(partitioned.mesh, dtensor_axes(partitioned))

    def _evict_least_recently_used(self, cache: dict[tuple[Any, ...], Any]) -> None:
        """Evict the least recently used entry from a full `cache`; programs of the plan stay."""
        planned = self._planned_specialization
        # Step keys extend the planned specialization by the number of micro-batches.
        other_keys = [
            key for key in cache if key != self._planned_program and key[: len(planned)] != planned
        ]
        # One entry is about to be added, hence `+ 1`.
        for key in other_keys[: max(0, len(cache) + 1 - MAX_CACHED_PROGRAMS)]:
            del cache[key]


def touch_cache_entry(cache: dict[tuple[Any, ...], Bound], key: tuple[Any, ...]) -> Bound:
    """Mark the entry of `key` as most recently used, the last in `cache`, and return it."""
    # Dictionaries keep the order of insertion.
    cache[key] = cache.pop(key)
    return cache[key]
