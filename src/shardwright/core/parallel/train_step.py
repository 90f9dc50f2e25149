"""Training steps: forward and backward over all micro-batches of a batch.

`TrainStep` is the interface. `GradientAccumulation` implements it for a model in one stage, one
micro-batch after another, and `RankStages` (`pipeline_stage.py`) for several stages. In both,
micro-batches read values that `GlobalBatchValues` computes from the global batch
(`whole_batch_values.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwright.core.graph.graph import Graph, Value
from shardwright.core.lower.emit_program import lower
from shardwright.core.lower.program import Program
from shardwright.core.micro_batches.analysis import UPDATED_BY_RESULT
from shardwright.core.micro_batches.batch_norms import OF_BATCH_NORMS
from shardwright.core.micro_batches.buffer_updates import BufferUpdates
from shardwright.core.micro_batches.paired_graphs import DEPENDENCES_ON_SIZE
from shardwright.core.parallel.unsharded_parameters import UnshardedParameters
from shardwright.core.parallel.whole_batch_values import GlobalBatchValues, batch_reduction
from shardwright.core.partition.partitioned import Partitioned
from shardwright.core.runtime.collectives import wait
from shardwright.core.runtime.devices import Devices
from shardwright.core.runtime.micro_batches import SampleDims, micro_batch
from shardwright.core.runtime.random import micro_batch_seed
from shardwright.errors import MixedSamplesError, PlanError


@dataclass(frozen=True)
class StepInputs:
    """The inputs of a training step on this rank.

    Args:
        shards: local shards of the parameters of this rank's stage, by name.
        buffers: buffers by name.
        leaves: leaves of the call's arguments, for all micro-batches.
        seed: random seed of the step.
        batch_dims: batch dimension of each leaf; empty for dimension 0.
        outputs: names of the outputs that the step returns besides the loss.
    """

    shards: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    leaves: Sequence[Any]
    seed: int
    batch_dims: SampleDims = ()
    outputs: frozenset[str] = frozenset()

    def micro_batches(self, count: int) -> list[list[Any]]:
        """Split the leaves into `count` micro-batches."""
        return [micro_batch(self.leaves, index, count, self.batch_dims) for index in range(count)]


@dataclass(frozen=True)
class StepResults:
    """Results of a training step on this rank.

    Args:
        loss: the loss of the global batch, equal on all ranks.
        gradients: gradients of the local parameter shards, by name.
        buffers: updated buffers, by name.
        outputs: for each output in `StepInputs.outputs` that this rank's stage computes, by name,
            its local tensors of all micro-batches, detached.
    """

    loss: Tensor
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]
    outputs: dict[str, list[Tensor]]


class TrainStep(Protocol):
    """A training step on this rank, for one mode and one shape of the inputs."""

    @property
    def partitioned(self) -> Partitioned:
        """The partitioned model, with the number of micro-batches of the step."""

    def compile(self, compiler: Callable[[Program], Program]) -> None:
        """Replace each program by `compiler(program)`.

        Raises:
            PlanError: if the schedule cannot run compiled programs.
        """

    def train(self, inputs: StepInputs) -> StepResults:
        """Run forward and backward over all micro-batches, and reduce the gradients."""


def loss_of(graph: Graph) -> Value:
    """Return the loss, from which a training step starts its backward pass.

    Raises:
        PlanError: if the model returns no loss, or several.
    """
    if graph.loss is None:
        raise PlanError(
            "the model returns no loss: no scalar that requires a gradient\nreturn one "
            "from `forward`, or wrap the model: `sw.WithLoss(net, nn.CrossEntropyLoss())`"
        )
    if graph.other_losses:
        losses = [
            _describe_graph_value(graph, value) for value in (graph.loss, *graph.other_losses)
        ]
        raise PlanError(
            f"a training step trains one loss, but the model returns {len(losses)} scalars that"
            f" require a gradient: {', '.join(losses)}\nreturn their sum, return one of them under"
            " the key 'loss', or detach() the others; without pipeline stages and micro-batches,"
            " call the model and then backward() on any output"
        )
    return graph.loss


def check_loss_of_batch(graph: Graph, micro_batches: int) -> None:
    """Check that the loss of the global batch is a sum or mean of the micro-batches' losses.

    Args:
        graph: graph of one micro-batch; a graph without loss passes.
        micro_batches: number of micro-batches, for the message.

    Raises:
        PlanError: if the model returns several losses.
        MixedSamplesError: if the loss is neither a sum nor a mean; names the operator that mixes
            samples, and its line.
    """
    if graph.loss is None:
        return
    loss_of(graph)
    # `whole_batch` is the reason why the loss cannot be split, whose wording selects the advice:
    # from the most specific one to the last, which fits all.
    if isinstance(graph.whole_batch, str) and graph.whole_batch.endswith(OF_BATCH_NORMS):
        raise MixedSamplesError(
            f"micro_batches={micro_batches}: cannot split the batch: {graph.whole_batch}"
            "\nplan with batch_norm='per_micro_batch', which takes the statistics from each"
            " micro-batch, as gradient accumulation in PyTorch does; or with micro_batches=1"
            " (recompute='auto' saves memory)"
        )
    if isinstance(graph.whole_batch, str) and graph.whole_batch.endswith(DEPENDENCES_ON_SIZE):
        raise MixedSamplesError(
            f"micro_batches={micro_batches}: cannot split the batch: {graph.whole_batch}"
            "\ncompute all samples in one call instead of a loop over samples or chunks of the"
            " batch, without branches on the batch size; pass parts that the loss treats"
            " differently as separate inputs; name the batch dimension if it is not 0"
            " (`batch_dims={'x': 1}`); or plan with `micro_batches=1` (`recompute='auto'` saves"
            " memory)"
        )
    if isinstance(graph.whole_batch, str) and graph.whole_batch.endswith(UPDATED_BY_RESULT):
        raise MixedSamplesError(
            f"micro_batches={micro_batches}: cannot split the batch: {graph.whole_batch}"
            "\nupdate the buffer with means or sums over samples, or outside of `forward`;"
            " or plan with `micro_batches=1` (`recompute='auto'` saves memory)"
        )
    if isinstance(graph.whole_batch, str):
        raise MixedSamplesError(
            f"micro_batches={micro_batches}: the loss of the batch does not follow from the losses "
            f"of its micro-batches: {graph.whole_batch}\nreturn a sum of means and sums over "
            "samples, each divided only by values that follow from the inputs; plan with "
            "`micro_batches=1` (`recompute='auto'` saves memory); name the batch dimension if it "
            "is not 0 (`batch_dims={'x': 1}`); or, to train the sum of the micro-batches' "
            f"losses, plan `sw.Pipeline(net, {micro_batches}, loss_reduction='sum')`"
        )


def loss_weight(partitioned: Partitioned) -> float:
    """Return the weight of each micro-batch's loss in the loss of the global batch."""
    # `loss_reduction="sum"` trains the sum of the losses, even if the analysis found a mean.
    pipeline = partitioned.pipeline
    averages = batch_reduction(partitioned.graph).reduction == "mean"
    return 1 / pipeline.micro_batches if averages and pipeline.averages_micro_batches else 1.0


