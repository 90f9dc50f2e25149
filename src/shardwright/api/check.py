"""Compares a planned program on simulated ranks with one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.capture.capture import capture
from shardwright.deferred import values_of
from shardwright.graph.float64 import graph_in_float64, in_float64
from shardwright.graph.graph import Graph, Value
from shardwright.graph.interpreter import interpret
from shardwright.parallel.simulate_pipeline import simulate_stages
from shardwright.parallel.simulate_ranks import Outcome, simulate, simulate_step
from shardwright.parallel.train_step import LossWeights, loss_of
from shardwright.partition.partitioned import Partitioned
from shardwright.plan import Plan
from shardwright.planner.pipeline import Pipeline
from shardwright.runtime.devices import Devices
from shardwright.runtime.micro_batches import micro_batch
from shardwright.torch_internals import pytree


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
    net = net.net if isinstance(net, Pipeline) else net
    captured = plan.graph if plan.graph is not None else _captured(net, args, kwargs, plan)
    plan.check_fits(captured)
    partitioned = plan.partition(graph_in_float64(captured))
    graph = partitioned.graph
    named: dict[str, Tensor] = dict(net.named_parameters(remove_duplicate=False))
    state = dict(net.named_buffers(remove_duplicate=False))
    initialized = values_of(named | state, lambda name, whole: whole)
    named, state = named | initialized, state | initialized
    parameters = {
        v.name: in_float64(named[v.name]).requires_grad_(v.requires_grad) for v in graph.parameters
    }
    buffers = {v.name: in_float64(state[v.name]) for v in graph.buffers}
    leaves = pytree.tree_map_only(Tensor, in_float64, pytree.tree_leaves((args, kwargs or {})))
    if plan.pipeline.micro_batches > 1:
        loss_of(graph)
        ends, outcome = _step(partitioned, parameters, buffers, leaves)
    else:
        ends, outcome = _call(partitioned, parameters, buffers, leaves)
    outputs = [t for t in outcome.outputs if isinstance(t, Tensor)]
    differences = {
        name: _relative(outcome.gradients[name], parameter.grad)
        for name, parameter in parameters.items()
        if parameter.grad is not None
    }
    worst = max(differences, key=lambda name: differences[name], default="")
    counted, planned = _bytes(partitioned, outcome)
    return Check(
        loss=_loss(graph, ends),
        loss_difference=max(
            (_relative(a, b) for a, (b, _) in zip(outputs, ends, strict=True)), default=0.0
        ),
        gradient_difference=differences.get(worst, 0.0),
        worst_parameter=worst,
        replica_difference=outcome.replica_difference,
        counted_bytes=counted,
        planned_bytes=planned,
    )


def _bytes(partitioned: Partitioned, outcome: Outcome) -> tuple[tuple[int, int], tuple[int, int]]:
    """Bytes that one device sent, forward and backward, counted and as planned; with several stages
    those of one where they differ, or else of the busiest."""
    pairs = list(zip(outcome.stage_bytes, partitioned.step_bytes, strict=True))
    return max(pairs, key=lambda pair: (pair[0] != pair[1], sum(pair[1])))


def _captured(
    net: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None, plan: Plan
) -> Graph:
    """The model for one micro-batch."""
    leaves, spec = pytree.tree_flatten((args, kwargs or {}))
    leaves = micro_batch(leaves, 0, plan.pipeline.micro_batches)
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    return capture(net, args, kwargs, plan.computed_in)


Ends = list[tuple[Tensor, Tensor | None]]


def _call(
    partitioned: Partitioned,
    parameters: dict[str, Tensor],
    buffers: dict[str, Tensor],
    leaves: list[Any],
) -> tuple[Ends, Outcome]:
    """One call and its gradients, on one device and on simulated ranks."""
    graph = partitioned.graph
    args, kwargs = pytree.tree_unflatten(leaves, graph.in_spec)
    wanted, _ = interpret(graph, parameters, buffers, args, kwargs)
    ends = _output_gradients(graph, pytree.tree_leaves(wanted))
    for tensor, gradient in ends:
        if gradient is not None:
            torch.autograd.backward(tensor, gradient, retain_graph=True)
    gradients = [gradient for _, gradient in ends]
    outcome = simulate(partitioned, parameters, buffers, leaves, output_gradients=gradients)
    return ends, outcome


def _step(
    partitioned: Partitioned,
    parameters: dict[str, Tensor],
    buffers: dict[str, Tensor],
    leaves: list[Any],
) -> tuple[Ends, Outcome]:
    """A step over all micro-batches, on one device and on simulated ranks."""
    graph, pipeline = partitioned.graph, partitioned.pipeline
    count = pipeline.micro_batches
    pieces = [micro_batch(leaves, number, count) for number in range(count)]
    weights = LossWeights(graph, Devices.of_rank(partitioned.mesh, 0))(pieces)
    total, state = torch.zeros((), dtype=torch.float64), dict(buffers)
    for piece, weight in zip(pieces, weights, strict=True):
        args, kwargs = pytree.tree_unflatten(piece, graph.in_spec)
        wanted, updates = interpret(graph, parameters, state, args, kwargs)
        state.update(updates)
        outputs = pytree.tree_leaves(wanted)
        place = next(i for i, value in enumerate(graph.outputs) if value is graph.loss)
        total = total + outputs[place] * (weight if pipeline.loss_reduction == "mean" else 1)
    torch.autograd.backward(total)
    run = simulate_stages if pipeline.stages > 1 else simulate_step
    outcome = run(partitioned, parameters, buffers, leaves)
    return [(total, torch.ones_like(total))], outcome


def _output_gradients(graph: Graph, leaves: list[Any]) -> Ends:
    """Every output tensor with the gradient that starts there: 1 for the loss; if there is none,
    distinct numbers for every output, so that no error can cancel."""
    ends: Ends = []
    for value, tensor in zip(graph.outputs, leaves, strict=True):
        if not isinstance(value, Value):
            continue
        starts = value is graph.loss or (graph.loss is None and tensor.is_floating_point())
        gradient = None
        if starts and tensor.requires_grad:
            steps = torch.arange(tensor.numel(), dtype=tensor.dtype).reshape(tensor.shape)
            gradient = torch.ones_like(tensor) if value is graph.loss else torch.sin(1 + steps)
        ends.append((tensor, gradient))
    return ends


def _loss(graph: Graph, ends: Ends) -> float | None:
    if len(ends) == 1 and graph.loss is not None:
        return float(ends[0][0].detach())
    outputs = [value for value in graph.outputs if isinstance(value, Value)]
    for value, (tensor, _) in zip(outputs, ends, strict=True):
        if value is graph.loss and graph.loss is not None:
            return float(tensor.detach())
    return None


def _relative(got: Tensor, wanted: Tensor) -> float:
    """Largest difference, relative to the largest element where that is above 1."""
    if not wanted.numel():
        return 0.0
    scale = max(1.0, wanted.detach().abs().max().item()) if wanted.is_floating_point() else 1.0
    return (got.detach().double() - wanted.detach().double()).abs().max().item() / scale
