"""Execute calls and training steps of a planned model on this rank."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwright.core.capture.filled_state import check_filled
from shardwright.core.graph.graph import Value
from shardwright.core.parallel.bound_program import BoundStep
from shardwright.core.parallel.call import Call, argument_key
from shardwright.core.parallel.call_leaves import full_leaves, has_dtensors
from shardwright.core.parallel.model_calls import ModelCalls, touch_cache_entry
from shardwright.core.parallel.module_tensors import ModuleTensors
from shardwright.core.parallel.python_calls import ProgramResults
from shardwright.core.parallel.stages_of_tensors import Stages, stages_of_tensors
from shardwright.core.parallel.step_outputs import StepOutputs
from shardwright.core.parallel.train_step import (
    GradientAccumulation,
    StepInputs,
    StepResults,
    TrainStep,
    loss_of,
)
from shardwright.core.parallel.unavailable import Unavailable
from shardwright.core.partition.partitioned import Partitioned
from shardwright.core.runtime.clip_grad import clip_grad_norm_
from shardwright.core.runtime.dtensor import add_gradients, stored_shards
from shardwright.core.runtime.micro_batches import (
    SampleDims,
    micro_batch,
    num_micro_batches_of_call,
)
from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.hooks import (
    forward_hooks,
    renumbered_forward_hooks,
)
from shardwright.core.torch_internals.modules import alias_module
from shardwright.errors import PlanError


class StepCall(NamedTuple):
    """The training step for a call, with the arguments of the call.

    Args:
        bound: the step.
        leaves: leaves of the call's arguments, on this rank's device.
        dims: batch dimension of each leaf; empty if all of them are 0.
        call: the arguments as the user passed them, for captured Python code.
    """

    bound: BoundStep
    leaves: list[Any]
    dims: SampleDims
    call: Call


class Execution(ModelCalls):
    """Runs the calls and training steps of a planned model; see `ModelCalls`."""

    @cached_property
    def stages_of_tensors(self) -> dict[str, Stages]:
        """Indices of the pipeline stages that store each parameter and buffer, by name."""
        return stages_of_tensors(self.template, self.partitioned)

    def train_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Run forward and backward over all micro-batches, and accumulate gradients.

        Returns:
            The loss of the global batch, on every rank.

        Raises:
            PlanError: if gradients are disabled, the model returns no loss or several, an argument
                does not match the plan, the batch cannot be split as planned, or the root module
                has a forward hook outside of the program, which a step would not call.
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
            results = self._run_step(step_call, {})
            self._add_gradients(step_call, results)
            return results.loss
        names = [leaf.name if isinstance(leaf, Value) else "" for leaf in graph.outputs]
        stored, steps = frozenset(names[index] for index in python.stored), list[StepResults]()

        def program(constants: Mapping[str, Tensor]) -> ProgramResults:
            results = self._run_step(step_call, constants, stored)
            steps.append(results)
            outputs = self._assemble_outputs(step_call.bound.step, results.outputs, stored)
            outputs.setdefault(loss.name, results.loss)
            missing = Unavailable(
                PlanError(
                    "a training step with micro-batches returns the loss only\n"
                    "store the value in an attribute in `forward`, or call the model"
                )
            )
            leaves = [
                outputs.get(leaf.name, missing) if isinstance(leaf, Value) else leaf
                for leaf in graph.outputs
            ]
            return self._python.results(graph, leaves)

        with renumbered_forward_hooks(self._state.modules_with_added_hooks):
            self._python.run(python, program, step_call.call)
        self._state.forget_removed_hooks()
        # After the Python code, which may have registered hooks on parameters.
        self._add_gradients(step_call, steps[0])
        return steps[0].loss

    def _run_step(
        self,
        step_call: StepCall,
        constants: Mapping[str, Tensor],
        outputs: frozenset[str] = frozenset(),
    ) -> StepResults:
        """Run a training step, without adding its gradients to those of the parameters.

        Args:
            step_call: the step, with the arguments of the call.
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
        bound.tensors.write(results.buffers)
        return results

    def _add_gradients(self, step_call: StepCall, results: StepResults) -> None:
        """Accumulate the gradients of a training step in the parameters."""
        add_gradients(step_call.bound.tensors.parameters, results.gradients)

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
        """Assemble the outputs `names` of a step from those of its micro-batches. Collective.

        They have the samples of the global batch or, if ranks pass local batches, of this rank's.
        """
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
        result._guard = self._make_batch_guard()
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
        super()._bind_programs_to_tensors()
        self._train_steps = {
            key: replace(b, tensors=self._collect_step_tensors(b.step.partitioned))
            for key, b in self._train_steps.items()
        }

    def forget_removed_hooks(self) -> None:
        """Drop captured forward hooks whose handles the user has removed."""
        self._state.forget_removed_hooks()

    def _get_or_capture_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StepCall:
        """Return the training step for a call, captured if necessary, with the arguments of the
        call."""
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
        self._guard.begin(
            key, inputs, planned_indices, self._has_gradients, self.module.parameters()
        )
        # The guards and the captured Python expect the ordinary tensors of the capture.
        call = pytree.tree_unflatten(leaves, spec) if has_dtensors(call) else call
        key = self._step_key(spec, micro_batch_leaves, micro_batches, call)
        if key not in self._train_steps:
            partitioned = self.partitioned
            # The graph of the plan serves only for its own number of micro-batches, which its
            # operators may contain.
            is_planned = key == (*self._planned_specialization, micro_batches)
            is_planned &= micro_batches == partitioned.pipeline.micro_batches
            if not (is_planned and self._python.guards_hold(partitioned.graph.python, call)):
                of_args, of_kwargs = pytree.tree_unflatten(micro_batch_leaves, spec)
                partitioned = self._capture_specialization(of_args, of_kwargs, micro_batches, dims)
                # The capture may have found out that numbers vary, which are in no key then.
                key = self._step_key(
                    spec, micro_batch_leaves, micro_batches, call, is_captured=True
                )
            self._evict_least_recently_used(self._train_steps)
            self._train_steps[key] = self._bind_train_step(partitioned)
        bound = touch_cache_entry(self._train_steps, key)
        check_filled(bound.step.partitioned.graph.filled, self._filled)
        return StepCall(bound, inputs, dims, call)

    def _step_key(
        self,
        spec: pytree.TreeSpec,
        leaves: Sequence[Any],
        micro_batches: int,
        call: Call,
        is_captured: bool = False,
    ) -> tuple[Any, ...]:
        """Return the key of the training step for a call, or the key for a new one.

        Args:
            spec: the structure of the call's arguments.
            leaves: the leaves of the arguments of a micro-batch, with global shapes.
            is_captured: whether the new step has just been captured.
        """
        keys = list(map(argument_key, leaves))
        key = (*self._make_specialization_key(spec, keys), micro_batches)
        return self._python.matching_program_key(
            self._train_steps, self._reachable.key(key), call, is_captured=is_captured
        )

    def _bind_train_step(self, partitioned: Partitioned) -> BoundStep:
        step = self._make_train_step(partitioned)
        if self._compiler is not None:
            step.compile(self._compiler)
        return BoundStep(step, self._collect_step_tensors(partitioned))

    def _collect_step_tensors(self, partitioned: Partitioned) -> ModuleTensors:
        return ModuleTensors.of(self.module, *partitioned.tensors_of(self.devices.stage))

    def _make_train_step(self, partitioned: Partitioned) -> TrainStep:
        return GradientAccumulation(partitioned, self._make_program_devices(partitioned))
