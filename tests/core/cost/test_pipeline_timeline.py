"""Schedules: their order is torch's, and their bubbles are those of the literature."""

from __future__ import annotations

import itertools
import random
from collections.abc import Container

import pytest

from shardwright.core.cost.pipeline_actions import Action, actions, in_flight_counts
from shardwright.core.cost.pipeline_timeline import ChunkSeconds, min_timeline_seconds, timeline
from shardwright.core.partition.pipeline_spec import PipelineSpec
from shardwright.errors import PlanError

SIZES = ((2, 2), (2, 8), (3, 6), (4, 4), (4, 12))
"""Stages and micro-batches."""

LEGAL = [
    PipelineSpec(stages, pieces, schedule, chunks)
    for schedule, chunks, sizes in (
        ("gpipe", 1, SIZES),
        ("1f1b", 1, SIZES),
        ("interleaved_1f1b", 2, SIZES),
        ("interleaved_1f1b", 3, SIZES),
        ("zero_bubble_v", 2, SIZES),
        ("interleaved_zero_bubble", 2, SIZES),
        ("interleaved_zero_bubble", 3, SIZES),
        ("dualpipe_v", 2, ((2, 4), (2, 9), (3, 6), (4, 8), (4, 13))),
        ("looped_bfs", 2, SIZES),
        ("looped_bfs", 3, ((3, 7),)),
    )
    for stages, pieces in sizes
]


def name(pipeline: PipelineSpec) -> str:
    return "-".join(map(str, (pipeline.schedule, pipeline.stages, pipeline.micro_batches)))


@pytest.mark.parametrize("pipeline", LEGAL, ids=name)
def test_every_part_runs_every_micro_batch_once_each_way_on_its_own_stage(
    pipeline: PipelineSpec,
) -> None:
    kinds: dict[tuple[int, int], list[str]] = {}
    orders = actions(pipeline)
    for action in itertools.chain(*orders):
        kinds.setdefault((action.chunk, action.micro_batch), []).append(action.pass_type)
    pairs = itertools.product(range(pipeline.num_chunks), range(pipeline.micro_batches))
    assert sorted(kinds) == sorted(pairs)
    found = {*map(tuple, kinds.values())}
    both = {("F", "B"), ("F", "I", "W")}
    wanted = {"dualpipe_v": both, "zero_bubble_v": {("F", "I", "W")}}
    wanted["interleaved_zero_bubble"] = wanted["zero_bubble_v"]
    assert found == wanted.get(pipeline.schedule, {("F", "B")})
    for stage, order in enumerate(orders):
        assert {pipeline.stage_of(action.chunk) for action in order} == {stage}


@pytest.mark.parametrize("pipeline", LEGAL, ids=name)
def test_each_pass_begins_as_soon_as_what_it_needs_has_ended_and_arrived(
    pipeline: PipelineSpec,
) -> None:
    parts = [
        ChunkSeconds(1 + part % 3, 2 + part % 2, send=0.25) for part in range(pipeline.num_chunks)
    ]
    line = timeline(pipeline, parts)
    spans = {span.action: span for stage in line.stages for span in stage}
    for stage in line.stages:
        assert all(a.end <= b.start for a, b in itertools.pairwise(stage))
    before_on_stage = {
        b.action: a.end for stage in line.stages for a, b in itertools.pairwise(stage)
    }
    for action, span in spans.items():
        free, arrived = before_on_stage.get(action, 0.0), 0.0
        if (sender := sender_of(action, spans.keys(), pipeline)) is not None:
            apart = pipeline.stage_of(action.chunk) != pipeline.stage_of(sender.chunk)
            arrived = spans[sender].end + 0.25 * apart
        assert span.start == max(free, arrived)