def _describe_graph_value(graph: Graph, value: Value) -> str:
    op = graph.producer.get(value)
    return f"{value.name!r} ({op.source})" if op is not None and op.source else repr(value.name)


class GradientAccumulation:
    """A training step in one stage: micro-batches run one after another, and gradients accumulate.

    Args:
        partitioned: the partitioned model, in one stage.
        devices: this rank's view of the devices.

    Raises:
        PlanError: if the model has no loss.
    """

    def __init__(self, partitioned: Partitioned, devices: Devices) -> None:
        graph, pipeline = partitioned.graph, partitioned.pipeline
        self._loss = loss_of(graph)
        self.partitioned = partitioned
        self.micro_batches = pipeline.micro_batches
        (chunk,) = partitioned.chunks
        # The program of a single micro-batch contains the gathers, so that they overlap computation
        # at every ZeRO level.
        current = graph.python.current if graph.python is not None else frozenset()
        unsharded = self.micro_batches > 1
        self.program = lower(chunk, devices, unsharded, pending_loss=True, python_state=current)
        self.unsharded = UnshardedParameters(self.program)
        self._whole_batch = GlobalBatchValues(partitioned, devices)
        self._waits = devices.waits
        self._weight = loss_weight(partitioned)
        # The first position, as a model may return its loss several times.
        self._loss_index = next(i for i, value in enumerate(graph.outputs) if value is self._loss)

    def compile(self, compiler: Callable[[Program], Program]) -> None:
        self.program = compiler(self.program)

    def train(self, inputs: StepInputs) -> StepResults:
        results = self.run(inputs)
        return replace(results, gradients=self.unsharded.end_step())

    def _collect_outputs(
        self, outputs: Sequence[Any], collected: Mapping[str, list[Tensor]]
    ) -> None:
        """Append the outputs of a micro-batch to `collected`, by name."""
        # A function, as a variable of `run` would keep its last output during the backward pass.
        for value, tensor in zip(self.partitioned.graph.outputs, outputs, strict=True):
            # The pending loss is waited for after the last micro-batch.
            if value is not self._loss and isinstance(value, Value) and value.name in collected:
                collected[value.name].append(tensor.detach())

    def run(self, inputs: StepInputs) -> StepResults:
        """Run the forward and backward passes of all micro-batches.

        The gradients are not part of the results: `self.unsharded.end_step()` reduces them.
        """
        micro_batch_leaves = inputs.micro_batches(self.micro_batches)
        buffer_updates = self.partitioned.graph.updates
        self.unsharded.begin_step(inputs.shards)
        global_batch_values = self._whole_batch(inputs.leaves, inputs.buffers)
        buffers, pending_losses = BufferUpdates(self.partitioned.graph, inputs.buffers), []
        collected: dict[str, list[Tensor]] = {name: [] for name in inputs.outputs}
        for index, (leaves, values) in enumerate(
            zip(micro_batch_leaves, global_batch_values, strict=True)
        ):
            parameters = self.unsharded.tensors()
            outputs, updates = self.program(
                parameters,
                {**buffers.values, **values},
                leaves,
                micro_batch_seed(inputs.seed, index),
            )
            loss: Tensor = outputs[self._loss_index]
            self._collect_outputs(outputs, collected)
            # Frees other outputs, such as logits, before the backward pass.
            del outputs
            if loss.requires_grad:
                # The weight as the gradient of the loss: a product would have to wait for the
                # pending loss.
                loss.backward(torch.full_like(loss, self._weight))  # type: ignore[no-untyped-call]
            pending_losses.append(loss.detach())
            buffers.add((b.name, t) for (b, _), t in zip(buffer_updates, updates, strict=True))
        # The all-reduces of losses are waited for only now (`pending_loss`), so that no backward
        # pass waits for slower ranks.
        losses = [wait(loss, self._waits) for loss in pending_losses]
        if self._loss.name in collected:
            collected[self._loss.name] = losses
        total = torch.stack([loss * self._weight for loss in losses]).sum()
        return StepResults(total, {}, buffers.end_step(), collected)
