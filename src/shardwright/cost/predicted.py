"""Seconds of a training step under a whole plan: each part, and how the stages wait for another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shardwright.cost.cluster import Cluster
from shardwright.cost.schedule import Timeline, timeline
from shardwright.cost.stage_time import on_cluster
from shardwright.cost.time import StepTime, TimeModel
from shardwright.decided import Decided
from shardwright.graph.graph import Graph
from shardwright.layout import Layout
from shardwright.parts import parts
from shardwright.pipelining import ONE_STAGE, Pipelining


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
    decided: Decided,
    cluster: Cluster,
    pipeline: Pipelining = ONE_STAGE,
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
    found = parts(graph, mesh, decided, pipeline)
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
