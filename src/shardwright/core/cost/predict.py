"""Seconds of a training step: of each chunk, of the stages as they wait for each other, of all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from shardwright.core.cost.cluster import Cluster
from shardwright.core.cost.collectives import sequential_messages
from shardwright.core.cost.flops import work_of
from shardwright.core.cost.pipeline_timeline import ChunkSeconds, Timeline, timeline
from shardwright.core.cost.step_time import StepTime, TimeModel, step_time
from shardwright.core.partition.chunk import Chunk
from shardwright.core.partition.chunk_key import chunk_key
from shardwright.core.partition.partitioned import Partitioned
from shardwright.core.partition.pipeline_spec import PipelineSpec


def planned_timeline(partitioned: Partitioned, cluster: Cluster | None = None) -> Timeline:
    """When each stage does what in a step.

    Args:
        cluster: whose devices and links say how long it takes; without one, chunks take as long as
            they have operations in their matrix products, in units of 10⁹, and sending takes no
            time.

    Raises:
        PlanError: if there is no such schedule.
        ConfigError: if the cluster has not so many devices.
    """
    pipeline, chunks = partitioned.pipeline, partitioned.chunks
    if cluster is None:
        return timeline(pipeline, [_by_operations(chunk) for chunk in chunks])
    model = TimeModel(cluster, partitioned.mesh, pipeline.stages)
    return timeline(pipeline, [seconds for _, seconds in _on_cluster(chunks, pipeline, model)])


def _by_operations(chunk: Chunk) -> ChunkSeconds:
    work = [work_of(op) for op in chunk.graph.ops]
    # A chunk without matrix products takes next to nothing, but something.
    forward = max(sum(each.forward_flops for each in work), 1.0) / 1e9
    return ChunkSeconds(forward, max(sum(each.backward_flops for each in work) / 1e9, forward))


def _on_cluster(
    chunks: Sequence[Chunk], pipeline: PipelineSpec, model: TimeModel, blocking: bool = False
) -> Iterator[tuple[StepTime, ChunkSeconds]]:
    """What each chunk takes on the cluster of `model`: in a step, and for one micro-batch."""
    known: dict[object, StepTime] = {}
    for chunk in chunks:
        key = chunk_key(chunk) if len(chunks) > 1 else None
        if key not in known:
            known[key] = step_time(
                chunk.graph,
                chunk.communication,
                chunk.decisions.cuts,
                model,
                micro_batches=pipeline.micro_batches,
                beside=None if blocking else chunk.overlaps,
            )
        time, send = known[key], 0.0
        if chunk.leaving:
            target, devices = pipeline.stage_of(chunk.number + 1), chunk.mesh.num_devices
            link = model.links.cluster.level_between(chunk.stage * devices, target * devices)
            send = link.call + link.latency + chunk.border_bytes[0] / link.rate
        there, back = time.forward_seconds, time.backward_seconds
        if pipeline.stages > 1:
            there, back = there + model.device.pass_overhead, back + model.device.pass_overhead
        yield time, ChunkSeconds(there, back, send=send)


@dataclass(frozen=True)
class Predicted:
    """What one training step takes.

    Args:
        cluster: on which it is predicted.
        chunks: of each chunk of the model, in the order in which they run.
        timeline: of the stages; None if there is only one.
        seconds: the whole step.
    """

    cluster: Cluster
    chunks: tuple[StepTime, ...]
    timeline: Timeline | None
    seconds: float

    @property
    def bubble(self) -> float:
        """The share of all stages' time in which they wait for another."""
        return 0.0 if self.timeline is None else self.timeline.bubble

    @property
    def computation(self) -> float:
        """Seconds that the busiest stage computes."""
        return max(self._of_stages(lambda chunk: chunk.computation))

    @property
    def communication(self) -> float:
        """Seconds that a stage waits at most for communication within it."""
        return max(self._of_stages(lambda chunk: chunk.communication))

    def _of_stages(self, seconds: Callable[[StepTime], float]) -> list[float]:
        if self.timeline is None:
            return [seconds(chunk) for chunk in self.chunks]
        pipeline = self.timeline.pipeline
        of_stages = [0.0] * pipeline.stages
        for number, chunk in enumerate(self.chunks):
            of_stages[pipeline.stage_of(number)] += seconds(chunk)
        return of_stages


def predict(partitioned: Partitioned, cluster: Cluster, blocking: bool = False) -> Predicted:
    """Seconds of a training step.

    With stages the step lasts as long as their timeline, and what is made once a step after it: the
    exposed reductions of gradients, those between stages that share a parameter, and the
    optimizer's update of the stage that takes longest.
    Where devices share a processor, a stage that waits leaves it to the others: then the step lasts
    as long as the stages work on average.

    Args:
        blocking: whether nothing is computed while an activation is redistributed, as in programs
            that do not start redistributions early.

    Raises:
        ConfigError: if the cluster has not so many devices.
    """
    pipeline, chunks = partitioned.pipeline, partitioned.chunks
    model = TimeModel(cluster, partitioned.mesh, pipeline.stages)
    times = list(_on_cluster(chunks, pipeline, model, blocking))
    steps = tuple(step for step, _ in times)
    if pipeline.stages == 1:
        return Predicted(cluster, steps, None, steps[0].seconds)
    stages = timeline(pipeline, [seconds for _, seconds in times])
    after = _sums_between_stages(partitioned, model)
    for chunk, step in zip(chunks, steps, strict=True):
        after[chunk.stage] += step.exposed + step.update
    after = [seconds + model.device.step_overhead for seconds in after]
    if model.shared:
        busy = (1 - stages.bubble) * stages.seconds
        sent = 2 * pipeline.micro_batches * sum(seconds.send for _, seconds in times)
        seconds = busy + (sent + sum(after)) / pipeline.stages
        return Predicted(cluster, steps, stages, seconds)
    return Predicted(cluster, steps, stages, stages.seconds + max(after))


def _sums_between_stages(partitioned: Partitioned, model: TimeModel) -> list[float]:
    """For each stage the seconds in which it sums gradients of parameters with other stages: each
    in an all-reduce of its own, one after the other."""
    seconds = [0.0] * partitioned.pipeline.stages
    devices = partitioned.mesh.num_devices
    for stages, num_bytes in partitioned.shared_gradients:
        link = model.links.cluster.level_between(stages[0] * devices, stages[-1] * devices)
        moved = (len(stages) - 1) / len(stages) * num_bytes / link.rate
        once = sequential_messages(link, len(stages)) * link.latency + moved
        for stage in stages:
            seconds[stage] += link.call + 2 * once
    return seconds
