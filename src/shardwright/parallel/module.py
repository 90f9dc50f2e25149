"""The module that `parallelize` returns: the user's model, run by the planned program."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.capture.capture import capture
from shardwright.deferred import deferred_attributes, value_of
from shardwright.errors import PlanError
from shardwright.graph.graph import Graph, Value
from shardwright.layout.layout import Layout, TensorLayout
from shardwright.lower.program import Program, lower
from shardwright.parallel.train_step import GradientAccumulation
from shardwright.partition.decisions import Outputs
from shardwright.partition.partitioned import Partitioned
from shardwright.rules import rule_of
from shardwright.rules.rule import Cuts
from shardwright.runtime.clip_grad import clip_grad_norm_
from shardwright.runtime.devices import Devices
from shardwright.runtime.dtensor import (
    add_gradients,
    as_dtensor,
    local_shards,
    stored_shards,
    with_stored_parameters,
)
from shardwright.runtime.micro_batches import micro_batch, most_micro_batches, whole_leaves
from shardwright.torch_internals import pytree
from shardwright.torch_internals.modules import share_state
from shardwright.torch_internals.tensors import copy_all_

log = logging.getLogger(__name__)

TensorOwner = tuple[str, nn.Module, str]
"""Name of a parameter or buffer, the module that owns it, and its name there."""


@dataclass(frozen=True)
class BoundProgram:
    """A program with the places in the module that it reads and updates."""

    graph: Graph
    program: Program
    parameters: tuple[TensorOwner, ...]
    buffers: tuple[TensorOwner, ...]


class ParallelModule(nn.Module):
    """A model split over the devices of the running process group.

    It has the parameters, buffers and names of the model that it was made from; on more than one
    device its parameters are DTensors. Called with the whole batch on every rank, it returns what
    the model returns: its loss replicated; other tensors replicated if there is no loss, else as
    DTensors, which talk only when they are asked for (`full_tensor()`).

    `train_step` runs forward and backward over all micro-batches of a batch, `clip_grad_norm_` is
    that of all devices.

    Called in another mode (`eval()`) or with inputs of other shapes than the plan was made for, it
    captures the model once more and runs it with the plan's cuts as far as they divide.

    Args:
        module: a copy of the model, its parameters stored as planned.
        template: a copy on the meta device, to capture from.
        partitioned: the model in the mode and for the shapes of the plan.
    """

    def __init__(
        self,
        module: nn.Module,
        template: nn.Module,
        partitioned: Partitioned,
        devices: Devices,
    ) -> None:
        super().__init__()
        share_state(self, module)
        self.training = module.training
        self.devices = devices
        self.partitioned = partitioned
        self.seed = devices.common_seed()
        self.steps = 0
        # In a tuple, so that it is no submodule.
        self._template = (template,)
        self._compiler: Callable[..., Any] | None = None
        self._planned = self._lowered(partitioned)
        leaves = [key_of(leaf) for leaf in partitioned.graph.inputs]
        self._planned_situation = self._situation(partitioned.graph.in_spec, leaves)
        self._bound = {self._planned_situation: self._planned}
        self._train_steps: dict[tuple[Any, ...], GradientAccumulation] = {}

    @property
    def template(self) -> nn.Module:
        """The whole model on the meta device, in the mode of the last capture."""
        return self._template[0]

    @property
    def program(self) -> Program:
        """The program for the mode and the shapes of the plan; `print` shows it."""
        return self._planned.program

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inputs, spec = pytree.tree_flatten((args, kwargs))
        given = self._whole_leaves(inputs)
        situation = self._situation(spec, [key_of(leaf) for leaf in given])
        if situation not in self._bound:
            args, kwargs = pytree.tree_unflatten(given, spec)
            self._bound[situation] = self._compiled(self._lowered(self._captured(args, kwargs)))
        bound = self._bound[situation]
        parameters = {n: getattr(owner, leaf) for n, owner, leaf in bound.parameters}
        state = {n: getattr(owner, leaf) for n, owner, leaf in bound.buffers}
        shards = local_shards(parameters, self.devices.layout)
        leaves = [x.to(self.devices.device) if isinstance(x, Tensor) else x for x in inputs]
        if self.training:
            self.steps += 1
        outputs, updates = bound.program(shards, state, leaves, self.seed + self.steps)
        if updates:
            with torch.no_grad():
                copy_all_([state[b.name] for b, _ in bound.graph.updates], updates)
        return pytree.tree_unflatten(self._returned(bound, outputs), bound.graph.out_spec)

    def train_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Forward and backward over all micro-batches; gradients are added to the parameters'.

        Returns:
            The loss of the whole batch, on every rank.

        Raises:
            PlanError: if the model returns no loss, or a call has other arguments than planned.
        """
        leaves, spec = pytree.tree_flatten((args, kwargs))
        leaves = [x.to(self.devices.device) if isinstance(x, Tensor) else x for x in leaves]
        step = self._step_for(leaves, spec)
        by_name = {value.name: value for value in (*step.graph.parameters, *step.graph.buffers)}
        places = {name: place_of(self, value) for name, value in by_name.items()}
        tensors = {name: getattr(owner, leaf) for name, (_, owner, leaf) in places.items()}
        parameters = {value.name: tensors[value.name] for value in step.graph.parameters}
        state = {value.name: tensors[value.name] for value in step.graph.buffers}
        self.steps += 1
        seed = self.seed + self.steps
        loss, gradients, changed = step.train(stored_shards(parameters), state, leaves, seed)
        add_gradients(parameters, gradients)
        if changed:
            with torch.no_grad():
                copy_all_([state[name] for name in changed], list(changed.values()))
        return loss

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scales all gradients so that their norm over all devices is at most `max_norm`.

        Returns:
            The norm before, on every rank.
        """
        return clip_grad_norm_(self.named_parameters(), max_norm, self.devices)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the programs with `torch.compile`, in place; takes its arguments. Conversions
        are part of the compiled graph."""
        self._compiler = lambda function: torch.compile(function, *args, **kwargs)
        self._bound = {key: self._compiled(bound) for key, bound in self._bound.items()}
        for step in self._train_steps.values():
            step.compile(self._compiler)

    def _step_for(self, leaves: list[Any], spec: pytree.TreeSpec) -> GradientAccumulation:
        """What runs a training step in the situation of a call."""
        count = most_micro_batches(leaves, self.partitioned.pipeline)
        piece = self._whole_leaves(micro_batch(leaves, 0, count))
        situation = (*self._situation(spec, [key_of(leaf) for leaf in piece]), count)
        if situation not in self._train_steps:
            partitioned = self.partitioned
            if situation[:-1] != self._planned_situation:
                args, kwargs = pytree.tree_unflatten(piece, spec)
                partitioned = self._captured(args, kwargs)
            if count != partitioned.pipeline.micro_batches:
                pipeline = replace(partitioned.pipeline, micro_batches=count)
                partitioned = replace(partitioned, pipeline=pipeline)
            step = GradientAccumulation(partitioned, self.devices)
            if self._compiler is not None:
                step.compile(self._compiler)
            self._train_steps[situation] = step
        return self._train_steps[situation]

    def _whole_leaves(self, leaves: list[Any]) -> list[Any]:
        arrivals = self.partitioned.decisions.arrivals
        return whole_leaves(self.partitioned.graph, self.devices.layout, arrivals, leaves)

    def _situation(self, spec: pytree.TreeSpec, leaves: list[Any]) -> tuple[Any, ...]:
        """What a program depends on: the modes of all submodules and what the call is given."""
        return tuple(m.training for m in self.modules()), spec, tuple(leaves)

    def _captured(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Partitioned:
        """The model in a situation that the plan was not made for, with its decisions adapted.

        Raises:
            PlanError: if the call has other arguments, or other dtypes, than the planned one.
            CaptureError: if the model cannot be captured in this situation.
        """
        planned, decisions = self.partitioned, self.partitioned.decisions
        _check_call(planned.graph, args, kwargs)
        (template,) = self._template
        for mine, its in zip(self.modules(), template.modules(), strict=True):
            its.training = mine.training
        graph = capture(template, args, kwargs, planned.graph.compute_dtype)
        shapes = ", ".join(str(value) for value in graph.input_values)
        log.info("captured the model for %s, training=%s", shapes, self.training)
        decisions = replace(
            decisions,
            cuts=adapted_cuts(graph, planned.mesh, decisions.cuts),
            outputs=adapted_outputs(graph, planned.mesh, decisions.outputs),
        )
        return replace(planned, graph=graph, decisions=decisions)

    def _lowered(self, partitioned: Partitioned) -> BoundProgram:
        graph, (whole,) = partitioned.graph, partitioned.chunks
        return BoundProgram(
            graph,
            lower(whole, self.devices),
            tuple(place_of(self, value) for value in graph.parameters),
            tuple(place_of(self, value) for value in graph.buffers),
        )

    def _compiled(self, bound: BoundProgram) -> BoundProgram:
        if self._compiler is None:
            return bound
        function = self._compiler(bound.program.function)
        return replace(bound, program=replace(bound.program, function=function))

    def _returned(self, bound: BoundProgram, outputs: list[Any]) -> list[Any]:
        """Outputs that were left in pieces become DTensors."""
        flow = bound.program.communication
        result = []
        for value, tensor in zip(bound.graph.outputs, outputs, strict=True):
            if isinstance(value, Value):
                route = flow.output_routes[value]
                where = route[-1].step.target if route else flow.layout(value)
                if where.sharded or where.partial:
                    like = torch.empty(value.shape, device="meta")
                    tensor = as_dtensor(tensor, like, where, self.devices)
            result.append(tensor)
        return result


def place_of(module: nn.Module, value: Value) -> TensorOwner:
    """Where a parameter or buffer of the graph is in the module."""
    path, _, leaf = value.name.rpartition(".")
    return value.name, module.get_submodule(path), leaf


def parallel_module(
    module: nn.Module, partitioned: Partitioned, devices: Devices
) -> ParallelModule:
    """`module`, split as planned over `devices`."""
    stored = with_stored_parameters(module, partitioned.decisions.storage, devices)
    return ParallelModule(stored, template_of(module), partitioned, devices)


def template_of(module: nn.Module) -> nn.Module:
    """A copy on the meta device."""

    def meta(tensor: Tensor) -> Tensor:
        shape, stride = tensor.shape, tensor.stride()
        return torch.empty_strided(shape, stride, dtype=tensor.dtype, device="meta")

    memo: dict[int, Any] = {
        id(p): nn.Parameter(meta(p), requires_grad=p.requires_grad) for p in module.parameters()
    }
    memo.update((id(b), meta(b)) for b in module.buffers())
    memo.update((id(t), value_of(t)) for t in deferred_attributes(module))
    return copy.deepcopy(module, memo)


def key_of(leaf: Any) -> Any:
    """What the program depends on of one argument."""
    if isinstance(leaf, Value):
        return leaf.shape, leaf.stored_dtype
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype
    return type(leaf), leaf


def _check_call(graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raises:
    PlanError: if a call has other arguments than `graph`, or tensors of other dtypes.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    if spec != graph.in_spec:
        raise PlanError(
            f"called with {_call(args, kwargs)}, but planned for other arguments: "
            f"{', '.join(str(leaf) for leaf in graph.inputs)}"
        )
    for wanted, leaf in zip(graph.inputs, leaves, strict=True):
        if not isinstance(wanted, Value):
            if type(leaf) is not type(wanted) or leaf != wanted:
                raise PlanError(f"an argument is {leaf!r}, planned for {wanted!r}")
        elif not isinstance(leaf, Tensor):
            raise PlanError(f"input {wanted.name!r} is {leaf!r}, planned for a tensor")
        elif leaf.dtype != wanted.stored_dtype:
            raise PlanError(
                f"input {wanted.name!r} has dtype {leaf.dtype}, planned for {wanted.stored_dtype}"
            )
        elif leaf.ndim != len(wanted.shape):
            raise PlanError(
                f"input {wanted.name!r} is {tuple(leaf.shape)}, planned for {wanted.shape}: every "
                "rank is given the whole batch"
            )


def _call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    count = f"{len(args)} positional argument{'s' if len(args) != 1 else ''}"
    return f"{count} and keywords {sorted(kwargs)}" if kwargs else count


def adapted_cuts(
    graph: Graph, mesh: Layout, cuts: Mapping[str, Cuts]
) -> dict[str, dict[str, tuple[int, ...]]]:
    """The cuts of the operators that `graph` has, by name; of each factor the most significant axes
    for which it still divides."""
    result = {}
    for op in graph.ops:
        found = rule_of(op)
        if found is not None and op.name in cuts:
            result[op.name] = {
                factor: _dividing(mesh, axes, found.capacity[factor])
                for factor, axes in cuts[op.name].items()
                if factor in found.factors
            }
    return result


def adapted_outputs(graph: Graph, mesh: Layout, outputs: Outputs) -> Outputs:
    """Likewise for the layouts in which operators are told to leave their outputs."""
    return {
        op.name: tuple(
            axes if axes is not None and _divides(mesh, axes, value.shape) else None
            for axes, value in zip(outputs[op.name], op.outputs, strict=False)
        )
        for op in graph.ops
        if op.name in outputs
    }


def _dividing(mesh: Layout, axes: tuple[int, ...], capacity: int) -> tuple[int, ...]:
    lengths = range(1, len(axes) + 1)
    fitting = list(takewhile(lambda n: capacity % mesh.size(axes[:n]) == 0, lengths))
    return axes[: fitting[-1]] if fitting else ()


def _divides(mesh: Layout, axes: tuple[tuple[int, ...], ...], shape: tuple[int, ...]) -> bool:
    counts = TensorLayout(mesh, axes).shard_counts if len(axes) == len(shape) else (0,)
    return all(parts and size % parts == 0 for size, parts in zip(shape, counts, strict=False))