def sender_of(
    action: Action, all_actions: Container[Action], pipeline: PipelineSpec
) -> Action | None:
    """The pass that computes what `action` reads."""
    chunk, kind, piece = action
    if kind == "W":
        return Action(chunk, "I", piece)
    if kind == "F":
        return Action(chunk - 1, "F", piece) if chunk else None
    if chunk == pipeline.num_chunks - 1:
        return Action(chunk, "F", piece)
    full = Action(chunk + 1, "B", piece)
    return full if full in all_actions else Action(chunk + 1, "I", piece)


@pytest.mark.parametrize("pipeline", LEGAL, ids=name)
@pytest.mark.parametrize("seed", range(3))
def test_no_timeline_is_shorter_than_its_bound(pipeline: PipelineSpec, seed: int) -> None:
    draw = random.Random(seed)
    parts = [
        ChunkSeconds(draw.random(), draw.random(), send=draw.random() / 10)
        for _ in range(pipeline.num_chunks)
    ]
    assert min_timeline_seconds(pipeline, parts) <= timeline(pipeline, parts).seconds + 1e-12


def test_the_bound_of_equal_stages_is_the_timeline_of_1f1b() -> None:
    pipeline = PipelineSpec(4, 12, "1f1b")
    parts = [ChunkSeconds(1.0, 2.0)] * 4
    assert min_timeline_seconds(pipeline, parts) == timeline(pipeline, parts).seconds == 45.0


@pytest.mark.parametrize(("stages", "pieces"), [(2, 4), (4, 8), (4, 16), (8, 8)])
def test_bubbles_are_those_of_the_literature(stages: int, pieces: int) -> None:
    """(s - 1) / (m + s - 1), with v chunks (s - 1) / (v m + s - 1): Narayanan et al. 2021."""
    for schedule, chunks in (
        ("gpipe", 1),
        ("1f1b", 1),
        ("interleaved_1f1b", 2),
        ("looped_bfs", 2),
    ):
        pipeline = PipelineSpec(stages, pieces, schedule, chunks)
        line = timeline(pipeline, [ChunkSeconds(1.0, 2.0)] * pipeline.num_chunks)
        assert line.bubble == pytest.approx((stages - 1) / (chunks * pieces + stages - 1))


@pytest.mark.parametrize("schedule", ["zero_bubble_v", "dualpipe_v"])
def test_v_schedules_hardly_wait_where_all_three_passes_take_as_long(schedule: str) -> None:
    pipeline = PipelineSpec(4, 16, schedule, 2)
    line = timeline(pipeline, [ChunkSeconds(1.0, 2.0, of_weight=1.0)] * pipeline.num_chunks)
    # Stages begin one after the other, the last after 3 of 99 units, and none waits after that.
    assert line.seconds == 2 * 16 * 3 + 3
    assert line.bubble == pytest.approx(3 / 99)


@pytest.mark.parametrize(("stages", "pieces", "chunks"), [(2, 4, 2), (4, 8, 2), (4, 12, 3)])
def test_interleaved_zero_bubble_waits_only_until_the_first_micro_batch_has_come(
    stages: int, pieces: int, chunks: int
) -> None:
    pipeline = PipelineSpec(stages, pieces, "interleaved_zero_bubble", chunks)
    line = timeline(pipeline, [ChunkSeconds(1.0, 2.0, of_weight=1.0)] * pipeline.num_chunks)
    # Each stage has three units of work for each chunk and micro-batch.
    assert line.seconds == 3 * chunks * pieces + stages - 1
    assert line.bubble == pytest.approx((stages - 1) / line.seconds)


def test_without_stages_nothing_waits() -> None:
    line = timeline(PipelineSpec(1, 3), [ChunkSeconds(1.0, 2.0)])
    assert [str(span.action) for span in line.stages[0]] == ["F0", "B0", "F1", "B1", "F2", "B2"]
    assert (line.seconds, line.bubble) == (9.0, 0.0)


