"""The weights with which the losses of micro-batches add up to the loss of the batch.

`LossWeighting` says how the weights follow from the inputs; the planner derives it from the graph
of a micro-batch (`planner/mean_of_samples.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import isclose
from typing import Any

import torch
from torch import Tensor

from shardwright.core.graph.graph import Graph, Op, Value, ops_from_inputs
from shardwright.core.graph.interpreter import run
from shardwright.core.graph.loss_weighting import LossWeighting
from shardwright.core.partition.decisions import Decisions
from shardwright.core.partition.partitioned import Partitioned
from shardwright.core.rules.notation import call_arguments
from shardwright.core.runtime.collectives import all_reduce
from shardwright.core.runtime.devices import Devices
from shardwright.core.torch_internals import pytree
from shardwright.errors import PlanError

Tensors = dict[Value, Tensor]


def weighting_of(graph: Graph) -> LossWeighting:
    """How the losses of micro-batches are weighted; as means over samples if nothing else is known.

    Raises:
        PlanError: if the graph lacks what the weights are computed from, as that of a call with
            other shapes may.
    """
    weighting = graph.loss_weighting
    if not isinstance(weighting, LossWeighting):
        return LossWeighting()
    if not graph.has_names(weighting.names):
        raise PlanError(
            "micro-batches of this shape have other operators than planned, so that their losses"
            f" cannot be weighted (by {', '.join(weighting.names)})\n"
            "plan the model for a batch of this shape"
        )
    return weighting


def weighted_like(planned: Graph, graph: Graph) -> Graph:
    """The graph of a micro-batch of another shape, whose loss is weighted as that of the plan.

    Numbers that the loss is multiplied or divided by may follow from the batch size: in proportion
    to it, as `len(x)`, in a mean over samples, and else not at all, as in `min(len(x), 4)`.

    Raises:
        PlanError: if a number of the loss depends on the batch size in another way.
    """
    ratio = _batch_size(graph) / _batch_size(planned)
    allowed = (1.0, ratio, 1 / ratio) if weighting_of(planned).reduction == "mean" else (1.0,)
    scalars = (op for op in graph.ops if not any(value.shape for value in op.outputs))
    for op in scalars if ratio != 1 else ():
        planned_op = planned.by_name.get(op.name, op)
        for number, other in zip(_numbers(op), _numbers(planned_op), strict=False):
            if not any(isclose(number, other * factor) for factor in allowed):
                raise PlanError(
                    f"the loss depends on the batch size in {op.name!r} ({op.source}): {other} was"
                    f" planned, and is {number} now\nplan the model for a batch of this size"
                )
    return replace(graph, loss_weighting=planned.loss_weighting)


def _batch_size(graph: Graph) -> int:
    return next((value.shape[0] for value in graph.input_values if value.shape), 1)


def _numbers(op: Op) -> list[float]:
    leaves = pytree.tree_leaves((op.args, op.kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, (int, float))]


class LossWeights:
    """Computes the weight of each micro-batch, from the inputs of all of them.

    Args:
        graph: the whole model, for one micro-batch.
        arrivals: the axes over which inputs arrive sharded; totals are summed over them.
    """

    def __init__(self, graph: Graph, devices: Devices, arrivals: tuple[int, ...] = ()) -> None:
        self._graph, self._devices, self._arrivals = graph, devices, arrivals
        self.weighting = weighting_of(graph)
        self._totals = _values(graph, self.weighting)
        computed = [
            value for value in _class_weights(graph, self.weighting) if value in graph.producer
        ]
        self._ops = ops_from_inputs(graph, [*self._totals, *computed]) or []
        self._after = _ops_between(graph, self._totals, self.weighting.denominator)

    def __call__(
        self, pieces: Sequence[Sequence[Any]], buffers: Mapping[str, Tensor]
    ) -> Sequence[float | Tensor]:
        """Returns the weights.

        Args:
            pieces: for each micro-batch the leaves of its call.
            buffers: by name, as this rank holds them; the weights of classes may be one.
        """
        one = 1 / len(pieces) if self.weighting.reduction == "mean" else 1.0
        if len(pieces) == 1 or not self._totals:
            return [one if len(pieces) > 1 else 1.0] * len(pieces)
        with torch.no_grad():
            totals = torch.stack([self._totals_of(piece, buffers) for piece in pieces])
            if self._arrivals:
                totals = all_reduce(self._devices.group(self._arrivals))(totals)
            denominators = torch.stack([self._denominator(each) for each in totals.unbind()])
            weights = one * denominators / self._denominator(self._joined(totals))
            loss = self._graph.loss
            double = loss is not None and loss.dtype == torch.float64
            return weights.to(torch.float64 if double else torch.float32).unbind()

    @property
    def leaves_out(self) -> bool:
        """Whether the gradients of a micro-batch of weight 0 are NaN, so that it is left out. A
        mean over targets of which none is valid has gradients of 0."""
        return bool(self.weighting.denominator)

    def _totals_of(self, leaves: Sequence[Any], buffers: Mapping[str, Tensor]) -> Tensor:
        """The means and sums over the samples of one micro-batch, in float64."""
        pairs = zip(self._graph.inputs, leaves, strict=True)
        tensors = {value: leaf for value, leaf in pairs if isinstance(value, Value)}
        self._run(self._ops, tensors)
        if self.weighting.counted:
            op = self._graph.by_name[self.weighting.counted]
            for weight in _class_weights(self._graph, self.weighting):
                if weight not in tensors:
                    tensors[weight] = self._given_class_weights(weight, buffers)
            return _target_weight(op, tensors).reshape(1)
        return torch.stack([tensors[value].to(torch.float64) for value in self._totals])

    def _given_class_weights(self, value: Value, buffers: Mapping[str, Tensor]) -> Tensor:
        """The weights of all classes, a buffer or a constant.

        Raises:
            PlanError: if this rank holds those of some classes only.
        """
        if value in self._graph.constants:
            return self._graph.constants[value].to(self._devices.device)
        if tuple(buffers[value.name].shape) != value.shape:
            raise PlanError(
                f"the class weights {value.name!r} are sharded, so that micro-batches cannot be"
                " weighted by them\nplan with micro_batches=1, or pin the loss so that its classes"
                " are not sharded"
            )
        return buffers[value.name]

    def _denominator(self, totals: Tensor) -> Tensor:
        """D, from the means and sums that it is a function of."""
        if not self.weighting.denominator:
            return totals[0]
        pairs = zip(self._totals, totals.unbind(), strict=True)
        tensors = {value: total.to(value.dtype) for value, total in pairs}
        self._run(self._after, tensors)
        (result,) = (t for v, t in tensors.items() if v.name == self.weighting.denominator)
        return result.to(torch.float64)

    def _joined(self, totals: Tensor) -> Tensor:
        """The means and sums over the whole batch."""
        sums, count = totals.sum(0), len(totals)
        reductions = [reduction for _, reduction in self.weighting.totals] or ["sum"]
        shares = [1 / count if reduction == "mean" else 1.0 for reduction in reductions]
        return sums * sums.new_tensor(shares)

    def _run(self, ops: Iterable[Op], tensors: Tensors) -> None:
        constants, device = self._graph.constants, self._devices.device
        for op in ops:
            for value in op.inputs:
                if value in constants:
                    tensors[value] = constants[value].to(device)
            tensors.update(zip(op.outputs, run(op, tensors, device), strict=True))

    def check_none_left_out(self, weights: Sequence[float | Tensor]) -> None:
        """Raises an error if a micro-batch would have to be left out: a pipeline schedule runs the
        backward pass of each.

        Raises:
            PlanError: on every rank of the pipeline, as each computes all weights.
        """
        if not self.leaves_out:
            return
        empty = [number for number, weight in enumerate(weights) if weight == 0]
        if empty:
            raise PlanError(
                f"micro-batch {empty[0]} of {len(weights)} has no samples to divide by:"
                f" {self.weighting.denominator!r} is 0 there, and a pipeline cannot leave it out\n"
                "keep the divisor above 0, as by `.clamp(min=1)`, or plan without stages"
            )


def arrival_axes(graph: Graph, decisions: Decisions) -> tuple[int, ...]:
    """Axes over which the inputs that weights are computed from arrive sharded.

    Raises:
        PlanError: if totals would have to be summed over different axes.
    """
    axes = {
        _axes_of_inputs(graph, decisions, value) for value in _values(graph, weighting_of(graph))
    }
    if len(axes) > 1:
        raise PlanError(
            "the inputs of the loss' denominator arrive sharded over different axes\n"
            "call the model with the whole batch on every rank (dataset_strategy=None)"
        )
    return next(iter(axes), ())


def weighing_bytes(partitioned: Partitioned) -> int:
    """Bytes that a device of the last stage sends in a step to weight the losses of micro-batches,
    where their inputs arrive sharded. A plan does not count them."""
    pipeline, mesh = partitioned.pipeline, partitioned.mesh
    axes = arrival_axes(partitioned.graph, partitioned.decisions)
    if pipeline.micro_batches == 1 or pipeline.loss_reduction == "sum" or not axes:
        return 0
    totals = len(weighting_of(partitioned.graph).totals) or 1
    size, local = mesh.size(axes), torch.float64.itemsize * totals * pipeline.micro_batches
    return -(-2 * (size - 1) * local // size)


def _axes_of_inputs(graph: Graph, decisions: Decisions, value: Value) -> tuple[int, ...]:
    read = {value, *(each for op in ops_from_inputs(graph, [value]) or () for each in op.inputs)}
    cuts = (decisions.arrivals.get(each.name, ()) for each in graph.input_values if each in read)
    return tuple(sorted({axis for dims in cuts for axes in dims for axis in axes}))


def _values(graph: Graph, weighting: LossWeighting) -> tuple[Value, ...]:
    """The values to evaluate in each micro-batch: targets, or means and sums over samples."""
    if weighting.counted:
        arguments = call_arguments(graph.by_name[weighting.counted])
        return (arguments["target"],)
    named = {value.name: value for op in graph.ops for value in op.outputs}
    return tuple(named[name] for name, _ in weighting.totals)


def _class_weights(graph: Graph, weighting: LossWeighting) -> tuple[Value, ...]:
    """The weights of classes that a mean over targets reads, if it reads any."""
    if not weighting.counted:
        return ()
    weight = call_arguments(graph.by_name[weighting.counted])["weight"]
    return () if weight is None else (weight,)


def _ops_between(graph: Graph, totals: Sequence[Value], denominator: str) -> list[Op]:
    """The operators from totals to the denominator, in execution order."""
    needed = {v for op in graph.ops for v in op.outputs if v.name == denominator} - set(totals)
    ops: list[Op] = []
    for op in reversed(graph.ops):
        if needed.intersection(op.outputs):
            ops.append(op)
            needed.update(set(op.inputs) - set(totals))
    return ops[::-1]


def _target_weight(op: Op, tensors: Mapping[Value, Tensor]) -> Tensor:
    """What a mean over targets divides by: their number, or the sum of their classes' weights."""
    arguments = call_arguments(op)
    target, weight = tensors[arguments["target"]], arguments["weight"]
    valid: Tensor = target != arguments["ignore_index"]
    if weight is None:
        return valid.sum(dtype=torch.float64)
    weights: Tensor = tensors[weight].to(torch.float64)[target.masked_fill(~valid, 0)]
    return weights.masked_fill(~valid, 0).sum()


def weighted(loss: Tensor, weight: float | Tensor) -> Tensor:
    """The share of a micro-batch in the loss of the batch. Without valid targets its own loss is
    0 / 0, and its share is 0."""
    if isinstance(weight, Tensor):
        loss = loss.masked_fill(weight == 0, 0)
    return loss * weight
