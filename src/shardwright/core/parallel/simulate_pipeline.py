"""A training step of a model in pipeline stages, on the simulated ranks of one stage.

The chunks run one after the other on the same ranks, all micro-batches forward and then backward,
and hand each other what real stages send. What each stage would send is counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.core.lower.program import lower
from shardwright.core.parallel.pipeline_stage import StageModule, StepContext
from shardwright.core.parallel.simulate_ranks import ByteCounter, Outcome, simulated_ranks
from shardwright.core.parallel.train_step import StepInputs, StepResults, loss_weight
from shardwright.core.parallel.whole_batch_values import WholeBatchValues
from shardwright.core.partition.chunk import Chunk
from shardwright.core.partition.partitioned import Partitioned
from shardwright.core.runtime.devices import Devices


def simulate_stages(
    partitioned: Partitioned,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    inputs: Sequence[Any],
    *,
    seed: int = 0,
) -> Outcome:
    """One training step of all stages on the ranks of one.

    Args:
        partitioned: a model with a loss.
        parameters, buffers: whole tensors by name.
        inputs: leaves of the call's arguments, with the whole batch.
    """
    with simulated_ranks(partitioned) as ranks:
        chain = _Chain(ranks.partitioned, ranks.devices)
        placed = StepInputs(*ranks.place_all(parameters, buffers, inputs), seed)
        loss, gradients, updates = chain.train(placed)
        total = ranks.whole(loss, partitioned.mesh.replicated(0), ())
        sent = [(forward, backward) for forward, backward in chain.sent]
        return ranks.outcome([total], gradients, updates, sent)


@dataclass
class _SimulatedChunk:
    """One chunk's forward pass of one micro-batch."""

    arrived: tuple[Tensor, ...]
    left: tuple[Tensor, ...]


class _Chain:
    """All chunks on one set of devices."""

    def __init__(self, partitioned: Partitioned, devices: Devices) -> None:
        self.partitioned = partitioned
        graph, pipeline = partitioned.graph, partitioned.pipeline
        self.modules = [
            StageModule(chunk, lower(chunk, devices, unsharded=True), graph)
            for chunk in partitioned.chunks
        ]
        self.sent = [[0, 0] for _ in range(pipeline.stages)]
        self._whole_batch = WholeBatchValues(partitioned, devices)

    def train(self, inputs: StepInputs) -> StepResults:
        """As `RankStages.train`."""
        count = self.partitioned.pipeline.micro_batches
        step = StepContext.of(inputs, count, self._whole_batch)
        weight = loss_weight(self.partitioned)
        for module in self.modules:
            with self._counted(module.chunk, 0):
                module.begin_step(step, inputs)
        runs = [self._forward(number) for number in range(count)]
        losses = []
        for run in runs:
            loss = run[-1].left[0] * weight
            losses.append(loss.detach())
            self._backward(run, loss)
        return torch.stack(losses).sum(), self._gradients(), inputs.changed(step.buffers)

    def _forward(self, number: int) -> list[_SimulatedChunk]:
        """All chunks forward."""
        runs: list[_SimulatedChunk] = []
        for module in self.modules:
            before = runs[-1].left if runs else ()
            arrived = tuple(t.detach().requires_grad_(t.requires_grad) for t in before)
            with self._counted(module.chunk, 0):
                left = module(*arrived, number=number)
            runs.append(_SimulatedChunk(arrived, left if isinstance(left, tuple) else (left,)))
            if module.chunk.leaving and self._goes_on(module.chunk.number):
                self.sent[module.chunk.stage][0] += _bytes(runs[-1].left)
        return runs

    def _backward(self, runs: list[_SimulatedChunk], loss: Tensor) -> None:
        """All chunks backward, the last first."""
        outputs: tuple[Tensor, ...] = (loss,)
        gradients: tuple[Tensor | None, ...] = (None,)
        for module, run in zip(reversed(self.modules), reversed(runs), strict=True):
            ends = [(t, g) for t, g in zip(outputs, gradients, strict=True) if t.requires_grad]
            if ends:
                with self._counted(module.chunk, 1):
                    torch.autograd.backward([t for t, _ in ends], [g for _, g in ends])
            wanted = [tensor for tensor in run.arrived if tensor.requires_grad]
            if module.chunk.number and self._goes_on(module.chunk.number - 1):
                self.sent[module.chunk.stage][1] += _bytes(wanted)
            # Where no gradient came, real stages send zeros.
            gradients = tuple(
                torch.zeros_like(t) if t.requires_grad and t.grad is None else t.grad
                for t in run.arrived
            )
            outputs = runs[module.chunk.number - 1].left

    def _gradients(self) -> dict[str, Tensor]:
        """Of the stored shards, summed over the chunks."""
        total: dict[str, Tensor] = {}
        for module in self.modules:
            with self._counted(module.chunk, 1):
                gradients = module.unsharded.end_step()
            for name, gradient in gradients.items():
                total[name] = total[name] + gradient if name in total else gradient
        for name, stages in self.partitioned.stages_of_parameters.items():
            if name in total and len(stages) > 1:
                for stage in stages:
                    sent = 2 * (len(stages) - 1) * _bytes([total[name]])
                    self.sent[stage][1] += -(-sent // len(stages))
        return total

    def _goes_on(self, number: int) -> bool:
        """Whether the chunk after `number` lies on another stage."""
        chunks = self.partitioned.chunks
        return chunks[number].stage != chunks[number + 1].stage

    @contextmanager
    def _counted(self, chunk: Chunk, direction: int) -> Iterator[None]:
        with ByteCounter() as counter:  # type: ignore[no-untyped-call]
            yield
        self.sent[chunk.stage][direction] += counter.sent


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
