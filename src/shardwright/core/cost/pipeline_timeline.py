"""Timeline of a pipeline schedule: start and end of each pass of each stage, and bubbles.

A pass starts when its stage is free and its inputs have arrived, and takes the seconds of its
chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from shardwright.core.cost.pipeline_actions import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    PASS_TYPES,
    Action,
    actions,
    check_pipelining,
)
from shardwright.core.partition.pipeline_spec import PipelineSpec

_Indices: TypeAlias = NDArray[np.integer]


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


# Compared by identity, as arrays have no truth value.
@dataclass(frozen=True, eq=False)
class Timeline:
    """Start and end of each pass of all pipeline stages in one step.

    Args:
        pipeline: simulated pipeline.
        chunks: seconds of each chunk, in model order.
        ends: end of each pass in seconds, in the order of `_OrderedPasses`.
    """

    pipeline: PipelineSpec
    chunks: tuple[ChunkSeconds, ...]
    ends: NDArray[np.float64]

    @cached_property
    def stages(self) -> tuple[tuple[Span, ...], ...]:
        """Actions of each stage with start and end in seconds, in execution order."""
        # The passes of a stage are in its own order.
        ends: list[list[float]] = [[] for _ in range(self.pipeline.stages)]
        passes = _passes_of_pipeline(self.pipeline)
        for stage, end in zip(passes.stages.tolist(), self.ends.tolist(), strict=True):
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
        return float(self.ends.max())

    @cached_property
    def bubbles(self) -> tuple[float, ...]:
        """Fraction of the step for which each stage is idle."""
        passes, seconds = _passes_of_pipeline(self.pipeline), _seconds_of_passes(self.chunks)
        busy = np.bincount(passes.stages, seconds[passes.seconds_indices])
        return tuple((1 - busy / self.seconds).tolist())

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
    passes = _passes_of_pipeline(pipeline)
    # The last entry is for passes that receive nothing from another stage. A message delays its
    # receiver only: the sender goes on with its next pass.
    delays = np.array([*(chunk.send for chunk in chunks), 0.0])[passes.borders]
    seconds = _seconds_of_passes(chunks)[passes.seconds_indices]
    # Entry 0 is the start of the step.
    ends = np.zeros(len(seconds) + 1)
    for first, last in pairwise(passes.waves):
        wave = slice(first, last)
        free, sent = ends[passes.previous[wave]], ends[passes.senders[wave]]
        ends[first + 1 : last + 1] = np.maximum(free, sent + delays[wave]) + seconds[wave]
    return Timeline(pipeline, tuple(chunks), ends[1:])


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


def _seconds_of_passes(chunks: Sequence[ChunkSeconds]) -> NDArray[np.float64]:
    """Return the seconds of all chunks for the first pass type, then for the second, and so on."""
    return np.array([chunk.seconds_of(pass_type) for pass_type in PASS_TYPES for chunk in chunks])


@dataclass(frozen=True)
class _OrderedPasses:
    """All passes of a step in topological order, numbered from 1, with their dependencies.

    Passes are ordered by *waves*: passes of different stages that depend on earlier waves only, so
    that a wave is simulated at once. Each array has one entry per pass; a step has up to millions.

    Args:
        stages: index of the stage that runs the pass.
        previous: number of the pass that the stage runs before this one; 0 for the first.
        senders: number of the pass that computes the inputs; 0 for inputs of the model.
        borders: index of the chunk that sends its outputs to another stage, or that receives their
            gradients; the number of chunks if the pass receives nothing from another stage.
        seconds_indices: index of the seconds of the pass in `_seconds_of_passes`.
        waves: index of the first pass of each wave, and the number of passes at the end.
    """

    stages: _Indices
    previous: _Indices
    senders: _Indices
    borders: _Indices
    seconds_indices: _Indices
    waves: Sequence[int]


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
    stage_of_chunk = np.array([pipeline.stage_of(chunk) for chunk in range(num_chunks)])
    in_order = [action for order in orders for action in order]
    chunk_of_pass = np.array([action.chunk for action in in_order])
    pass_types = np.array([PASS_TYPES.index(action.pass_type) for action in in_order])
    firsts = [0, *accumulate(map(len, orders))]
    previous = np.arange(len(in_order))
    # Entry 0 is the start of the step, so the pass before the first one of a stage.
    previous[firsts[:-1]] = 0
    neighbors, senders = _find_senders(
        chunk_of_pass, pass_types, np.array([action.micro_batch for action in in_order])
    )
    is_sent = stage_of_chunk[neighbors] != stage_of_chunk[chunk_of_pass]
    waves = _waves_of_passes(firsts, senders.tolist())
    order = np.argsort(waves, kind="stable")
    numbers = np.zeros(len(order) + 1, np.int32)
    numbers[order + 1] = np.arange(1, len(order) + 1)
    return _OrderedPasses(
        stage_of_chunk[chunk_of_pass][order],
        numbers[previous[order]],
        numbers[senders[order]],
        np.where(is_sent, np.minimum(chunk_of_pass, neighbors), num_chunks)[order],
        (pass_types * num_chunks + chunk_of_pass)[order],
        [0, *np.cumsum(np.bincount(waves)).tolist()],
    )


def _find_senders(
    chunks: _Indices, pass_types: _Indices, micro_batches: _Indices
) -> tuple[_Indices, _Indices]:
    """Return, for each pass, the chunk that computes its inputs and the number of the pass that
    does, counted from 1; 0 for inputs of the model.

    Args:
        chunks, pass_types, micro_batches: of each pass, as indices.
    """
    last_chunk = int(chunks.max())
    numbers = np.zeros((last_chunk + 1, len(PASS_TYPES), int(micro_batches.max()) + 1), np.int64)
    numbers[chunks, pass_types, micro_batches] = np.arange(1, len(chunks) + 1)
    forward, backward, of_input, of_weight = range(len(PASS_TYPES))
    is_forward, is_weight = pass_types == forward, pass_types == of_weight
    # The last chunk computes the loss, from which its backward pass starts.
    is_loss = ~is_forward & ~is_weight & (chunks == last_chunk)
    step = np.where(is_forward, -1, np.where(is_weight | is_loss, 0, 1))
    # The inputs of the first chunk are there from the start.
    neighbors = np.maximum(chunks + step, 0)
    sent_by = np.where(is_forward | is_loss, forward, of_input)
    senders = numbers[neighbors, sent_by, micro_batches]
    # A schedule may split the backward passes of some micro-batches only.
    full = numbers[neighbors, backward, micro_batches]
    senders = np.where((sent_by == of_input) & ~is_weight & (full > 0), full, senders)
    return neighbors, np.where(is_forward & (chunks == 0), 0, senders)


def _waves_of_passes(firsts: Sequence[int], senders: Sequence[int]) -> NDArray[np.int64]:
    """Return the wave of each pass: one more than the latest of the passes on which it depends.

    Args:
        firsts: index of the first pass of each stage, and the number of passes.
        senders: number of the pass that computes the inputs of each pass, counted from 1.
    """
    # Entry 0 is the start of the step; None for passes whose inputs have not arrived.
    waves: list[int | None] = [-1, *[None] * len(senders)]
    positions, latest = list(firsts[:-1]), [-1] * (len(firsts) - 1)
    unfinished = [stage for stage, first in enumerate(positions) if first < firsts[stage + 1]]
    # Each round runs each stage until it needs inputs that have not arrived from another stage.
    while unfinished:
        before = sum(positions)
        for stage in unfinished:
            wave = latest[stage]
            for index in range(positions[stage], firsts[stage + 1]):
                sent = waves[senders[index]]
                if sent is None:
                    break
                wave = 1 + (sent if sent > wave else wave)
                waves[index + 1] = wave
                positions[stage] += 1
            latest[stage] = wave
        unfinished = [stage for stage in unfinished if positions[stage] < firsts[stage + 1]]
        assert sum(positions) > before, "deadlock: every stage waits for another one"
    return np.array(waves[1:])


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
