"""Registry of pipeline schedules.

To add a schedule of `torch.distributed.pipelining`, add its `ScheduleSpec` here; a schedule that
PyTorch does not have also needs its class in `OWN_SCHEDULES`. Timeline and live activations are
derived from the order of passes of the class.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.core.torch_internals.pipelining import TorchSchedule, schedule_class
from shardwright.errors import StrategyError


@dataclass(frozen=True)
class ScheduleSpec:
    """Properties of a pipeline schedule.

    Args:
        name: value of the option `schedule`.
        torch_name: name of the class in `torch.distributed.pipelining.schedules` or
            `OWN_SCHEDULES`.
        min_chunks, max_chunks: minimum and maximum number of chunks per stage; None for no maximum.
        min_rounds: minimum number of micro-batches per stage that a plan must have.
        v_shaped: whether two stages run chunks in the order 0 1 1 0 instead of 0 1 0 1.
        equal_rounds: whether the micro-batches must divide into `micro_batches // stages` rounds of
            equal size, as PyTorch's interleaved schedules require.
        splits_backward: whether the backward pass runs in two passes: gradients of inputs, then of
            parameters.
        fallback: name of the schedule that runs a call with fewer micro-batches than
            `min_micro_batches`; None if this schedule runs them.
        interleaved: name of the schedule that replaces this schedule with several chunks per stage;
            None without a replacement.
    """

    name: str
    torch_name: str
    min_chunks: int = 1
    max_chunks: int | None = 1
    min_rounds: int = 1
    v_shaped: bool = False
    equal_rounds: bool = False
    splits_backward: bool = False
    fallback: str | None = None
    interleaved: str | None = None

    @property
    def allows_several_chunks(self) -> bool:
        """Whether a stage may run several chunks."""
        return self.max_chunks != 1

    @property
    def valid_chunks(self) -> str:
        """Valid numbers of chunks per stage for an error message, such as "2 or more"."""
        return f"{self.min_chunks}" + (" or more" if self.max_chunks is None else "")

    def allows_chunks(self, chunks: int) -> bool:
        """Whether a stage may run `chunks` chunks."""
        return self.min_chunks <= chunks and (self.max_chunks is None or chunks <= self.max_chunks)

    def stage_of(self, chunk: int, stages: int) -> int:
        """Return the index of the stage that runs a chunk, given the chunk's index in model order.

        Args:
            stages: number of stages.
        """
        # In a V-shaped schedule every second pass over the stages is in reverse order, so that the
        # two chunks at a turn are on the same stage (Qi et al., arXiv:2401.10241, section 6).
        pass_index, stage = divmod(chunk, stages)
        return stages - 1 - stage if self.v_shaped and pass_index % 2 else stage

    def min_micro_batches(self, stages: int) -> int:
        """Return the minimum number of micro-batches of a plan with `stages` stages."""
        return self.min_rounds * stages

    def can_run(self, micro_batches: int, stages: int) -> bool:
        """Whether the schedule, or its fallback, can run `micro_batches` micro-batches over
        `stages` stages."""
        # The condition that PyTorch's interleaved schedules check.
        rounds = max(1, micro_batches // stages)
        return not self.equal_rounds or micro_batches % rounds == 0

    def torch_class(self, micro_batches: int, stages: int) -> TorchSchedule:
        """Return the schedule class for the numbers of micro-batches and stages."""
        if self.fallback is not None and micro_batches < self.min_micro_batches(stages):
            return SCHEDULES[self.fallback].torch_class(micro_batches, stages)
        return schedule_class(self.torch_name)


SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        ScheduleSpec(
            "1f1b",
            "Schedule1F1B",
            # PyTorch's class rejects fewer micro-batches than stages.
            fallback="gpipe",
            interleaved="interleaved_1f1b",
        ),
        # Huang et al., arXiv:1811.06965.
        ScheduleSpec("gpipe", "ScheduleGPipe"),
        ScheduleSpec(
            # Narayanan et al., arXiv:2104.04473, section 2.2.
            "interleaved_1f1b",
            "ScheduleInterleaved1F1B",
            min_chunks=2,
            max_chunks=None,
            equal_rounds=True,
            interleaved="interleaved_1f1b",
        ),
        ScheduleSpec(
            # Qi et al., arXiv:2401.10241, section 6: two chunks, one on the way down the V and one
            # up.
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
        ScheduleSpec(
            # DualPipe (DeepSeek-V3, arXiv:2412.19437), cut in half.
            "dualpipe_v",
            "ScheduleDualPipeV",
            min_chunks=2,
            max_chunks=2,
            min_rounds=2,
            v_shaped=True,
            splits_backward=True,
            # PyTorch's class rejects fewer micro-batches than chunks.
            fallback="zero_bubble_v",
        ),
        # Breadth-first pipeline parallelism, Lamy-Poirier, arXiv:2211.05953.
        ScheduleSpec("looped_bfs", "ScheduleLoopedBFS", min_chunks=2, max_chunks=None),
    )
}
"""Pipeline schedules by name, the default first."""


def schedule_spec(name: str, argument: str = "schedule") -> ScheduleSpec:
    """Return the schedule called `name`.

    Args:
        argument: name of the option in errors.

    Raises:
        StrategyError: if the schedule is unknown; the message contains the valid names.
    """
    if name not in SCHEDULES:
        raise StrategyError(
            f"{argument}={name!r}: must be one of {', '.join(SCHEDULES)}\n"
            "omit the option for the default"
        )
    return SCHEDULES[name]
