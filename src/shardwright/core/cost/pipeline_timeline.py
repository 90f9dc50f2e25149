"""The order in which pipeline stages work, and how long they wait.

PyTorch's own schedules say in which order each stage runs its chunks, so that what is predicted is
what runs. The timeline follows from the seconds of each chunk: an action begins when its stage is
free and its inputs have arrived.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from shardwright.core.partition.pipeline_spec import PipelineSpec
from shardwright.core.partition.schedules import SCHEDULES, ScheduleSpec
from shardwright.core.torch_internals.pipelining import get_schedule_ops
from shardwright.errors import PlanError

FORWARD, BACKWARD, OF_INPUT, OF_WEIGHT = "F", "B", "I", "W"
"""Kinds of actions: forward, the whole backward pass, and its two halves: the gradients of
the chunk's inputs, and those of its parameters."""


@dataclass(frozen=True, order=True)
class Action:
    """What a stage does without pause: one pass of a chunk for one micro-batch.

    Args:
        chunk: its number, counted through the model.
        kind: `F`, `B`, `I` or `W`.
    """

    chunk: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}"


def check_pipelining(pipeline: PipelineSpec) -> None:
    """Raises:
    PlanError: if there is no such schedule for so many stages, chunks and micro-batches; says which
        numbers would do.
    """
    stages, chunks, pieces = pipeline.stages, pipeline.chunks, pipeline.micro_batches
    for name, number in (("stages", stages), ("chunks", chunks), ("micro_batches", pieces)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise PlanError(f"{name}={number!r}: must be a whole number of at least 1")
    if pipeline.schedule not in SCHEDULES:
        raise PlanError(f"schedule={pipeline.schedule!r}: valid are {', '.join(SCHEDULES)}")
    if stages == 1:
        if chunks > 1:
            raise PlanError(
                f"chunks={chunks} with one stage: a model without stages is one chunk; use 2 or"
                " more stages, or chunks=1"
            )
        return
    if pieces < stages:
        raise PlanError(
            f"micro_batches={pieces} for {stages} stages: some stages would always be idle; use"
            f" {stages} or more micro-batches, or {pieces} or fewer stages"
        )
    schedule = pipeline.schedule_spec
    _check_chunks(schedule, chunks)
    if not schedule.can_run(pieces, stages):
        more = next(n for n in range(pieces + 1, 2 * pieces) if schedule.can_run(n, stages))
        raise PlanError(
            f"micro_batches={pieces} for {stages} stages: schedule {schedule.name!r} runs them in"
            f" {pieces // stages} rounds of equal size; use a multiple of {stages}, or {more}"
        )


def _check_chunks(schedule: ScheduleSpec, chunks: int) -> None:
    if schedule.allows_chunks(chunks):
        return
    *most, last = [name for name, other in SCHEDULES.items() if other.chunked]
    more = "" if schedule.chunked else f"; {', '.join(most)} and {last} take more"
    raise PlanError(
        f"chunks={chunks} in schedule {schedule.name!r}: use {schedule.valid_chunks}{more}"
    )


def actions(pipeline: PipelineSpec) -> tuple[tuple[Action, ...], ...]:
    """For each stage its actions, in order. Without stages, forward and backward of one micro-batch
    after the other.

    Raises:
        PlanError: if there is no such schedule; see `check_pipelining`.
    """
    check_pipelining(pipeline)
    if pipeline.stages == 1:
        pieces = range(pipeline.micro_batches)
        return (tuple(Action(0, kind, m) for m in pieces for kind in (FORWARD, BACKWARD)),)
    return _torch_actions(
        pipeline.schedule_spec, pipeline.stages, pipeline.micro_batches, pipeline.chunks
    )


@cache
def _torch_actions(
    schedule: ScheduleSpec, stages: int, micro_batches: int, chunks: int
) -> tuple[tuple[Action, ...], ...]:
    orders = get_schedule_ops(
        schedule.torch_class(micro_batches, stages), stages, micro_batches, chunks
    )
    result = []
    for order in orders:
        # Micro-batches are counted anew: torch's list for the last stage of 1F1B begins with 1,
        # while that stage begins with 0 as the others do. All take them in turn.
        counts: dict[tuple[int, str], int] = {}
        mine = []
        for action in order:
            if action is None or not action.is_compute_op:
                continue
            kind = action.computation_type.value
            number = counts.get((action.stage_index, kind), 0)
            counts[action.stage_index, kind] = number + 1
            mine.append(Action(action.stage_index, kind, number))
        result.append(tuple(mine))
    return tuple(result)


def alive(order: Sequence[Action]) -> Iterator[dict[int, int]]:
    """After each action of a stage: for each of its chunks the micro-batches that went forward and
    not yet all the way back, whose activations it keeps."""
    counts = {action.chunk: 0 for action in order}
    for action in order:
        if action.kind == FORWARD:
            counts[action.chunk] += 1
        elif action.kind in (BACKWARD, OF_WEIGHT):
            counts[action.chunk] -= 1
        yield dict(counts)


@dataclass(frozen=True)
class ChunkSeconds:
    """What a chunk takes for one micro-batch.

    Args:
        backward: the whole backward pass.
        of_weight: the share of `backward` for the gradients of parameters, where a schedule runs
            the two halves apart; a half if None.
        send: from this chunk to the next, and the gradient back; nothing within a stage.
    """

    forward: float
    backward: float
    of_weight: float | None = None
    send: float = 0.0

    def of(self, kind: str) -> float:
        """Seconds of an action of this kind."""
        weight = self.backward / 2 if self.of_weight is None else self.of_weight
        return {
            FORWARD: self.forward,
            BACKWARD: self.backward,
            OF_INPUT: self.backward - weight,
            OF_WEIGHT: weight,
        }[kind]


@dataclass(frozen=True)
class Span:
    """An action with its begin and end, in seconds from the begin of the step."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When each stage does what in a step, and when it waits.

    Args:
        pipeline: stages, micro-batches and schedule.
        stages: for each its actions in order.
        chunks: what each chunk takes, in the order in which they run.
    """

    pipeline: PipelineSpec
    stages: tuple[tuple[Span, ...], ...]
    chunks: tuple[ChunkSeconds, ...]

    @property
    def seconds(self) -> float:
        """From the first begin to the last end of any stage."""
        return max(spans[-1].end for spans in self.stages)

    @property
    def bubbles(self) -> tuple[float, ...]:
        """For each stage the share of the step in which it waits."""
        return tuple(1 - _busy(spans) / self.seconds for spans in self.stages)

    @property
    def bubble(self) -> float:
        """The share of all stages' time in which they wait."""
        return sum(self.bubbles) / len(self.stages)

    def __str__(self) -> str:
        return draw_timeline(self)


def _busy(spans: Sequence[Span]) -> float:
    return sum(span.end - span.start for span in spans)


def timeline(pipeline: PipelineSpec, chunks: Sequence[ChunkSeconds]) -> Timeline:
    """When each stage does what.

    Args:
        chunks: the seconds of each chunk, in the order in which they run.

    Raises:
        PlanError: if there is no such schedule; see `check_pipelining`.
        ValueError: if `chunks` are not as many as the pipeline's.
    """
    if len(chunks) != pipeline.num_chunks:
        raise ValueError(f"times of {len(chunks)} chunks for a pipeline of {pipeline.num_chunks}")
    orders = actions(pipeline)
    ends: dict[Action, float] = {}
    done: list[list[Span]] = [[] for _ in orders]
    waiting = set(range(len(orders)))
    while waiting:
        before = len(ends)
        for stage in sorted(waiting):
            spans, order = done[stage], orders[stage]
            while len(spans) < len(order):
                action = order[len(spans)]
                arrived = _arrival(pipeline, chunks, action, ends)
                if arrived is None:
                    break
                start = max(arrived, spans[-1].end if spans else 0.0)
                ends[action] = start + chunks[action.chunk].of(action.kind)
                spans.append(Span(action, start, ends[action]))
            if len(spans) == len(order):
                waiting.discard(stage)
        assert len(ends) > before, "a schedule in which every stage waits for another one"
    return Timeline(pipeline, tuple(map(tuple, done)), tuple(chunks))


def _arrival(
    pipeline: PipelineSpec,
    chunks: Sequence[ChunkSeconds],
    action: Action,
    ends: dict[Action, float],
) -> float | None:
    """When all that an action needs has arrived; None if that is not known yet."""
    chunk, piece = action.chunk, action.micro_batch

    def end(other: int, *kinds: str) -> float | None:
        times = [ends.get(Action(other, kind, piece)) for kind in kinds]
        first = next((seconds for seconds in times if seconds is not None), None)
        if first is None or pipeline.stage_of(other) == pipeline.stage_of(chunk):
            return first
        return first + chunks[min(chunk, other)].send

    if action.kind == FORWARD:
        return end(chunk - 1, FORWARD) if chunk else 0.0
    if action.kind == OF_WEIGHT:
        return end(chunk, OF_INPUT)
    if chunk == pipeline.num_chunks - 1:
        return end(chunk, FORWARD)
    return end(chunk + 1, BACKWARD, OF_INPUT)


def draw_timeline(timeline: Timeline, width: int = 96) -> str:
    """A line of text for each stage: `F2` where it runs micro-batch 2 forward, dots where it waits.

    Where there are several chunks, those of the later ones are marked `F2'`.
    """
    total = timeline.seconds
    lines = []
    for number, spans in enumerate(timeline.stages):
        line = ""
        for span in spans:
            start, end = (round(width * time / total) for time in (span.start, span.end))
            turn = span.action.chunk // timeline.pipeline.stages
            label = f"|{span.action}{turn * chr(39)}"
            line = line.ljust(start, "·") + label[: max(0, end - start)].ljust(end - start)
        share = f"idle {timeline.bubbles[number]:.1%}"
        lines.append(f"stage {number} {line.ljust(width, '·')}| {share}")
    return "\n".join([*lines, f"pipeline bubbles: {timeline.bubble:.1%} of the stages' time"])
