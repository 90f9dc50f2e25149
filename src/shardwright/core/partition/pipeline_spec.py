"""How a model is divided into pipeline stages, and in which order they work on micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from shardwright.core.partition.schedules import SCHEDULES, ScheduleSpec

AUTO: Literal["auto"] = "auto"
"""A number of stages that the planner chooses."""

REDUCTIONS = ("mean", "sum")


@dataclass(frozen=True)
class PipelineSpec:
    """Stages and micro-batches of a plan.

    The operators are divided into *chunks*, numbered in the order in which they run. Each stage
    owns `chunks` of them, and as many devices as any other.

    Args:
        stages: groups of devices.
        micro_batches: pieces of the batch that follow each other through the stages.
        schedule: the name of one of `SCHEDULES`.
        chunks: how many each stage owns.
        chunk_of: for each operator the number of its chunk; empty if there is only one.
        loss_reduction: of the micro-batches' losses to the loss of the batch, `mean` or `sum`.
    """

    stages: int = 1
    micro_batches: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    chunk_of: Mapping[str, int] = field(default_factory=dict)
    loss_reduction: str = "mean"

    @property
    def schedule_spec(self) -> ScheduleSpec:
        """All that is known of the schedule."""
        return SCHEDULES[self.schedule]

    @property
    def averages_micro_batches(self) -> bool:
        """Whether the mean of the losses of several micro-batches stands for that of the batch."""
        return self.micro_batches > 1 and self.loss_reduction == "mean"

    @property
    def num_chunks(self) -> int:
        return self.stages * self.chunks

    def can_run(self, micro_batches: int) -> bool:
        """Whether the schedule can run so many."""
        return self.schedule_spec.can_run(micro_batches, self.stages)

    def stage_of(self, chunk: int) -> int:
        """The stage that owns `chunk`."""
        return self.schedule_spec.stage_of(chunk, self.stages)


ONE_STAGE = PipelineSpec()
