"""Breakdown of a predicted step: computation by type of operator, communication by data sent and
mesh axes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from shardwright.core.cost.flops import work_of
from shardwright.core.cost.predict import Predicted, overlaps_of_chunk
from shardwright.core.cost.step_time import (
    StepTime,
    activation_seconds,
    bucket_seconds,
    hidden_seconds,
)
from shardwright.core.cost.time_model import TimeModel
from shardwright.core.graph.graph import Origin
from shardwright.core.layout.axes import Axes
from shardwright.core.partition.chunk import Chunk
from shardwright.core.partition.partitioned import Partitioned

COMPUTATION = ("matrix products", "attention", "other operators", "recomputation", "optimizer")
COMMUNICATION = ("activations", "parameters", "gradients")
WAITING = "pipeline bubbles"
KINDS = (*COMPUTATION, *COMMUNICATION, WAITING)


@dataclass(frozen=True)
class TimePart:
    """Seconds of one type of computation or communication in a step.

    Args:
        kind: one of `KINDS`: a type of operator, or the data that is sent, such as gradients.
        axes: names of the mesh axes over which data is sent; empty for computation.
        seconds: exposed seconds, which lengthen the step.
        hidden: seconds of communication that overlap computation.
    """

    kind: str
    axes: tuple[str, ...]
    seconds: float
    hidden: float = 0.0


_SecondsByKindAndAxes = dict[tuple[str, Axes, bool], float]
"""Seconds of a step, by (entry of `KINDS`, mesh axes, whether the seconds overlap computation)."""


def time_parts(partitioned: Partitioned, predicted: Predicted) -> tuple[TimePart, ...]:
    """Return a breakdown of the seconds of a step, which add up to the predicted step.

    The breakdown describes the stage with the most exposed seconds, pipeline bubbles included.
    Where devices share a processor, it is the mean over stages.

    Args:
        predicted: prediction for `partitioned`.
    """
    pipeline, names = partitioned.pipeline, partitioned.mesh.alias_names
    model = TimeModel(predicted.cluster, partitioned.mesh, pipeline.stages)
    stages: list[_SecondsByKindAndAxes] = [defaultdict(float) for _ in range(pipeline.stages)]
    for chunk, time in zip(partitioned.chunks, predicted.chunks, strict=True):
        for component, axes, seconds, hidden in _time_parts_of_chunk(chunk, time, model, predicted):
            stages[chunk.stage][component, tuple(sorted(axes)), False] += seconds - hidden
            stages[chunk.stage][component, tuple(sorted(axes)), True] += hidden
    # Stages on separate devices run at the same time, so the slowest stage determines the step.
    if not model.shares_processor:
        stages = [max(stages, key=_sum_exposed_seconds)]
    seconds_of: _SecondsByKindAndAxes = defaultdict(float)
    for stage in stages:
        for key, seconds in stage.items():
            # Of the slowest stage, or the mean of all.
            seconds_of[key] += seconds / len(stages)
    # A stage waits for other stages in all seconds of the step in which it does no work.
    if pipeline.stages > 1:
        working_seconds = _sum_exposed_seconds(seconds_of)
        seconds_of[WAITING, (), False] = max(0.0, predicted.seconds - working_seconds)
    parts_of_step = (
        TimePart(
            data, tuple(names[a] for a in axes), value, seconds_of.get((data, axes, True), 0.0)
        )
        for (data, axes, hidden), value in seconds_of.items()
        if not hidden
    )
    nonzero = (each for each in parts_of_step if each.seconds or each.hidden)
    return tuple(sorted(nonzero, key=lambda each: (KINDS.index(each.kind), -each.seconds)))


def _sum_exposed_seconds(seconds_of: _SecondsByKindAndAxes) -> float:
    return sum(seconds for (_, _, hidden), seconds in seconds_of.items() if not hidden)


def _time_parts_of_chunk(
    chunk: Chunk, time: StepTime, model: TimeModel, predicted: Predicted
) -> Iterator[tuple[str, Axes, float, float]]:
    """Yield the seconds per step of each operator and each collective of a chunk.

    Yields:
        (one of `KINDS`, mesh axes, total seconds, seconds that overlap computation).
    """
    communication, times = chunk.communication, time.micro_batches
    repeated_ops = (
        communication.recomputed_ops if predicted.repeats_segments else communication.repeated_ops
    )
    for op in chunk.graph.ops:
        cuts = chunk.decisions.cuts.get(op.name, {})
        forward, backward = model.operator_seconds(op, cuts)
        yield work_of(op).category, (), times * (forward + backward), 0.0
        if op.name in repeated_ops:
            yield "recomputation", (), times * model.recompute_seconds(op, cuts), 0.0
    yield "other operators", (), times * time.accumulation, 0.0
    yield "optimizer", (), time.update, 0.0
    saved_fraction = 1 - time.slowdown
    chunk_cuts = chunk.decisions.cuts
    overlaps = overlaps_of_chunk(chunk, model, predicted.blocking)
    hidden_of = hidden_seconds(chunk.graph, communication, chunk_cuts, model, overlaps)
    for transfer, axes, seconds_pair in activation_seconds(
        chunk.graph, communication, chunk_cuts, model
    ):
        # A parameter that is in no bucket is gathered forward, and its gradient reduced backward.
        is_parameter = transfer is not None and transfer.value.origin is Origin.PARAMETER
        components = COMMUNICATION[1:] if is_parameter else COMMUNICATION[:1] * 2
        hidden_pair = (0.0, 0.0) if transfer is None else hidden_of.get(transfer, (0.0, 0.0))
        for component, seconds, hidden in zip(components, seconds_pair, hidden_pair, strict=True):
            yield component, axes, times * seconds, times * saved_fraction * hidden
    # By whether a collective runs once per step, instead of once per micro-batch.
    exposed_of = {True: time.exposed_per_step, False: time.exposed_per_micro_batch}
    total_of = {
        True: (time.gathers, time.gradients),
        False: (time.gathers_per_micro_batch, time.gradients_per_micro_batch),
    }
    for bucket, data, once_per_step, direction, seconds in bucket_seconds(communication, model):
        # Also excludes a total of 0, by which the hidden share would be divided.
        if seconds:
            # Gradients are reduced over all axes of a bucket, parameters gathered over some.
            steps = [s for s in bucket.steps if data == "gradients" or s.operation == "all_gather"]
            axes = tuple({axis for step in steps for axis in step.axes})
            total = seconds if once_per_step else times * seconds
            # Without computation to overlap, rounding can make the exposed part exceed the total.
            hidden = max(
                0.0, 1 - exposed_of[once_per_step][direction] / total_of[once_per_step][direction]
            )
            yield data, axes, total, total * hidden


def utilization(partitioned: Partitioned, predicted: Predicted) -> float:
    """Return the model FLOPs utilization (MFU): FLOPs of the matrix products of the model in a
    step, without recomputation, as a fraction of the peak of all devices (Chowdhery et al., "PaLM",
    2022, appendix B)."""
    devices = partitioned.mesh.num_devices * partitioned.pipeline.stages
    device = predicted.cluster.device.with_active_devices(devices)
    work = [work_of(op) for op in partitioned.graph.ops]
    ideal_seconds = sum(
        (each.forward_flops + each.backward_flops) / device.peak_rate(each.dtype) for each in work
    )
    ideal_seconds *= partitioned.pipeline.micro_batches / devices
    return ideal_seconds / predicted.seconds if ideal_seconds else 0.0
