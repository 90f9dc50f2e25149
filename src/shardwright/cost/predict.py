"""How long each part of a pipeline takes for one micro-batch, and so when each stage waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardwright.cost.cluster import Cluster
from shardwright.cost.flops import work_of
from shardwright.cost.pipeline_timeline import ChunkSeconds, Timeline, timeline
from shardwright.cost.step_time import StepTime, TimeModel, step_time
from shardwright.graph.graph import Graph
from shardwright.layout.layout import Layout
from shardwright.partition.communication import communication
from shardwright.partition.decisions import Decisions
from shardwright.partition.pipeline_spec import ONE_STAGE, PipelineSpec
from shardwright.partition.stages import Chunk, chunks


def planned_timeline(
    graph: Graph,
    mesh: Layout,
    decisions: Decisions,
    pipeline: PipelineSpec,
    cluster: Cluster | None = None,
) -> Timeline:
    """When each stage does what in a step.

    Args:
        cluster: whose devices and links say how long it takes; without one, parts take as long as
            they have operations in their matrix products, in units of 10⁹, and sending takes no
            time.

    Raises:
        PlanError: if there is no such schedule.
        ConfigError: if the cluster has not so many devices.
    """
    found = chunks(graph, mesh, decisions, pipeline)
    if cluster is None:
        return timeline(pipeline, [_by_operations(part) for part in found])
    model = TimeModel(cluster, mesh, pipeline.stages)
    return timeline(pipeline, [on_cluster(part, mesh, pipeline, model)[1] for part in found])


def _by_operations(part: Chunk) -> ChunkSeconds:
    work = [work_of(op) for op in part.graph.ops]
    # A part without matrix products takes next to nothing, but something.
    forward = max(sum(each.forward_flops for each in work), 1.0) / 1e9
    return ChunkSeconds(forward, max(sum(each.backward_flops for each in work) / 1e9, forward))


def on_cluster(
    part: Chunk, mesh: Layout, pipeline: PipelineSpec, model: TimeModel
) -> tuple[StepTime, ChunkSeconds]:
    """What a part takes on the cluster of `model`: in a step, and for one micro-batch."""
    flow, count = communication(part.graph, mesh, part.decisions), pipeline.micro_batches
    found = step_time(part.graph, flow, part.decisions.cuts, model, micro_batches=count)
    send = 0.0
    if part.leaving:
        target = pipeline.stage_of(part.number + 1)
        first, other = part.stage * mesh.num_devices, target * mesh.num_devices
        link = model.links.cluster.level_between(first, other)
        sent, _ = part.sent_bytes(mesh)
        send = link.latency + sent / link.bandwidth
    return found, ChunkSeconds(found.forward_seconds, found.backward_seconds, send=send)


@dataclass(frozen=True)
class Predicted:
    """What one training step takes.

    Args:
        cluster: its name.
        parts: of each part of the model, in the order in which they run.
        timeline: of the stages; None if there is only one.
        seconds: the whole step.
    """

    cluster: str
    parts: tuple[StepTime, ...]
    timeline: Timeline | None
    seconds: float

    @property
    def bubble(self) -> float:
        """The share of all stages' time in which they wait for another."""
        return 0.0 if self.timeline is None else self.timeline.bubble

    @property
    def computation(self) -> float:
        """Seconds that the busiest stage computes."""
        return max(self._of_stages(lambda part: part.computation))

    @property
    def communication(self) -> float:
        """Seconds that a stage waits at most for communication within it."""
        return max(self._of_stages(lambda part: part.communication))

    def _of_stages(self, seconds: Callable[[StepTime], float]) -> list[float]:
        if self.timeline is None:
            return [seconds(part) for part in self.parts]
        pipeline = self.timeline.pipeline
        found = [0.0] * pipeline.stages
        for number, part in enumerate(self.parts):
            found[pipeline.stage_of(number)] += seconds(part)
        return found


def predict(
    graph: Graph,
    mesh: Layout,
    decisions: Decisions,
    cluster: Cluster,
    pipeline: PipelineSpec = ONE_STAGE,
    model: TimeModel | None = None,
) -> Predicted:
    """Seconds of a training step.

    With stages the step lasts as long as their timeline, and what is made once a step after it: the
    exposed reductions of gradients and the optimizer's update of the stage that takes longest.
    Where devices share a processor, a stage that waits leaves it to the others: then the step lasts
    as long as the stages work on average.

    Args:
        graph: captured with one micro-batch.
        mesh: the device matrix of one stage.
        model: of this cluster, mesh and number of stages, where there is one already.

    Raises:
        ConfigError: if the cluster has not so many devices.
    """
    model = model or TimeModel(cluster, mesh, pipeline.stages)
    found = chunks(graph, mesh, decisions, pipeline)
    times = [on_cluster(part, mesh, pipeline, model) for part in found]
    steps = tuple(step for step, _ in times)
    if pipeline.stages == 1:
        return Predicted(cluster.name, steps, None, steps[0].seconds)
    stages = timeline(pipeline, [seconds for _, seconds in times])
    after = [0.0] * pipeline.stages
    for part, step in zip(found, steps, strict=True):
        after[part.stage] += step.exposed + step.update
    if model.shared:
        busy = (1 - stages.bubble) * stages.seconds
        sent = 2 * pipeline.micro_batches * sum(seconds.send for _, seconds in times)
        seconds = busy + (sent + sum(after)) / pipeline.stages
        return Predicted(cluster.name, steps, stages, seconds)
    return Predicted(cluster.name, steps, stages, stages.seconds + max(after))
