"""Simulate a training step with pipeline stages on the simulated ranks of one stage.

All chunks run on the same ranks, one after another: all micro-batches forward, then all backward,
as in GPipe. Each chunk passes its results to the next chunk, and the bytes of results that would
cross stages are counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.core.lower.emit_program import lower
from shardwright.core.parallel.byte_counter import ByteCounter
from shardwright.core.parallel.simulate_ranks import Outcome, simulated_ranks
from shardwright.core.parallel.stage_module import StageModule, StepContext
from shardwright.core.parallel.train_step import StepInputs, StepResults, loss_weight
from shardwright.core.parallel.whole_batch_values import GlobalBatchValues
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
    """Run one training step of all stages on the ranks of one stage.

    Args:
        partitioned: the partitioned model, which returns a loss.
        parameters, buffers: full tensors by name.
        inputs: leaves of the call's arguments, for the global batch.
        seed: random seed of the step.
    """
    with simulated_ranks(partitioned) as ranks:
        chunks = _ChunkSequence(ranks.partitioned, ranks.devices)
        step_inputs = StepInputs(
            *ranks.shard_inputs(parameters, buffers, inputs), seed, partitioned.pipeline.batch_dims
        )
        results = chunks.train(step_inputs)
        total = ranks.assemble(results.loss, partitioned.mesh.replicated(0), ())
        sent = [(forward, backward) for forward, backward in chunks.sent]
        return ranks.outcome([total], results.gradients, results.buffers, sent)


@dataclass
class _ForwardPassOfChunk:
    """Tensors of one chunk in the forward pass of one micro-batch: received and returned."""

    received: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


class _ChunkSequence:
    """All chunks of a model, run one after another on one set of devices.

    Args:
        partitioned: the partitioned model.
        devices: the devices of one stage.

    Attributes:
        sent: communication volume of one device of each stage in bytes: [forward, backward].
    """

    def __init__(self, partitioned: Partitioned, devices: Devices) -> None:
        self.partitioned = partitioned
        graph, pipeline = partitioned.graph, partitioned.pipeline
        self.modules = [
            StageModule(chunk, lower(chunk, devices, unsharded=True), graph)
            for chunk in partitioned.chunks
        ]
        self.sent = [[0, 0] for _ in range(pipeline.stages)]
        # All chunks run in this process, so all buffers are read here.
        self._whole_batch = GlobalBatchValues(partitioned, devices)

    def train(self, inputs: StepInputs) -> StepResults:
        """Run forward and backward over all micro-batches."""
        count = self.partitioned.pipeline.micro_batches
        step = StepContext.of(inputs, self.partitioned, self._whole_batch)
        weight = loss_weight(self.partitioned)
        for module in self.modules:
            with self._count_communication_bytes(module.chunk, 0):
                # Starts the gathers of parameters that are gathered once per step.
                module.begin_step(step, inputs)
        # The order of passes changes no value and no byte; only their times.
        runs = [self._run_forward_of_all_chunks(number) for number in range(count)]
        losses = []
        for run in runs:
            # As the loss function of a schedule (`RankStages._multiply_by_loss_weight`).
            loss = run[-1].outputs[0] * weight
            losses.append(loss.detach())
            self._run_backward_of_all_chunks(run, loss)
        total = torch.stack(losses).sum()
        return StepResults(total, self._end_step_and_sum_gradients(), step.buffers.end_step(), {})

    def _run_forward_of_all_chunks(self, micro_batch: int) -> list[_ForwardPassOfChunk]:
        """Run all chunks forward for one micro-batch."""
        runs: list[_ForwardPassOfChunk] = []
        for module in self.modules:
            previous_outputs = runs[-1].outputs if runs else ()
            # Detached: each stage has an autograd graph of its own, as on real ranks.
            received = tuple(t.detach().requires_grad_(t.requires_grad) for t in previous_outputs)
            with self._count_communication_bytes(module.chunk, 0):
                outputs = module(*received, number=micro_batch)
            runs.append(
                _ForwardPassOfChunk(received, outputs if isinstance(outputs, tuple) else (outputs,))
            )
            # Consecutive chunks may be on one stage, as at the turn of a V-shaped schedule.
            if module.chunk.leaving and self._is_next_chunk_on_another_stage(module.chunk.number):
                self.sent[module.chunk.stage][0] += _count_bytes(runs[-1].outputs)
        return runs

    def _run_backward_of_all_chunks(self, runs: list[_ForwardPassOfChunk], loss: Tensor) -> None:
        """Run all chunks backward, starting from the last."""
        starts: tuple[Tensor, ...] = (loss,)
        gradients: tuple[Tensor | None, ...] = (None,)
        for module, run in zip(reversed(self.modules), reversed(runs), strict=True):
            # Integer and frozen tensors that cross the boundary have no backward pass.
            roots = [(t, g) for t, g in zip(starts, gradients, strict=True) if t.requires_grad]
            if roots:
                with self._count_communication_bytes(module.chunk, 1):
                    torch.autograd.backward([t for t, _ in roots], [g for _, g in roots])
            trained = [tensor for tensor in run.received if tensor.requires_grad]
            if module.chunk.number and self._is_next_chunk_on_another_stage(
                module.chunk.number - 1
            ):
                self.sent[module.chunk.stage][1] += _count_bytes(trained)
            # Real stages send zeros for a missing gradient, as the previous stage waits for one.
            gradients = tuple(
                torch.zeros_like(t) if t.requires_grad and t.grad is None else t.grad
                for t in run.received
            )
            # Chunk 0 is the last of this loop, so its index -1 is not used.
            starts = runs[module.chunk.number - 1].outputs

    def _end_step_and_sum_gradients(self) -> dict[str, Tensor]:
        """End the step; return the gradients of local shards, summed over chunks and stages, by
        name."""
        total: dict[str, Tensor] = {}
        for module in self.modules:
            with self._count_communication_bytes(module.chunk, 1):
                gradients = module.unsharded.end_step()
            for name, gradient in gradients.items():
                # Chunks of one stage, and several stages, may share a parameter.
                total[name] = total[name] + gradient if name in total else gradient
        for name, stages in self.partitioned.stages_of_parameters.items():
            if name in total and len(stages) > 1:
                # The stages of a shared parameter all-reduce its gradient.
                for stage in stages:
                    sent = 2 * (len(stages) - 1) * _count_bytes([total[name]])
                    # A ring all-reduce sends 2 (n-1)/n of the bytes, rounded up like the plan's.
                    self.sent[stage][1] += -(-sent // len(stages))
        return total

    def _is_next_chunk_on_another_stage(self, chunk_index: int) -> bool:
        """Whether the chunk after the chunk with index `chunk_index` is on another stage."""
        chunks = self.partitioned.chunks
        return chunks[chunk_index].stage != chunks[chunk_index + 1].stage

    @contextmanager
    def _count_communication_bytes(self, chunk: Chunk, direction: int) -> Iterator[None]:
        """Within the context, add communicated bytes to `sent` of the chunk's stage.

        Args:
            chunk: the running chunk.
            direction: 0 for forward, 1 for backward.
        """
        with ByteCounter() as counter:  # type: ignore[no-untyped-call]
            yield
        self.sent[chunk.stage][direction] += counter.sent


def _count_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
