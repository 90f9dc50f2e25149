"""The module that `parallelize` returns: the user's model, run by the planned program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardwright.communication import NO_OUTPUTS, Outputs, Storage
from shardwright.errors import PlanError
from shardwright.graph.graph import Graph, Value
from shardwright.lower.devices import Devices
from shardwright.lower.program import Program, lower
from shardwright.lower.storage import as_dtensor, local_shards, with_stored_parameters
from shardwright.rules.rule import Cuts


class ParallelModule(nn.Module):
    """A model split over the devices of the running process group.

    It has the parameters, buffers and names of the model that it was made from; on more than one
    device its parameters are DTensors. Called with the whole batch on every rank, it returns what
    the model returns: its loss replicated; other tensors replicated if there is no loss, else as
    DTensors, which talk only when they are asked for (`full_tensor()`).

    Args:
        module: a copy of the model, its parameters stored as planned.
        training: the mode in which the model was captured.
    """

    def __init__(
        self,
        module: nn.Module,
        graph: Graph,
        devices: Devices,
        cuts: Mapping[str, Cuts],
        storage: Storage,
        outputs: Outputs,
        training: bool,
    ) -> None:
        super().__init__()
        self._modules = module._modules
        self._parameters = module._parameters
        self._buffers = module._buffers
        self._non_persistent_buffers_set = module._non_persistent_buffers_set
        self.graph = graph
        self.devices = devices
        self.captured_in_training = training
        self.program: Program = lower(graph, devices, cuts, storage, outputs)
        self._places = {
            "parameters": [self._place(value) for value in graph.parameters],
            "buffers": [self._place(value) for value in graph.buffers],
        }
        self._steps = 0
        self.seed = torch.initial_seed() % 2**31
        self.train(training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.training != self.captured_in_training:
            raise PlanError(_mode_error(self.captured_in_training))
        inputs = _checked_inputs(self.graph, args, kwargs, self.devices.device)
        parameters = {n: getattr(owner, leaf) for n, owner, leaf in self._places["parameters"]}
        state = {n: getattr(owner, leaf) for n, owner, leaf in self._places["buffers"]}
        shards = local_shards(parameters, self.devices.layout)
        if self.training:
            self._steps += 1
        outputs, updates = self.program(shards, state, inputs, self.seed + self._steps)
        with torch.no_grad():
            for (buffer, _), value in zip(self.graph.updates, updates, strict=True):
                state[buffer.name].copy_(value)
        return pytree.tree_unflatten(self._returned(outputs), self.graph.out_spec)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the program with `torch.compile`, in place; takes its arguments. The conversions
        are part of the compiled graph."""
        compiled = torch.compile(self.program.function, *args, **kwargs)
        self.program = replace(self.program, function=compiled)

    def _place(self, value: Value) -> tuple[str, nn.Module, str]:
        """Name of a parameter or buffer, the module that owns it, and its name there."""
        path, _, leaf = value.name.rpartition(".")
        return value.name, self.get_submodule(path), leaf

    def _returned(self, outputs: list[Any]) -> list[Any]:
        """Outputs that were left in pieces become DTensors."""
        flow = self.program.communication
        result = []
        for value, tensor in zip(self.graph.outputs, outputs, strict=True):
            if isinstance(value, Value):
                route = flow.output_routes[value]
                where = route[-1].step.target if route else flow.layout(value)
                if where.sharded or where.partial:
                    like = torch.empty(value.shape, device="meta")
                    tensor = as_dtensor(tensor, like, where, self.devices)
            result.append(tensor)
        return result


def parallel_module(
    module: nn.Module,
    graph: Graph,
    devices: Devices,
    cuts: Mapping[str, Cuts],
    storage: Storage,
    training: bool,
    outputs: Outputs = NO_OUTPUTS,
) -> ParallelModule:
    """`module`, split as planned over `devices`."""
    stored = with_stored_parameters(module, storage, devices)
    return ParallelModule(stored, graph, devices, cuts, storage, outputs, training)


def _checked_inputs(
    graph: Graph, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device
) -> list[Any]:
    """The leaves of a call, tensors on `device`.

    Raises:
        PlanError: if they differ from what the model was captured with.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    if spec != graph.in_spec:
        raise PlanError(
            f"called with {_call(args, kwargs)}, but planned for other arguments: "
            f"{', '.join(str(leaf) for leaf in graph.inputs)}"
        )
    result = []
    for wanted, leaf in zip(graph.inputs, leaves, strict=True):
        if isinstance(wanted, Value):
            if not isinstance(leaf, Tensor) or tuple(leaf.shape) != wanted.shape:
                got = tuple(leaf.shape) if isinstance(leaf, Tensor) else leaf
                raise PlanError(
                    f"input {wanted.name!r} is {got}, planned for shape {wanted.shape}: every rank "
                    "is given the whole batch; make a plan for this shape, or drop the last, "
                    "smaller batch"
                )
            if leaf.dtype != wanted.dtype:
                raise PlanError(
                    f"input {wanted.name!r} has dtype {leaf.dtype}, planned for {wanted.dtype}"
                )
            leaf = leaf.to(device, non_blocking=True)
        elif type(leaf) is not type(wanted) or leaf != wanted:
            raise PlanError(f"an argument is {leaf!r}, but the model was captured with {wanted!r}")
        result.append(leaf)
    return result


def _call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    count = f"{len(args)} positional argument{'s' if len(args) != 1 else ''}"
    return f"{count} and keywords {sorted(kwargs)}" if kwargs else count


def _mode_error(training: bool) -> str:
    now, then = ("eval", "training") if training else ("training", "eval")
    return (
        f"the model is in {now} mode, but was captured in {then} mode, where operators such as "
        f"dropout and batch norm differ: plan and parallelize the model in {now} mode for this"
    )
