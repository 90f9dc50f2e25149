"""The pipeline schedules, one entry each: all that the rest of the package knows of them.

To add a schedule of `torch.distributed.pipelining`, add its `ScheduleSpec` here. The order of its
actions, and with it the timeline and the activations alive, are read from PyTorch's class.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

from shardwright.errors import StrategyError

TorchSchedule = type[PipelineScheduleSingle] | type[PipelineScheduleMulti]


@dataclass(frozen=True)
class ScheduleSpec:
    """One pipeline schedule.

    Args:
        name: as users write it.
        torch_name: of the class in `torch.distributed.pipelining.schedules`.
        min_chunks, max_chunks: how many chunks of the model a stage owns; None is any number.
        v_shaped: whether chunks go down the stages and come back up, 0 1 1 0, instead of starting
            again at the first one, 0 1 0 1.
        equal_rounds: whether micro-batches come in rounds of equal size, about one micro-batch of
            a round for each stage.
        splits_backward: whether a backward pass runs in two parts, the gradients of a chunk's
            inputs before those of its parameters.
        reuses_messages: whether one message buffer in each direction serves all micro-batches.
        fallback: the schedule that runs a batch of fewer micro-batches than stages, where this one
            cannot.
        interleaved: the schedule that does the same with several chunks a stage, if there is one.
    """

    name: str
    torch_name: str
    min_chunks: int = 1
    max_chunks: int | None = 1
    v_shaped: bool = False
    equal_rounds: bool = False
    splits_backward: bool = False
    reuses_messages: bool = False
    fallback: str | None = None
    interleaved: str | None = None

    @property
    def chunked(self) -> bool:
        """Whether a stage owns several chunks."""
        return self.max_chunks != 1

    @property
    def valid_chunks(self) -> str:
        """The numbers of chunks that `allows_chunks`, in words."""
        return f"{self.min_chunks}" + (" or more" if self.max_chunks is None else "")

    def allows_chunks(self, chunks: int) -> bool:
        return self.min_chunks <= chunks and (self.max_chunks is None or chunks <= self.max_chunks)

    def stage_of(self, chunk: int, stages: int) -> int:
        """The stage that owns chunk number `chunk`, counted through the whole model."""
        turn, place = divmod(chunk, stages)
        return stages - 1 - place if self.v_shaped and turn % 2 else place

    def can_run(self, micro_batches: int, stages: int) -> bool:
        """Whether micro-batches can be divided into rounds as the schedule needs them."""
        rounds = max(1, micro_batches // stages)
        return not self.equal_rounds or micro_batches % rounds == 0

    def torch_class(self, micro_batches: int, stages: int) -> TorchSchedule:
        """PyTorch's class that runs so many micro-batches."""
        if self.fallback is not None and micro_batches < stages:
            return SCHEDULES[self.fallback].torch_class(micro_batches, stages)
        schedule_class: TorchSchedule = getattr(torch_schedules, self.torch_name)
        return schedule_class


SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        ScheduleSpec(
            "1f1b",
            "Schedule1F1B",
            reuses_messages=True,
            fallback="gpipe",
            interleaved="interleaved_1f1b",
        ),
        ScheduleSpec("gpipe", "ScheduleGPipe"),
        ScheduleSpec(
            "interleaved_1f1b",
            "ScheduleInterleaved1F1B",
            min_chunks=2,
            max_chunks=None,
            equal_rounds=True,
            interleaved="interleaved_1f1b",
        ),
        ScheduleSpec(
            "zero_bubble_v",
            "ScheduleZBVZeroBubble",
            min_chunks=2,
            max_chunks=2,
            v_shaped=True,
            splits_backward=True,
        ),
        ScheduleSpec(
            "interleaved_zero_bubble",
            "ScheduleInterleavedZeroBubble",
            min_chunks=2,
            max_chunks=None,
            equal_rounds=True,
            splits_backward=True,
        ),
    )
}
"""By name, the default first."""


def schedule_spec(name: str, argument: str = "schedule") -> ScheduleSpec:
    """The schedule called `name`.

    Args:
        argument: what the user calls it.

    Raises:
        StrategyError: if there is none; lists the names.
    """
    if name not in SCHEDULES:
        raise StrategyError(f"{argument}={name!r}: valid are {', '.join(SCHEDULES)}")
    return SCHEDULES[name]
