"""A training step of a model in pipeline stages, on the simulated ranks of one stage.

The parts run one after the other on the same ranks, all micro-batches forward and then backward,
and hand each other what real stages send. What each stage would send is counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardwright.graph.graph import Graph, Value
from shardwright.layout.layout import Layout, TensorLayout
from shardwright.lower.program import lower
from shardwright.parallel.pipeline_stage import StageModule, StepContext
from shardwright.parallel.simulate_ranks import ByteCounter, Outcome, Ranks, simulated_devices
from shardwright.parallel.train_step import LossWeights, arrival_axes
from shardwright.partition.decisions import Decisions
from shardwright.partition.pipeline_spec import PipelineSpec
from shardwright.partition.stages import Chunk, chunks, stages_of_parameters
from shardwright.runtime.devices import Devices
from shardwright.runtime.micro_batches import micro_batch


@dataclass
class StagesOutcome(Outcome):
    """What a simulated step of all stages gave.

    Args:
        stage_bytes: for each stage what one of its devices sent, forward and backward.
    """

    stage_bytes: list[list[int]] = field(default_factory=list)


def simulate_stages(
    graph: Graph,
    layout: Layout,
    decisions: Decisions,
    pipeline: PipelineSpec,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    inputs: Sequence[Any],
    *,
    seed: int = 0,
) -> StagesOutcome:
    """One training step of all stages on `layout.num_devices` ranks.

    Args:
        graph: for one micro-batch; it has a loss.
        layout: of one stage.
        parameters, buffers: whole tensors by name.
        inputs: leaves of the call's arguments, with the whole batch.
    """
    with torch.random.fork_rng(), simulated_devices(layout) as (devices, mode):
        ranks = Ranks(layout, mode)
        graph = ranks.with_constants(graph)
        chain = _Chain(graph, devices, decisions, pipeline)
        stored = {v.name: TensorLayout(layout, decisions.storage[v.name]) for v in graph.parameters}
        shards = {name: ranks.place(parameters[name], where) for name, where in stored.items()}
        state = {
            v.name: ranks.place(buffers[v.name], layout.replicated(len(v.shape)))
            for v in graph.buffers
        }
        leaves = [
            ranks.place(leaf, _arrival(value, layout, decisions))
            if isinstance(value, Value)
            else leaf
            for value, leaf in zip(graph.inputs, inputs, strict=True)
        ]
        loss, gradients, updates = chain.run(shards, state, leaves, seed)
        shapes = {v.name: v.shape for v in (*graph.parameters, *graph.buffers)}
        forward, backward = max(chain.sent, key=sum)
        return StagesOutcome(
            outputs=[ranks.whole(loss, layout.replicated(0), ())],
            gradients={
                name: ranks.whole(gradient, stored[name], shapes[name])
                for name, gradient in gradients.items()
            },
            updates={
                name: ranks.whole(t, layout.replicated(t.ndim), shapes[name])
                for name, t in updates.items()
            },
            replica_difference=ranks.difference,
            forward_bytes=forward,
            backward_bytes=backward,
            stage_bytes=chain.sent,
        )


def _arrival(value: Value, layout: Layout, decisions: Decisions) -> TensorLayout:
    whole = ((),) * len(value.shape)
    return TensorLayout(layout, tuple(decisions.arrivals.get(value.name, whole)))


@dataclass
class _SimulatedChunk:
    """One part's forward pass of one micro-batch."""

    arrived: tuple[Tensor, ...]
    left: tuple[Tensor, ...]


