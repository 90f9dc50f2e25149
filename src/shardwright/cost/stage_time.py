"""How long each part of a pipeline takes for one micro-batch, and so when each stage waits."""

from __future__ import annotations

from shardwright.communication import communication
from shardwright.cost.cluster import Cluster
from shardwright.cost.flops import work_of
from shardwright.cost.schedule import Seconds, Timeline, timeline
from shardwright.cost.time import StepTime, TimeModel, step_time
from shardwright.decided import Decided
from shardwright.graph.graph import Graph
from shardwright.layout import Layout
from shardwright.parts import Part, parts
from shardwright.pipelining import Pipelining


def planned_timeline(
    graph: Graph,
    mesh: Layout,
    decided: Decided,
    pipeline: Pipelining,
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
    found = parts(graph, mesh, decided, pipeline)
    if cluster is None:
        return timeline(pipeline, [_by_operations(part) for part in found])
    model = TimeModel(cluster, mesh, pipeline.stages)
    return timeline(pipeline, [on_cluster(part, mesh, pipeline, model)[1] for part in found])


def _by_operations(part: Part) -> Seconds:
    work = [work_of(op) for op in part.graph.ops]
    # A part without matrix products takes next to nothing, but something.
    forward = max(sum(each.forward_flops for each in work), 1.0) / 1e9
    return Seconds(forward, max(sum(each.backward_flops for each in work) / 1e9, forward))


def on_cluster(
    part: Part, mesh: Layout, pipeline: Pipelining, model: TimeModel
) -> tuple[StepTime, Seconds]:
    """What a part takes on the cluster of `model`: in a step, and for one micro-batch."""
    flow, count = communication(part.graph, mesh, part.decided), pipeline.micro_batches
    found = step_time(part.graph, flow, part.decided.cuts, model, micro_batches=count)
    send = 0.0
    if part.leaving:
        target = pipeline.stage_of(part.number + 1)
        first, other = part.stage * mesh.num_devices, target * mesh.num_devices
        link = model.links.cluster.level_between(first, other)
        sent, _ = part.sent_bytes(mesh)
        send = link.latency + sent / link.bandwidth
    return found, Seconds(found.forward_seconds, found.backward_seconds, send=send)
