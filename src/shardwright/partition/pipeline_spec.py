"""How a model is divided into pipeline stages, and in which order they work on micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

SCHEDULES = ("1f1b", "gpipe", "interleaved_1f1b", "zero_bubble_v")

CHUNKED = ("interleaved_1f1b", "zero_bubble_v")
"""Schedules with several chunks a stage; the V has two."""

AUTO: Literal["auto"] = "auto"
"""A number of stages that the planner chooses."""

REDUCTIONS = ("mean", "sum")


@dataclass(frozen=True)
class PipelineSpec:
    """Stages and micro-batches of a plan.

    The operators are divided into *parts*, numbered in the order in which they run. Each stage owns
    an equal number of devices and `chunks` parts.

    Args:
        stages: groups of devices.
        micro_batches: pieces of the batch that follow each other through the stages.
        schedule: `1f1b`, `gpipe`, `interleaved_1f1b` or `zero_bubble_v`.
        chunks: parts that each stage owns.
        part_of: for each operator the number of its part; empty if there is only one.
        loss_reduction: of the micro-batches' losses to the loss of the batch, `mean` or `sum`.
    """

    stages: int = 1
    micro_batches: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    chunk_of: Mapping[str, int] = field(default_factory=dict)
    loss_reduction: str = "mean"

    @property
    def parts(self) -> int:
        return self.stages * self.chunks

    def can_run(self, micro_batches: int) -> bool:
        """Whether the schedule can run so many: interleaved, in rounds of equal length."""
        rounds = max(1, micro_batches // self.stages)
        return self.schedule != "interleaved_1f1b" or micro_batches % rounds == 0

    def stage_of(self, part: int) -> int:
        """The stage that owns `part`: in turn, for the V schedule there and back."""
        turn, place = divmod(part, self.stages)
        if self.schedule == "zero_bubble_v" and turn % 2 == 1:
            return self.stages - 1 - place
        return place


ONE_STAGE = PipelineSpec()
