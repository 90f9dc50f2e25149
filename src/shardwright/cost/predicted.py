"""Seconds of a training step under a whole plan: each part, and how the stages wait for another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardwright.communication import communication
from shardwright.cost.cluster import Cluster
from shardwright.cost.schedule import Seconds, Timeline, timeline
from shardwright.cost.time import StepTime, TimeModel, step_time
from shardwright.decided import Decided
from shardwright.graph.graph import Graph
from shardwright.layout import Layout
from shardwright.parts import Part, parts
from shardwright.pipelining import ONE_STAGE, Pipelining


@dataclass(frozen=True)
class Predicted:
    """What one training step takes.

    Args:
        parts: of each part of the model, in the order in which they run.
        timeline: of the stages; None if there is only one.
        seconds: the whole step.
    """

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
    decided: Decided,
    cluster: Cluster,
    pipeline: Pipelining = ONE_STAGE,
    model: TimeModel | None = None,
) -> Predicted:
    """Seconds of a training step.

    With stages the step lasts as long as their timeline, and what is made once a step after it: the
    exposed reductions of gradients and the optimizer's update of the stage that takes longest.

    Args:
        graph: captured with one micro-batch.
        mesh: the device matrix of one stage.
        model: of this cluster, mesh and number of stages, where there is one already.

    Raises:
        ConfigError: if the cluster has not so many devices.
    """
    model = model or TimeModel(cluster, mesh, pipeline.stages)
    found, times = parts(graph, mesh, decided, pipeline), []
    for part in found:
        flow = communication(part.graph, mesh, part.decided)
        count = pipeline.micro_batches
        times.append(step_time(part.graph, flow, decided.cuts, model, micro_batches=count))
    if pipeline.stages == 1:
        return Predicted(tuple(times), None, times[0].seconds)
    seconds = [
        Seconds(t.forward_seconds, t.backward_seconds, send=_send(part, mesh, cluster, pipeline))
        for part, t in zip(found, times, strict=True)
    ]
    stages = timeline(pipeline, seconds)
    after = [0.0] * pipeline.stages
    for part, t in zip(found, times, strict=True):
        after[part.stage] += t.exposed + t.update
    return Predicted(tuple(times), stages, stages.seconds + max(after))


def _send(part: Part, mesh: Layout, cluster: Cluster, pipeline: Pipelining) -> float:
    """Seconds in which what a part leaves reaches the next one."""
    if part.number + 1 == pipeline.parts:
        return 0.0
    stage, other = part.stage, pipeline.stage_of(part.number + 1)
    if stage == other:
        return 0.0
    num_bytes, _ = part.sent_bytes(mesh)
    size = mesh.num_devices
    links = [
        cluster.level_between(stage * size + place, other * size + place) for place in range(size)
    ]
    return max(link.latency + num_bytes / link.bandwidth for link in links)