def test_a_slow_link_delays_the_first_step_of_every_stage_behind_it() -> None:
    pipeline = PipelineSpec(3, 3, "gpipe")
    line = timeline(pipeline, [ChunkSeconds(1.0, 1.0, send=0.5)] * 3)
    assert [stage[0].start for stage in line.stages] == [0.0, 1.5, 3.0]


@pytest.mark.parametrize(
    ("schedule", "chunks", "most"),
    [
        ("gpipe", 1, [[8], [8]]),
        ("1f1b", 1, [[2], [1]]),
        ("zero_bubble_v", 2, [[4, 1], [3, 2]]),
        ("interleaved_zero_bubble", 2, [[4, 2], [4, 2]]),
        ("dualpipe_v", 2, [[4, 1], [3, 2]]),
        ("looped_bfs", 2, [[8, 8], [8, 8]]),
    ],
)
def test_gpipe_keeps_all_micro_batches_and_1f1b_only_as_many_as_there_are_stages(
    schedule: str, chunks: int, most: list[list[int]]
) -> None:
    found = []
    for order in actions(PipelineSpec(2, 8, schedule, chunks)):
        counts = list(in_flight_counts(order))
        assert set(counts[-1].values()) == {0}
        found.append([max(count[part] for count in counts) for part in sorted(counts[0])])
    assert found == most


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            PipelineSpec(4, 2),
            "(?s)micro_batches=2 for 4 stages.*4 or more micro-batches, or 2 or fewer",
        ),
        (PipelineSpec(0, 2), "stages=0: must be a whole number of at least 1"),
        (PipelineSpec(2, 2, "2f2b"), "schedule='2f2b': unknown schedule\nuse one of 1f1b, gpipe"),
        (PipelineSpec(2, 2, "1f1b", 2), "chunks=2 in schedule '1f1b': .*\nuse 1; interleaved"),
        (PipelineSpec(2, 2, "interleaved_1f1b"), "chunks=1 .*\nuse 2 or more"),
        (
            PipelineSpec(2, 2, "zero_bubble_v", 3),
            "chunks=3 in schedule 'zero_bubble_v': .*\nuse 2",
        ),
        (PipelineSpec(1, 2, "1f1b", 2), "chunks=2 with one stage"),
        (
            PipelineSpec(2, 2, "interleaved_zero_bubble"),
            "chunks=1 in schedule 'interleaved_zero_bubble': .*\nuse 2 or more",
        ),
        (
            PipelineSpec(4, 9, "interleaved_zero_bubble", 2),
            "2 rounds of equal size\nuse a multiple of 4, or 10",
        ),
        (
            PipelineSpec(4, 7, "dualpipe_v", 2),
            "micro_batches=7 for 4 stages: schedule 'dualpipe_v' needs 2 micro-batches per stage\n"
            "use 8 or more micro-batches, or schedule 'zero_bubble_v'",
        ),
        (
            PipelineSpec(4, 9, "interleaved_1f1b", 2),
            "2 rounds of equal size\nuse a multiple of 4, or 10",
        ),
    ],
)
def test_what_is_no_schedule_is_refused_with_what_would_be(
    wrong: PipelineSpec, message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        actions(wrong)


def test_times_of_too_few_chunks_are_refused() -> None:
    with pytest.raises(ValueError, match="`chunks` has 1 entries, but there are 2 chunks"):
        timeline(PipelineSpec(2, 2), [ChunkSeconds(1.0, 1.0)])


def test_the_picture_shows_each_stage_and_what_it_waits() -> None:
    line = timeline(PipelineSpec(2, 2, "gpipe"), [ChunkSeconds(1.0, 1.0)] * 2)
    assert str(line).splitlines() == [
        "stage 0 |F0             |F1             ································|B0             "
        "|B1             | idle 33.3%",
        "stage 1 ················|F0             |F1             |B0             |B1             "
        "················| idle 33.3%",
        "pipeline bubbles: 33.3% of the stages' time",
    ]
