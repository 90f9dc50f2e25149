"""Schedules of a pipeline."""

from __future__ import annotations

from svg import COLORS, SOFT, Drawing

from shardwright.core.cost.pipeline_timeline import ChunkSeconds, Timeline, timeline
from shardwright.core.partition.pipeline_spec import PipelineSpec

STAGES, MICRO_BATCHES = 4, 8
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2, "zero_bubble_v": 2}
"""Each with its chunks per stage."""


def timelines() -> list[Timeline]:
    """A backward pass takes twice a forward pass: half for inputs, half for parameters."""
    lines = []
    for schedule, chunks in SCHEDULES.items():
        pipeline = PipelineSpec(
            stages=STAGES, micro_batches=MICRO_BATCHES, schedule=schedule, chunks=chunks
        )
        seconds = ChunkSeconds(forward=1 / chunks, backward=2 / chunks)
        lines.append(timeline(pipeline, [seconds] * pipeline.num_chunks))
    return lines


def pipelines() -> Drawing:
    """What each of four stages does when, by schedule, on one scale."""
    lines = timelines()
    longest = max(line.seconds for line in lines)
    high, left, wide = 19, 76, 780
    block = STAGES * (high + 3) + 46
    drawing = Drawing(left + wide + 24, 30 + block * len(lines))
    legend = (("forward", COLORS[0]), ("backward", COLORS[2]), ("of parameters alone", COLORS[4]))
    for number, (word, color) in enumerate(legend):
        drawing.rect(left + number * 110, 10, 12, 12, color)
        drawing.text(left + number * 110 + 18, 21, word, 11, "start", SOFT)
    for number, line in enumerate(lines):
        top = 50.0 + number * block
        said = f"{line.pipeline.schedule}: {line.bubble:.1%} bubbles"
        drawing.text(left, top, said, 13, "start")
        for stage, spans in enumerate(line.stages):
            y = top + 8 + stage * (high + 3)
            drawing.text(left - 8, y + 14, f"stage {stage}", 11, "end", SOFT)
            drawing.rect(left, y, line.seconds / longest * wide, high, "#f1f3f5", "#f1f3f5")
            for span in spans:
                kind = span.action.pass_type
                color = COLORS[{"F": 0, "W": 4}.get(kind, 2)]
                x, length = left + span.start / longest * wide, span.end - span.start
                drawing.rect(x, y, length / longest * wide, high, color)
                place = x + length / longest * wide / 2
                drawing.text(place, y + 13, str(span.action.micro_batch), 9)
    return drawing
