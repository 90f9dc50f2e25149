"""Division of a model into pipeline stages and of its batch into micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from shardwright.core.micro_batches.batch_norms import WHOLE_BATCH
from shardwright.core.partition.schedules import SCHEDULES, ScheduleSpec

AUTO: Literal["auto"] = "auto"
"""Value of an option that lets the planner choose."""

REDUCTIONS = ("mean", "sum")


@dataclass(frozen=True)
class PipelineSpec:
    """Stages and micro-batches of a plan.

    Operators are divided into *chunks*, numbered in model order. Each stage runs the same number of
    chunks, and has the same number of devices.

    Args:
        stages: number of stages.
        micro_batches: number of micro-batches per step.
        schedule: name of a schedule in `SCHEDULES`.
        chunks: number of chunks per stage.
        chunk_of: chunk index of each operator, by operator name; empty with a single chunk.
        loss_reduction: reduction over the losses of micro-batches, `mean` or `sum`.
        batch_dims: dimension of each leaf of the model's arguments that is split into
            micro-batches; None for a leaf that is not split. If empty, dimension 0 is split in all
            leaves that have the same size there as the first leaf.
        batch_norm: samples over which batch norms compute statistics, one of `BATCH_NORMS`.
    """

    stages: int = 1
    micro_batches: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    chunk_of: Mapping[str, int] = field(default_factory=dict)
    loss_reduction: str = "mean"
    batch_dims: tuple[int | None, ...] = ()
    batch_norm: str = WHOLE_BATCH

    @property
    def schedule_spec(self) -> ScheduleSpec:
        """Properties of the pipeline schedule named by `schedule`."""
        return SCHEDULES[self.schedule]

    @property
    def averages_micro_batches(self) -> bool:
        """Whether the loss of a step is the mean over several micro-batches."""
        # A single micro-batch is the full batch, whose loss is the mean already.
        return self.micro_batches > 1 and self.loss_reduction == "mean"

    @property
    def sums_micro_batches(self) -> bool:
        """Whether the loss of a step is the sum of the losses of several micro-batches, as if the
        model were called once per micro-batch."""
        return self.micro_batches > 1 and not self.averages_micro_batches

    @property
    def num_chunks(self) -> int:
        """Number of chunks of all stages."""
        return self.stages * self.chunks

    def can_run(self, micro_batches: int) -> bool:
        """Whether the schedule can run `micro_batches` micro-batches over its stages."""
        return self.schedule_spec.can_run(micro_batches, self.stages)

    def stage_of(self, chunk: int) -> int:
        """Return the index of the stage that runs a chunk, given the chunk's index in model
        order."""
        return self.schedule_spec.stage_of(chunk, self.stages)


# Chunk 0 has all operators, so `chunk_of` stays empty.
ONE_STAGE = PipelineSpec()
