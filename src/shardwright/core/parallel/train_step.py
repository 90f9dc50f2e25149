"""Training steps: forward and backward over all micro-batches of a batch.

`TrainStep` is what every module runs. `GradientAccumulation` is that of a model in one stage, one
micro-batch after another; with several stages it is `RankStages` (`pipeline_stage.py`). Both weigh
the losses of micro-batches with `LossWeights`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwright.core.graph.custom_ops import MEAN
from shardwright.core.graph.graph import Graph, Op, Value, ops_from_inputs
from shardwright.core.graph.interpreter import run
from shardwright.core.lower.program import Program, lower
from shardwright.core.parallel.unsharded_parameters import UnshardedParameters
from shardwright.core.partition.decisions import Decisions
from shardwright.core.partition.partitioned import Partitioned
from shardwright.core.rules.notation import call_arguments, draws_random
from shardwright.core.runtime.collectives import all_reduce, wait
from shardwright.core.runtime.devices import Devices
from shardwright.core.runtime.micro_batches import micro_batch
from shardwright.core.runtime.random import seed_of
from shardwright.errors import PlanError


@dataclass(frozen=True)
class StepInputs:
    """What a step reads on this rank.

    Args:
        shards: by name the shard of each parameter of its stage, as it is stored.
        buffers: by name.
        leaves: of the call's arguments, with the whole batch.
        seed: of the step.
    """

    shards: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    leaves: Sequence[Any]
    seed: int

    def micro_batches(self, count: int) -> list[list[Any]]:
        """The leaves of each of `count` micro-batches."""
        return [micro_batch(self.leaves, number, count) for number in range(count)]

    def changed(self, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of `buffers` that a step has replaced."""
        return {name: t for name, t in buffers.items() if t is not self.buffers.get(name)}


StepResults = tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]
"""The loss of the batch, on every rank; the gradients of the stored shards; the new values of
buffers."""


class TrainStep(Protocol):
    """This rank's training step of a model, for one mode and one shape of its inputs."""

    @property
    def partitioned(self) -> Partitioned:
        """The model, for as many micro-batches as a step has."""

    def compile(self, compiler: Callable[[Program], Program]) -> None:
        """Replaces each program by what `compiler` makes of it.

        Raises:
            PlanError: if the schedule cannot run compiled programs.
        """

    def train(self, inputs: StepInputs) -> StepResults:
        """Forward and backward over all micro-batches."""


def loss_of(graph: Graph) -> Value:
    """The value from which the gradients of a training step start.

    Raises:
        PlanError: if the model returns no loss, or several.
    """
    if graph.loss is None:
        raise PlanError("the model returns no loss, one number that a gradient starts from")
    if graph.other_losses:
        places = [_described(graph, value) for value in (graph.loss, *graph.other_losses)]
        raise PlanError(
            f"a training step trains one loss, but the model returns {len(places)} numbers that"
            f" gradients can start from: {', '.join(places)}; return their sum, or the one to train"
            " under the name 'loss', or detach() the others; or, without stages and micro-batches,"
            " call the model and then backward() of any of its outputs"
        )
    return graph.loss


def _described(graph: Graph, value: Value) -> str:
    op = graph.producer.get(value)
    return f"{value.name!r} ({op.source})" if op is not None and op.source else repr(value.name)


class GradientAccumulation:
    """A training step in one stage: micro-batches run one after another, their gradients add up.

    Raises:
        PlanError: if the model has no loss.
    """

    def __init__(self, partitioned: Partitioned, devices: Devices) -> None:
        graph, pipeline = partitioned.graph, partitioned.pipeline
        loss = loss_of(graph)
        self.partitioned = partitioned
        self.micro_batches = pipeline.micro_batches
        (whole,) = partitioned.chunks
        self.program = lower(whole, devices, self.micro_batches > 1, pending_loss=True)
        self.unsharded = UnshardedParameters(self.program)
        self._weights = LossWeights(graph, devices, arrival_axes(graph, partitioned.decisions))
        self._waits = devices.waits
        self._sums = pipeline.loss_reduction == "sum"
        self._place = next(i for i, value in enumerate(graph.outputs) if value is loss)

    def compile(self, compiler: Callable[[Program], Program]) -> None:
        self.program = compiler(self.program)

    def train(self, inputs: StepInputs) -> StepResults:
        loss, changed = self.run(inputs)
        return loss, self.unsharded.end_step(), changed

    def run(self, inputs: StepInputs) -> tuple[Tensor, dict[str, Tensor]]:
        """As `train`, but leaves the gradients for `unsharded.end_step()` to hand out."""
        pieces = inputs.micro_batches(self.micro_batches)
        buffer_updates = self.partitioned.graph.updates
        self.unsharded.begin_step(inputs.shards)
        weights = [1.0] * len(pieces) if self._sums else self._weights(pieces)
        state, losses = dict(inputs.buffers), []
        for number, (piece, weight) in enumerate(zip(pieces, weights, strict=True)):
            parameters = self.unsharded.tensors()
            outputs, updates = self.program(parameters, state, piece, seed_of(inputs.seed, number))
            loss: Tensor = outputs[self._place]
            # Others, such as logits, need not stay through the backward pass.
            del outputs
            if loss.requires_grad:
                loss.backward(torch.ones_like(loss) * weight)  # type: ignore[no-untyped-call]
            losses.append((loss.detach(), weight))
            state.update((b.name, t) for (b, _), t in zip(buffer_updates, updates, strict=True))
        # All ranks meet here first: no backward pass waits for the loss of others.
        ended = [weighted(wait(loss, self._waits), weight) for loss, weight in losses]
        return torch.stack(ended).sum(), inputs.changed(state)