class _Chain:
    """All parts on one set of devices."""

    def __init__(
        self, graph: Graph, devices: Devices, decisions: Decisions, pipeline: PipelineSpec
    ) -> None:
        self.pipeline = pipeline
        self.parts = chunks(graph, devices.layout, decisions, pipeline)
        self.modules = [
            StageModule(
                part,
                lower(part.graph, devices, part.decisions, resident=True),
                graph,
                follows=pipeline.schedule_spec.splits_backward,
            )
            for part in self.parts
        ]
        self.sent = [[0, 0] for _ in range(pipeline.stages)]
        self._weights = LossWeights(graph, devices, arrival_axes(graph, decisions))

    def run(
        self,
        shards: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        leaves: Sequence[Any],
        seed: int,
    ) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        """As `Stages.train`."""
        count = self.pipeline.micro_batches
        pieces = [micro_batch(leaves, number, count) for number in range(count)]
        means = self.pipeline.loss_reduction == "mean"
        weights = self._weights(pieces) if means else [1.0] * count
        step = StepContext(pieces, dict(buffers), seed)
        for module in self.modules:
            module.step = step
            with self._counted(module.part, 0):
                read = module.part.graph.parameters
                module.residents.begin({v.name: shards[v.name] for v in read})
        runs = [self._forward(number) for number in range(count)]
        losses = []
        for run, weight in zip(runs, weights, strict=True):
            loss = run[-1].left[0] * weight
            losses.append(loss.detach())
            self._backward(run, loss)
        changed = {name: t for name, t in step.buffers.items() if t is not buffers[name]}
        return torch.stack(losses).sum(), self._gradients(), changed

    def _forward(self, number: int) -> list[_SimulatedChunk]:
        """All parts forward."""
        runs: list[_SimulatedChunk] = []
        for module in self.modules:
            before = runs[-1].left if runs else ()
            arrived = tuple(t.detach().requires_grad_(t.requires_grad) for t in before)
            with self._counted(module.part, 0):
                left = module(*arrived, number=number)
            runs.append(_SimulatedChunk(arrived, left if isinstance(left, tuple) else (left,)))
            if module.part.leaving and self._goes_on(module.part.number):
                self.sent[module.part.stage][0] += _bytes(runs[-1].left)
        return runs

    def _backward(self, runs: list[_SimulatedChunk], loss: Tensor) -> None:
        """All parts backward, the last first."""
        made: tuple[Tensor, ...] = (loss,)
        gradients: tuple[Tensor | None, ...] = (None,)
        for module, run in zip(reversed(self.modules), reversed(runs), strict=True):
            ends = [(t, g) for t, g in zip(made, gradients, strict=True) if t.requires_grad]
            if ends:
                with self._counted(module.part, 1):
                    torch.autograd.backward([t for t, _ in ends], [g for _, g in ends])
            wanted = [tensor for tensor in run.arrived if tensor.requires_grad]
            if module.part.number and self._goes_on(module.part.number - 1):
                self.sent[module.part.stage][1] += _bytes(wanted)
            # Where no gradient came, real stages send zeros.
            gradients = tuple(
                torch.zeros_like(t) if t.requires_grad and t.grad is None else t.grad
                for t in run.arrived
            )
            made = runs[module.part.number - 1].left

    def _gradients(self) -> dict[str, Tensor]:
        """Of the stored shards, summed over the parts."""
        total: dict[str, Tensor] = {}
        for module in self.modules:
            with self._counted(module.part, 1):
                found = module.residents.end()
            for name, gradient in found.items():
                total[name] = total[name] + gradient if name in total else gradient
        for name, stages in stages_of_parameters(self.parts).items():
            if name in total and len(stages) > 1:
                for stage in stages:
                    sent = 2 * (len(stages) - 1) * _bytes([total[name]])
                    self.sent[stage][1] += -(-sent // len(stages))
        return total

    def _goes_on(self, number: int) -> bool:
        """Whether the part after `number` lies on another stage."""
        return self.parts[number].stage != self.parts[number + 1].stage

    @contextmanager
    def _counted(self, part: Chunk, direction: int) -> Iterator[None]:
        with ByteCounter() as counter:  # type: ignore[no-untyped-call]
            yield
        self.sent[part.stage][direction] += counter.sent


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
