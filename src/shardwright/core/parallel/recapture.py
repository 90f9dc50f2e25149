"""Capture a planned model again, for calls that differ from the planned call, with the plan's
decisions."""

from __future__ import annotations

import logging
from collections.abc import Collection, Hashable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shardwright.core.capture.attributes import NUMBERS, SET
from shardwright.core.capture.autocast import Autocast
from shardwright.core.capture.build_graph import CapturedCall
from shardwright.core.capture.shapes import Captures
from shardwright.core.graph.graph import Graph
from shardwright.core.graph.local_map import bind_modules
from shardwright.core.micro_batches.whole_batch import with_whole_batch
from shardwright.core.misuse.calls_of_parts import leave_calls_of_parts
from shardwright.core.misuse.original import OriginalModel
from shardwright.core.misuse.planned_parameters import PlannedParameters
from shardwright.core.parallel.call import PlannedCall, argument_key
from shardwright.core.parallel.python_calls import PythonCalls
from shardwright.core.parallel.python_state import PythonState
from shardwright.core.parallel.reachable_python import ReachablePython
from shardwright.core.parallel.repeated_captures import RepeatedCaptures
from shardwright.core.parallel.stages_of_tensors import leave_tensors_of_other_stages
from shardwright.core.parallel.train_step import check_loss_of_batch
from shardwright.core.partition.decisions import adapt_decisions
from shardwright.core.partition.fold_axes import fold_axes, split_axes
from shardwright.core.partition.partitioned import Partitioned
from shardwright.core.partition.pipeline_spec import PipelineSpec
from shardwright.core.runtime.devices import Devices
from shardwright.core.runtime.micro_batches import SampleDims, empty_full_batch
from shardwright.core.torch_internals import pytree
from shardwright.core.torch_internals.hooks import (
    HooksOfModules,
    renumbered_forward_hooks,
    without_saved_tensor_hooks,
)
from shardwright.core.torch_internals.modules import alias_module
from shardwright.errors import CaptureError, PlanError

log = logging.getLogger(__name__)


