"""Passes of a pipeline, in the order of the schedules of `torch.distributed.pipelining`, which run
the plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from operator import attrgetter
from typing import NamedTuple

from shardwright.core.partition.pipeline_spec import PipelineSpec
from shardwright.core.partition.schedules import SCHEDULES, ScheduleSpec
from shardwright.core.torch_internals.pipelining import planned_actions
from shardwright.errors import PlanError

FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT = "F", "B", "I", "W"
"""Types of passes, as in `torch.distributed.pipelining`: forward, full backward, and the two
halves of a split backward, for gradients of the chunk's inputs and of its parameters."""

PASS_TYPES = FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT


class Action(NamedTuple):
    """One pass of a chunk for one micro-batch.

    Attributes:
        chunk: index of the chunk in the model.
        pass_type: `F`, `B`, `I` or `W`: forward, full backward, input gradients or weight
            gradients.
        micro_batch: index of the micro-batch.
    """

    chunk: int
    pass_type: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.pass_type}{self.micro_batch}"


def check_pipelining(pipeline: PipelineSpec) -> None:
    """Check that the schedule of `pipeline` can run its numbers of stages, chunks and
    micro-batches.

    Raises:
        PlanError: if the schedule cannot run them; the message contains valid numbers.
    """
    stages, chunks, micro_batches = pipeline.stages, pipeline.chunks, pipeline.micro_batches
    for name, number in (("stages", stages), ("chunks", chunks), ("micro_batches", micro_batches)):
        # `True` is an integer in Python.
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise PlanError(
                f"{name}={number!r}: must be a whole number of at least 1\nuse {name}=1 or more"
            )
    # Also for one stage, which ignores the schedule: a misspelled name is an error.
    if pipeline.schedule not in SCHEDULES:
        raise PlanError(
            f"schedule={pipeline.schedule!r}: unknown schedule\nuse one of {', '.join(SCHEDULES)}"
        )
    if stages == 1:
        if chunks > 1:
            raise PlanError(
                f"chunks={chunks} with one stage: a model without stages is one chunk\n"
                "use 2 or more stages, or chunks=1"
            )
        # One stage runs no schedule, whose conditions on micro-batches and chunks follow.
        return
    if micro_batches < stages:
        raise PlanError(
            f"micro_batches={micro_batches} for {stages} stages: at any time at least one stage"
            " would be idle\n"
            f"use {stages} or more micro-batches, or {micro_batches} or fewer stages"
        )
    schedule = pipeline.schedule_spec
    if micro_batches < schedule.min_micro_batches(stages):
        raise PlanError(
            f"micro_batches={micro_batches} for {stages} stages: schedule {schedule.name!r} needs"
            f" {schedule.min_rounds} micro-batches per stage\n"
            f"use {schedule.min_micro_batches(stages)} or more micro-batches, or schedule"
            f" {schedule.fallback!r}"
        )
    _check_chunks(schedule, chunks)
    if not schedule.can_run(micro_batches, stages):
        # The next multiple of `stages` can run, if no smaller number can.
        more = next(
            n for n in range(micro_batches + 1, 2 * micro_batches) if schedule.can_run(n, stages)
        )
        raise PlanError(
            f"micro_batches={micro_batches} for {stages} stages: schedule {schedule.name!r} runs"
            f" micro-batches in {micro_batches // stages} rounds of equal size\n"
            f"use a multiple of {stages}, or {more}"
        )


def _check_chunks(schedule: ScheduleSpec, chunks: int) -> None:
    if schedule.allows_chunks(chunks):
        return
    *most, last = [name for name, other in SCHEDULES.items() if other.allows_several_chunks]
    more = "" if schedule.allows_several_chunks else f"; {', '.join(most)} and {last} take more"
    raise PlanError(
        f"chunks={chunks} in schedule {schedule.name!r}: not a valid number of chunks per stage\n"
        f"use {schedule.valid_chunks}{more}"
    )


def actions(pipeline: PipelineSpec) -> tuple[tuple[Action, ...], ...]:
    """Return the actions of each stage in the order in which the stage runs them.

    A single stage runs forward and backward of one micro-batch after another.

    Raises:
        PlanError: if the schedule cannot run this number of stages, chunks or micro-batches.
    """
    check_pipelining(pipeline)
    if pipeline.stages == 1:
        micro_batches = range(pipeline.micro_batches)
        return (tuple(Action(0, each, m) for m in micro_batches for each in (FORWARD, BACKWARD)),)
    return _actions_of_torch_schedule(
        pipeline.schedule_spec, pipeline.stages, pipeline.micro_batches, pipeline.chunks
    )


# Bounded: a search tries hundreds of pipelines, with up to a million actions each. To make those of
# one takes up to two seconds.
@lru_cache(maxsize=64)
def _actions_of_torch_schedule(
    schedule: ScheduleSpec, stages: int, micro_batches: int, chunks: int
) -> tuple[tuple[Action, ...], ...]:
    # `value` of an `Enum` takes longer than the rest of an action.
    pass_type_of = cache(attrgetter("value"))
    orders = planned_actions(
        schedule.torch_class(micro_batches, stages), stages, micro_batches, chunks
    )
    result = []
    for order in orders:
        stage_actions = [
            Action(each.stage_index, pass_type_of(each.computation_type), each.microbatch_index)
            for each in order
            # None is an idle time slot; other actions send, receive or gather parameters.
            if each is not None and each.is_compute_op and each.microbatch_index is not None
        ]
        # PyTorch's list for the last stage of 1F1B numbers forward passes from 1, although this
        # stage begins with micro-batch 0 like the others.
        first = min(each.micro_batch for each in stage_actions if each.pass_type == FORWARD)
        result.append(
            tuple(
                Action(each.chunk, each.pass_type, each.micro_batch - first)
                if first and each.pass_type == FORWARD
                else each
                for each in stage_actions
            )
        )
    return tuple(result)


def in_flight_counts(order: Sequence[Action]) -> Iterator[dict[int, int]]:
    """Yield, after each action of a stage, the number of micro-batches in flight by chunk.

    A micro-batch is in flight from its forward pass to the end of its backward pass.

    Args:
        order: actions of the stage in order.
    """
    counts = {action.chunk: 0 for action in order}
    for action in order:
        if action.pass_type == FORWARD:
            counts[action.chunk] += 1
        # After BACKWARD_INPUT, gradients of parameters still need the activations.
        elif action.pass_type in (BACKWARD, BACKWARD_WEIGHT):
            counts[action.chunk] -= 1
        yield dict(counts)