def weighted(loss: Tensor, weight: float | Tensor) -> Tensor:
    """The share of a micro-batch in the loss of the batch. Where none of its targets is valid, its
    own loss is 0 / 0, and its share is 0."""
    if isinstance(weight, Tensor):
        loss = loss.masked_fill(weight == 0, 0)
    return loss * weight


COUNTED_LOSSES = ("cross_entropy", "nll_loss_nd", "nll_loss", "nll_loss2d")


class LossWeights:
    """The weights with which the losses of micro-batches make the loss of the whole batch.

    A mean over all targets that are not ignored weighs each micro-batch by the number of its own,
    if the targets follow from the inputs alone. All other losses are taken as means over equal
    pieces.

    Args:
        graph: the whole model, for one micro-batch.
        arrivals: the axes over which inputs arrive cut; what is counted is summed over them.
    """

    def __init__(self, graph: Graph, devices: Devices, arrivals: tuple[int, ...] = ()) -> None:
        self._graph, self._devices, self._arrivals = graph, devices, arrivals
        self._target, self._ignored = _counted(graph)
        self._ops = ops_from_inputs(graph, [self._target]) if self._target is not None else None

    def __call__(self, pieces: Sequence[Sequence[Any]]) -> Sequence[float | Tensor]:
        """The weights, together 1.

        Args:
            pieces: for each micro-batch the leaves of its call.
        """
        if self._ops is None or len(pieces) == 1:
            return [1 / len(pieces)] * len(pieces)
        with torch.no_grad():
            counts = torch.stack([self._count(piece) for piece in pieces])
            if self._arrivals:
                counts = all_reduce(self._devices.group(self._arrivals))(counts)
            loss = self._graph.loss
            double = loss is not None and loss.dtype == torch.float64
            return (counts / counts.sum()).to(torch.float64 if double else torch.float32).unbind()

    def _count(self, leaves: Sequence[Any]) -> Tensor:
        assert self._target is not None and self._ops is not None
        pairs = zip(self._graph.inputs, leaves, strict=True)
        tensors = {value: leaf for value, leaf in pairs if isinstance(value, Value)}
        tensors |= {v: t.to(self._devices.device) for v, t in self._graph.constants.items()}
        for op in self._ops:
            tensors.update(zip(op.outputs, run(op, tensors, self._devices.device), strict=True))
        count: Tensor = (tensors[self._target] != self._ignored).sum(dtype=torch.float64)
        return count


def arrival_axes(graph: Graph, decisions: Decisions) -> tuple[int, ...]:
    """The axes that cut the loss' targets as they arrive."""
    target, _ = _counted(graph)
    ops = ops_from_inputs(graph, [target]) if target is not None else None
    read = {target, *(value for op in ops or () for value in op.inputs)}
    cut = (decisions.arrivals.get(v.name, ()) for v in graph.input_values if v in read)
    return tuple(sorted({axis for dims in cut for axes in dims for axis in axes}))


def weighing_bytes(partitioned: Partitioned) -> int:
    """What a device of the last stage sends in a step to weigh the losses of micro-batches: the
    number of targets of each, where they arrive cut. A plan does not count it."""
    pipeline, mesh = partitioned.pipeline, partitioned.mesh
    axes = arrival_axes(partitioned.graph, partitioned.decisions)
    if pipeline.micro_batches == 1 or pipeline.loss_reduction == "sum":
        return 0
    size, local = mesh.size(axes), torch.float64.itemsize * pipeline.micro_batches
    return -(-2 * (size - 1) * local // size)


def weighs_by_targets(graph: Graph, op: Op) -> bool:
    """Whether `op` is the loss, by the number of whose targets micro-batches are weighed."""
    return _loss_op(graph) is op and _counted(graph)[0] is not None


def _loss_op(graph: Graph) -> Op | None:
    """What computes the loss, before it is cast or multiplied by a number."""
    op = graph.producer.get(graph.loss) if graph.loss is not None else None
    while op is not None and _scales(op):
        op = graph.producer.get(op.inputs[0])
    return op


def _scales(op: Op) -> bool:
    """Whether an operator casts its only tensor, or multiplies it by a number."""
    casts = op.short_name in ("to", "_to_copy", "mul", "div", "neg", "alias")
    return casts and len(op.inputs) == 1 and op.args[0] is op.inputs[0]


def _counted(graph: Graph) -> tuple[Value | None, int]:
    """The targets that a mean loss counts, and which of them it ignores."""
    op = _loss_op(graph)
    if op is None or op.short_name not in COUNTED_LOSSES:
        return None, 0
    arguments = call_arguments(op)
    target = arguments["target"]
    if (
        arguments["reduction"] != MEAN
        or arguments["weight"] is not None
        or target.dtype.is_floating_point
    ):
        return None, 0
    made_by = ops_from_inputs(graph, [target])
    if made_by is None or any(map(draws_random, made_by)):
        return None, 0
    return target, int(arguments["ignore_index"])
