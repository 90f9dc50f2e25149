"""Compares a planned program on simulated ranks with one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardwright.communication import communication
from shardwright.deferred import values_of
from shardwright.graph.capture import capture
from shardwright.graph.double import double, in_double
from shardwright.graph.graph import Graph, Value
from shardwright.graph.interpret import interpret
from shardwright.lower.simulation import simulate
from shardwright.plan import Plan


@dataclass(frozen=True)
class Check:
    """A plan's program on simulated ranks, compared with the model on one device.

    Args:
        loss: on one device; None if the model has no scalar loss.
        loss_difference: largest difference of any output.
        gradient_difference: largest difference of any parameter's gradient, relative to the
            largest gradient of that parameter.
        worst_parameter: the parameter where that is.
        replica_difference: largest difference between ranks that should hold the same.
        counted_bytes: what one device sent, forward and backward, counted while it ran.
        planned_bytes: what the plan says.
    """

    loss: float | None
    loss_difference: float
    gradient_difference: float
    worst_parameter: str
    replica_difference: float
    counted_bytes: tuple[int, int]
    planned_bytes: tuple[int, int]

    def passes(self, tolerance: float = 1e-9) -> bool:
        """Whether every difference is within `tolerance` and the bytes are as planned."""
        worst = max(self.loss_difference, self.gradient_difference, self.replica_difference)
        return worst <= tolerance and self.counted_bytes == self.planned_bytes


def check(
    net: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None, plan: Plan
) -> Check:
    """Runs the planned program on simulated ranks in this process against one device, in float64.

    Random operators cannot be compared: put the model in eval mode, or set dropout to 0.

    Raises:
        PlanError: if the plan is for another model, or a process group is running.
    """
    captured = plan.graph if plan.graph is not None else capture(net, args, kwargs)
    plan.check_fits(captured)
    graph = in_double(captured)
    named: dict[str, Tensor] = dict(net.named_parameters(remove_duplicate=False))
    state = dict(net.named_buffers(remove_duplicate=False))
    made = values_of(named | state, lambda name, whole: whole)
    named, state = named | made, state | made
    parameters = {
        v.name: double(named[v.name]).requires_grad_(v.requires_grad) for v in graph.parameters
    }
    buffers = {v.name: double(state[v.name]) for v in graph.buffers}
    args, kwargs = pytree.tree_map_only(Tensor, double, (args, kwargs or {}))
    wanted, _ = interpret(graph, parameters, buffers, args, kwargs)
    leaves = pytree.tree_leaves(wanted)
    ends = _output_gradients(graph, leaves)
    for tensor, gradient in ends:
        if gradient is not None:
            torch.autograd.backward(tensor, gradient, retain_graph=True)
    outcome = simulate(
        graph,
        plan.mesh,
        plan.decided,
        parameters,
        buffers,
        pytree.tree_leaves((args, kwargs)),
        output_gradients=[gradient for _, gradient in ends],
    )
    outputs = [t for t in outcome.outputs if isinstance(t, Tensor)]
    differences = {
        name: _relative(outcome.gradients[name], parameter.grad)
        for name, parameter in parameters.items()
        if parameter.grad is not None
    }
    worst = max(differences, key=lambda name: differences[name], default="")
    flow = communication(graph, plan.mesh, plan.decided)
    return Check(
        loss=_loss(graph, leaves),
        loss_difference=max(
            (_relative(a, b) for a, (b, _) in zip(outputs, ends, strict=True)), default=0.0
        ),
        gradient_difference=differences.get(worst, 0.0),
        worst_parameter=worst,
        replica_difference=outcome.replica_difference,
        counted_bytes=(outcome.forward_bytes, outcome.backward_bytes),
        planned_bytes=(flow.forward_bytes, flow.backward_bytes),
    )


def _output_gradients(graph: Graph, leaves: list[Any]) -> list[tuple[Tensor, Tensor | None]]:
    """Every output tensor with the gradient that starts there: 1 for the loss; if there is none,
    distinct numbers for every output, so that no error can cancel."""
    found: list[tuple[Tensor, Tensor | None]] = []
    for value, tensor in zip(graph.outputs, leaves, strict=True):
        if not isinstance(value, Value):
            continue
        starts = value is graph.loss or (graph.loss is None and tensor.is_floating_point())
        gradient = None
        if starts and tensor.requires_grad:
            steps = torch.arange(tensor.numel(), dtype=tensor.dtype).reshape(tensor.shape)
            gradient = torch.ones_like(tensor) if value is graph.loss else torch.sin(1 + steps)
        found.append((tensor, gradient))
    return found


def _loss(graph: Graph, leaves: list[Any]) -> float | None:
    for value, tensor in zip(graph.outputs, leaves, strict=True):
        if value is graph.loss and graph.loss is not None:
            return float(tensor.detach())
    return None


def _relative(got: Tensor, wanted: Tensor) -> float:
    """Largest difference, relative to the largest element where that is above 1."""
    if not wanted.numel():
        return 0.0
    scale = max(1.0, wanted.detach().abs().max().item()) if wanted.is_floating_point() else 1.0
    return (got.detach().double() - wanted.detach().double()).abs().max().item() / scale