class Recapture:
    """A planned model that can be captured again for other calls than planned.

    Args:
        module: the model, with parameters stored as planned.
        template: a copy of `module` on the meta device, which is captured.
        partitioned: the partitioned graph for the mode and shapes of the plan.
        devices: this rank's view of the devices.
        hooks: forward hooks of the user's model, to which the user's handles refer.
    """

    original: OriginalModel | None = None
    """The user's model if `module` is a copy of it (`copy=True`), else None."""
    class_names: frozenset[str] = frozenset()
    """Names that the class of the planned model defines in addition to the user's class."""

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
        # `module` will be of a class derived from the user's: guards and local maps need the
        # user's.
        self._user_module = alias_module(module)
        self._python = PythonCalls(self._user_module, module, template, devices.device)
        self.partitioned = self._bind_local_maps(partitioned)
        graph = self.partitioned.graph
        self._parameters_as_planned = PlannedParameters(module, graph.frozen)
        stored = self._attributes_set_by_forward
        watched = [entry for entry in graph.attributes if entry not in stored]
        self._state = PythonState(module, watched, hooks)
        self._reachable = ReachablePython(self._user_module, module)
        if stored:
            # The plan's program stores no attributes, so that micro-batches could run it. The first
            # call captures a program that does.
            self._reachable.version += 1
        # The guards of the plan's Python cover all state that its call has read.
        self._reachable.is_guarded = graph.python is not None
        self._planned_call = PlannedCall(template.forward, graph)
        # As `_make_module_state_key`: no parameter frozen since planning, no autocast region.
        self._planned_state = self._state.key(), (), (None, torch.get_default_dtype())
        self._captures = Captures(graph, (self._planned_state, 0))
        self._repeated_captures = RepeatedCaptures()
        # Numbers that are not in the keys of programs, as guards compare them or they are inputs.
        self._varying_numbers: frozenset[str] = frozenset()
        # Those that stay in the keys, as they cannot be inputs.
        self._constant_numbers: frozenset[str] = frozenset()
        self._can_vary_numbers, self._requires_guards = not self._excludes_guards, False
        self._filled: dict[str, str] = {}

    @property
    def _has_micro_batches_or_stages(self) -> bool:
        """Whether a training step has several micro-batches or pipeline stages."""
        pipeline = self.partitioned.pipeline
        return pipeline.micro_batches * pipeline.stages > 1

    @property
    def _attributes_set_by_forward(self) -> Collection[tuple[str, str, str]]:
        """Entries of `Graph.attributes` that `forward` sets, if captures may have guards; else
        empty.

        Only captures with guards set attributes in each call.
        """
        if self._excludes_guards:
            return ()
        return [entry for entry in self.partitioned.graph.attributes if entry[2] == SET]

    def _move_attributes_to_user_class(self) -> None:
        """Move class attributes set on the planned model, as by `type(net).x = 1`, to the user's
        class."""
        planned, user_class = type(self.module), type(self._user_module)
        names = vars(planned).keys() - self.class_names
        for name in (name for name in names if not name.startswith(("__", "_abc_"))):
            setattr(user_class, name, vars(planned)[name])
            delattr(planned, name)

    def _make_specialization_key(self, spec: pytree.TreeSpec, leaves: list[Any]) -> tuple[Any, ...]:
        """Return the cache key of the program for a call.

        Args:
            spec: the structure of the call's arguments.
            leaves: keys of the arguments' leaves (`argument_key`).

        Raises:
            PlanError: if a parameter, hook or submodule was replaced after planning.
        """
        if self.original is not None:
            self.original.check(self.module)
        # A class attribute was set on the planned model: `net.__class__.x = 1`.
        if len(vars(type(self.module))) != len(self.class_names):
            self._move_attributes_to_user_class()
        if self._varying_numbers:
            names = self._planned_call.leaf_names(spec)
            # A tensor under the name of a number keeps its whole key.
            leaves = [
                key[:1] if name in self._varying_numbers and key[0] in NUMBERS else key
                for name, key in zip(names, leaves, strict=True)
            ]
        return *self._make_module_state_key(), spec, tuple(leaves)

    def _make_module_state_key(self) -> tuple[Hashable, Hashable, Hashable]:
        """Return the part of a program's cache key that does not depend on arguments.

        Returns:
            (Python state, parameters frozen or unfrozen since planning, (autocast, default dtype)).
        """
        frozen = self._parameters_as_planned.frozen_or_unfrozen()
        return (
            self._state.key(),
            frozen,
            (self._caller_autocast.dtype, torch.get_default_dtype()),
        )

    @property
    def _caller_autocast(self) -> Autocast:
        """Autocast region of the caller; programs run outside it, with its casts as operators."""
        return Autocast.around(self.devices.device)

    def _capture_specialization(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        micro_batches: int = 1,
        batch_dims: SampleDims = (),
    ) -> Partitioned:
        """Capture the model for a call that differs from the planned call, with the plan's
        decisions.

        Args:
            args, kwargs: arguments of the call, for one micro-batch.
            micro_batches: number of micro-batches of the batch.
            batch_dims: batch dimension of each leaf of the arguments; empty for dimension 0.

        Raises:
            PlanError: if a tensor has another dtype than planned.
            CaptureError: if the model cannot be captured for this call.
            MixedSamplesError: if the loss of the batch is neither a sum nor a mean over its
                micro-batches.
        """
        planned, template = self.partitioned, self.template
        call = CapturedCall.of(template, args, kwargs, self._caller_autocast, self.module)
        # Before the capture, which takes long.
        self._planned_call.check(args, kwargs)
        # The template still has the state of planning time.
        self._state.copy_to(template)
        # `requires_grad` decides which values need gradients, so the template must agree.
        for name, parameter, *_ in self._parameters_as_planned.all:
            template.get_parameter(name).requires_grad_(parameter.requires_grad)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        numbers = self._planned_call.numbers(args, kwargs)
        shapes = tuple(argument_key(leaf) for leaf in leaves if type(leaf) not in NUMBERS)
        varying = self._repeated_captures.record(
            (spec, shapes, self.module.training, torch.is_grad_enabled()),
            {**numbers, **self._state.numbers()},
            self._varying_numbers,
            self._constant_numbers,
        )
        varying = [name for name in varying if name not in self._constant_numbers]
        if varying and self._can_vary_numbers:
            self._vary_numbers(varying)

        # Only a comparison with the graph of a larger batch shows which constants depend on its
        # size.
        def captured(count: int) -> Graph:
            batch = pytree.tree_unflatten(empty_full_batch(leaves, count, batch_dims), spec)
            of_args, of_kwargs = batch
            return self._capture_with_or_without_guards(
                CapturedCall.of(template, of_args, of_kwargs, self._caller_autocast, self.module)
            )

        graph = self._capture_with_or_without_guards(call)
        pipeline = replace(planned.pipeline, micro_batches=micro_batches)
        # A sum of the micro-batches' losses needs no value of the global batch.
        if pipeline.averages_micro_batches:
            graph = with_whole_batch(graph, micro_batches, captured, pipeline.batch_norm)
            check_loss_of_batch(graph, micro_batches)
        self._state.watch(graph.attributes)
        log.info(
            "captured the model for %s, training=%s, in %.1f s",
            *(graph.input_values, self.module.training, graph.capture_seconds),
        )
        graph = bind_modules(graph, self._user_module)
        # On axes of prime sizes, a dimension that the size of an axis does not divide stays sharded
        # over those prime factors of the axis that do.
        mesh, decisions = split_axes(planned.mesh, planned.decisions)
        decisions = adapt_decisions(decisions, graph, mesh)
        pipeline = replace(self._adapt_pipeline_to_graph(graph), micro_batches=micro_batches)
        partitioned = Partitioned(graph, mesh, decisions, pipeline)
        return fold_axes(partitioned, unjoined_mesh=planned.mesh)

    def _capture_with_or_without_guards(self, call: CapturedCall) -> Graph:
        # The user's saved-tensor hooks must not see fake tensors, and `torch.func` transforms in
        # the model refuse to run under such hooks.
        with without_saved_tensor_hooks():
            graph = self.partitioned.graph
            if self._state.modules_with_added_hooks:
                return self._capture_with_added_hooks(call)
            # After a change of state that may be read, guards find out whether `forward` reads it.
            if self._reachable.version and (guarded := self._capture_with_guards(call)) is not None:
                return guarded
            self._stop_varying_numbers()
            # Not `else`: the capture above may have found a graph with Python, which is captured
            # again below.
            if graph.python is None:
                state = self._make_module_state_key(), self._reachable.version
                graph = self._captures.graph(call, graph.compute_dtype, state)
                if self._reachable.version:
                    inputs = tuple(argument_key(leaf) for leaf in graph.inputs)
                    self._reachable.compare((state[0], graph.in_spec, inputs), graph)
            if graph.python is not None:
                # The guards must refer to the objects of the model itself, not of the template.
                of_model = (call.args, call.kwargs)
                graph = self._python.capture(of_model, graph.compute_dtype, call.autocast)
            return graph

    def _capture_with_guards(self, call: CapturedCall) -> Graph | None:
        """Capture the model with guards on all Python state that it reads; None if that fails."""
        if self._excludes_guards or self._contains_root_hooks:
            return None
        dtype = self.partitioned.graph.compute_dtype
        # Guards would see the attributes that explain errors.
        leave_calls_of_parts(self.module)
        leave_tensors_of_other_stages(self.module)
        try:
            graph = self._python.capture((call.args, call.kwargs), dtype, call.autocast)
        except CaptureError as error:
            log.debug("the model is captured without guards: %s", error)
            return None
        self._reachable.is_guarded = True
        if not self._varying_numbers:
            return graph
        if not self._names_layers_as_planned(graph):
            self._stop_varying_numbers()
            return None
        assert graph.python is not None
        constant = self._python.names_of_constant_numbers(graph.python, (call.args, call.kwargs))
        if constant & self._varying_numbers:
            self._constant_numbers |= constant
            self._set_varying_numbers(self._varying_numbers - constant)
        return graph if self._reachable.version else None

    def _vary_numbers(self, names: Collection[str]) -> None:
        """Let guards compare the numbers `names`, which then become inputs of programs.

        Captures are made with guards from now on.
        """
        self._set_varying_numbers(self._varying_numbers | frozenset(names))
        # The guards that a version requires cover all other state too.
        self._requires_guards |= self._reachable.version == 0
        self._reachable.version = max(1, self._reachable.version)

    def _stop_varying_numbers(self) -> None:
        """Make all numbers constants of programs for good, as they cannot be inputs."""
        if self._varying_numbers:
            self._can_vary_numbers = False
            self._set_varying_numbers(frozenset())

    def _set_varying_numbers(self, names: frozenset[str]) -> None:
        self._varying_numbers = names
        self._state.leave_to_guards(names)
        # Nothing else has required guards.
        if not names and self._requires_guards and self._reachable.version == 1:
            self._reachable.version, self._reachable.is_guarded = 0, False
            # What guards have covered until now may differ from the state of the plan.
            self._reachable.update()

    def _names_layers_as_planned(self, graph: Graph) -> bool:
        """Whether operators that read parameters have the names by which the plan shards them."""
        readers = self.partitioned.graph.consumers
        names = {value.name for value in graph.parameters}
        # Another branch of `forward` may leave layers out.
        parameters = [v for v in self.partitioned.graph.parameters if v.name in names]
        return all(op.name in graph.by_name for value in parameters for op, _ in readers[value])

    @property
    def _excludes_guards(self) -> bool:
        """Whether later captures are made without guards.

        With several stages, a capture with guards may give operators other names than those that
        the plan assigns to stages. With summed losses, each micro-batch is a separate call, and
        would run captured Python code again.
        """
        pipeline = self.partitioned.pipeline
        return pipeline.stages > 1 or pipeline.sums_micro_batches

    @property
    def _contains_root_hooks(self) -> bool:
        """Whether programs contain the root module's forward hooks, which guards do not cover."""
        return False

    def _capture_with_added_hooks(self, call: CapturedCall) -> Graph:
        """Capture the model with guards, including forward hooks registered after planning.

        Raises:
            PlanError: if the model has several stages, or programs contain hooks of the model
                itself.
            CaptureError: if the model cannot be captured with guards.
        """
        if self._excludes_guards or self._contains_root_hooks:
            cause = "plan with stages=1 and loss_reduction='mean'"
            if self._contains_root_hooks:
                cause = "move the hook of the model itself to a submodule"
            raise PlanError(
                "a forward hook was registered on a submodule after planning\n"
                f"register it before `plan`, or {cause}"
            )
        leave_calls_of_parts(self.module)
        leave_tensors_of_other_stages(self.module)
        dtype, arguments = self.partitioned.graph.compute_dtype, (call.args, call.kwargs)
        with renumbered_forward_hooks(self._state.modules_with_added_hooks):
            return self._python.capture(arguments, dtype, call.autocast)

    def _bind_local_maps(self, partitioned: Partitioned) -> Partitioned:
        """Return `partitioned` with `sw.local_map` operators bound to the submodules of
        `module`."""
        graph = bind_modules(partitioned.graph, self._user_module)
        return partitioned if graph is partitioned.graph else replace(partitioned, graph=graph)

    def _adapt_pipeline_to_graph(self, graph: Graph) -> PipelineSpec:
        """Return the pipeline for `graph`, a later capture, with operators assigned to their
        planned stages."""
        return self.partitioned.pipeline
