"""Timeline of a pipeline schedule: start and end of each pass of each stage, and bubbles.

Passes are in the order of the schedules of `torch.distributed.pipelining`, which run the plan. A
pass starts when its stage is free and its inputs have arrived, and takes the seconds of its chunk.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
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


@cache
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


@dataclass(frozen=True)
class ChunkSeconds:
    """Seconds of a chunk for one micro-batch.

    Args:
        forward: seconds of the forward pass.
        backward: seconds of the full backward pass.
        of_weight: seconds of `backward` that compute gradients of parameters, for schedules
            that split the backward pass; by default half of `backward`.
        send: seconds to send the outputs to the next chunk, or their gradients back; negative if
            the passes of both chunks include them; not counted between chunks of the same stage.
    """

    forward: float
    backward: float
    of_weight: float | None = None
    send: float = 0.0

    def seconds_of(self, pass_type: str) -> float:
        """Return the seconds of a pass: `F`, `B`, `I` or `W`, as in `PASS_TYPES`."""
        # A linear layer has two matrix products of the same size, one for each gradient.
        weight = self.backward / 2 if self.of_weight is None else self.of_weight
        return {
            FORWARD: self.forward,
            BACKWARD: self.backward,
            BACKWARD_INPUT: self.backward - weight,
            BACKWARD_WEIGHT: weight,
        }[pass_type]


@dataclass(frozen=True)
class Span:
    """An action with its start and end, in seconds from the start of the step."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Start and end of each pass of all pipeline stages in one step.

    Args:
        pipeline: simulated pipeline.
        chunks: seconds of each chunk, in model order.
        ends: end of each pass in seconds, in an order in which dependencies come first.
    """

    pipeline: PipelineSpec
    chunks: tuple[ChunkSeconds, ...]
    ends: tuple[float, ...]

    @cached_property
    def stages(self) -> tuple[tuple[Span, ...], ...]:
        """Actions of each stage with start and end in seconds, in execution order."""
        # The passes of a stage are in its own order.
        ends: list[list[float]] = [[] for _ in range(self.pipeline.stages)]
        for stage, end in zip(_passes_of_pipeline(self.pipeline).stages, self.ends, strict=True):
            ends[stage].append(end)
        return tuple(
            tuple(
                Span(each, end - self.chunks[each.chunk].seconds_of(each.pass_type), end)
                for each, end in zip(order, ends_of_stage, strict=True)
            )
            for order, ends_of_stage in zip(actions(self.pipeline), ends, strict=True)
        )

    @property
    def seconds(self) -> float:
        """Seconds from the first start to the last end on any stage."""
        return max(self.ends)

    @cached_property
    def bubbles(self) -> tuple[float, ...]:
        """Fraction of the step for which each stage is idle."""
        busy = [0.0] * self.pipeline.stages
        passes, seconds = _passes_of_pipeline(self.pipeline), _seconds_of_passes(self.chunks)
        for stage, seconds_index in zip(passes.stages, passes.seconds_indices, strict=True):
            busy[stage] += seconds[seconds_index]
        return tuple(1 - each / self.seconds for each in busy)

    @property
    def bubble(self) -> float:
        """Mean fraction of the step for which a stage is idle."""
        return sum(self.bubbles) / len(self.stages)

    def __str__(self) -> str:
        return draw_timeline(self)


def timeline(pipeline: PipelineSpec, chunks: Sequence[ChunkSeconds]) -> Timeline:
    """Return the timeline of a simulated step of `pipeline`.

    Args:
        chunks: seconds of each chunk, in model order.

    Raises:
        PlanError: if the schedule cannot run this number of stages, chunks or micro-batches.
        ValueError: if `chunks` does not have one entry per chunk of the pipeline.
    """
    if len(chunks) != pipeline.num_chunks:
        raise ValueError(
            f"`chunks` has {len(chunks)} entries, but there are {pipeline.num_chunks} chunks\n"
            "pass the seconds of each chunk, in model order"
        )
    passes, seconds = _passes_of_pipeline(pipeline), _seconds_of_passes(chunks)
    # The last entry is for passes that receive nothing from another stage.
    sends = [*(chunk.send for chunk in chunks), 0.0]
    # Entry 0 is the start of the step. A message delays its receiver only: the sender goes on with
    # its next pass.
    ends = [0.0]
    for previous, sender, border, seconds_index in zip(
        *(passes.previous, passes.senders, passes.borders, passes.seconds_indices), strict=True
    ):
        free, received = ends[previous], ends[sender] + sends[border]
        ends.append((free if free > received else received) + seconds[seconds_index])
    return Timeline(pipeline, tuple(chunks), tuple(ends[1:]))


def min_timeline_seconds(pipeline: PipelineSpec, chunks: Sequence[ChunkSeconds]) -> float:
    """Return a lower bound on `timeline(pipeline, chunks).seconds` that needs no simulation.

    A stage runs all of its passes after the forward passes of the chunks before its first chunk
    and, with full backward passes, before the backward passes of these chunks.
    """
    busy = [0.0] * pipeline.stages
    for number, chunk in enumerate(chunks):
        busy[pipeline.stage_of(number)] += chunk.forward + chunk.backward
    before, longest, seen = 0.0, 0.0, set[int]()
    # Gradients of parameters may be computed last, so that no chunk waits for them.
    waits_for_backward = not pipeline.schedule_spec.splits_backward
    for number, chunk in enumerate(chunks):
        stage = pipeline.stage_of(number)
        if stage not in seen:
            seen.add(stage)
            longest = max(longest, before + pipeline.micro_batches * busy[stage])
        # Two passes that exchange a message in turn share its seconds, which are negative.
        shared = min(chunk.send, 0.0)
        before += chunk.forward + shared + (chunk.backward + shared) * waits_for_backward
    return longest


def _seconds_of_passes(chunks: Sequence[ChunkSeconds]) -> list[float]:
    """Return the seconds of each pass type in each chunk, at `_seconds_index`."""
    return [chunk.seconds_of(pass_type) for pass_type in PASS_TYPES for chunk in chunks]


def _seconds_index(action: Action, num_chunks: int) -> int:
    return PASS_TYPES.index(action.pass_type) * num_chunks + action.chunk


@dataclass(frozen=True)
class _OrderedPasses:
    """All passes of a step in topological order, numbered from 1, with their dependencies.

    Each array has one entry per pass; a step has up to millions of passes.

    Args:
        stages: index of the stage that runs the pass.
        previous: number of the pass that the stage runs before this one; 0 for the first.
        senders: number of the pass that computes the inputs; 0 for inputs of the model.
        borders: index of the chunk that sends its outputs to another stage, or that receives their
            gradients; the number of chunks if the pass receives nothing from another stage.
        seconds_indices: index of the seconds of the pass in `_seconds_of_passes`.
    """

    stages: array[int]
    previous: array[int]
    senders: array[int]
    borders: array[int]
    seconds_indices: array[int]


def _passes_of_pipeline(pipeline: PipelineSpec) -> _OrderedPasses:
    check_pipelining(pipeline)
    # Assignments of operators to chunks are neither hashable nor needed.
    return _passes_in_dependency_order(
        pipeline.stages, pipeline.micro_batches, pipeline.schedule, pipeline.chunks
    )


@lru_cache(maxsize=64)
def _passes_in_dependency_order(
    stages: int, micro_batches: int, schedule: str, chunks: int
) -> _OrderedPasses:
    """Return all passes of a step in topological order, cached by pipeline."""
    pipeline = PipelineSpec(stages, micro_batches, schedule, chunks)
    orders, num_chunks = actions(pipeline), pipeline.num_chunks
    stage_of_chunk = [pipeline.stage_of(chunk) for chunk in range(num_chunks)]
    passes = _OrderedPasses(*(array("q") for _ in range(5)))
    # Number of each action so far, and of the last action of each stage.
    numbers: dict[tuple[int, str, int], int] = {}
    last = [0] * len(orders)
    # Index of the next action in the order of each stage.
    positions = [0] * len(orders)
    unfinished = set(range(len(orders)))
    # Each round runs each stage until it needs inputs that have not arrived from another stage.
    while unfinished:
        num_done = len(numbers)
        # A sorted copy: stages are discarded in the loop, and the order must be reproducible.
        for stage in sorted(unfinished):
            order = orders[stage]
            while positions[stage] < len(order):
                action = order[positions[stage]]
                neighbor, sender = _find_sender(action, numbers, num_chunks - 1)
                if sender is None:
                    break
                # Border c lies between chunks c and c + 1, in both directions.
                is_sent = stage_of_chunk[neighbor] != stage
                passes.stages.append(stage)
                passes.previous.append(last[stage])
                passes.senders.append(sender)
                passes.borders.append(min(action.chunk, neighbor) if is_sent else num_chunks)
                passes.seconds_indices.append(_seconds_index(action, num_chunks))
                numbers[action] = last[stage] = len(numbers) + 1
                positions[stage] += 1
            if positions[stage] == len(order):
                unfinished.discard(stage)
        assert len(numbers) > num_done, "deadlock: every stage waits for another one"
    return passes


def _find_sender(
    action: Action, numbers: Mapping[tuple[int, str, int], int], last_chunk: int
) -> tuple[int, int | None]:
    """Return the chunk that computes the inputs of `action`, and the number of the pass that does;
    0 for inputs of the model, None if `numbers` does not contain this pass yet."""
    chunk, pass_type, micro_batch = action
    if pass_type == FORWARD:
        # The inputs of the first chunk are there from the start.
        return (chunk - 1, numbers.get((chunk - 1, FORWARD, micro_batch))) if chunk else (chunk, 0)
    if pass_type == BACKWARD_WEIGHT:
        return chunk, numbers.get((chunk, BACKWARD_INPUT, micro_batch))
    # The last chunk computes the loss, from which its backward pass starts.
    if chunk == last_chunk:
        return chunk, numbers.get((chunk, FORWARD, micro_batch))
    # A schedule may split the backward passes of some micro-batches only.
    full_backward = numbers.get((chunk + 1, BACKWARD, micro_batch))
    return chunk + 1, full_backward or numbers.get((chunk + 1, BACKWARD_INPUT, micro_batch))


def draw_timeline(timeline: Timeline, width: int = 96) -> str:
    """Draw a timeline as text with one line per stage: `F2` is the forward pass of micro-batch 2.

    Dots are idle time. `F2'`, `F2''`, ... are passes of the second, third, ... chunk of a stage.

    Args:
        width: number of characters for the step.
    """
    total = timeline.seconds
    lines = []
    for number, spans in enumerate(timeline.stages):
        line = ""
        for span in spans:
            start, end = (round(width * time / total) for time in (span.start, span.end))
            # Chunks are numbered in model order, which visits all stages before it repeats one.
            turn = span.action.chunk // timeline.pipeline.stages
            label = f"|{span.action}{turn * chr(39)}"
            # A pass that is narrower than its label shows the start of it.
            line = line.ljust(start, "·") + label[: max(0, end - start)].ljust(end - start)
        share = f"idle {timeline.bubbles[number]:.1%}"
        lines.append(f"stage {number} {line.ljust(width, '·')}| {share}")
    return "\n".join([*lines, f"pipeline bubbles: {timeline.bubble:.1%} of the stages' time"])
