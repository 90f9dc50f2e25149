"""Predict the seconds of a training step and of its chunks, and the timeline of its stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from shardwright.core.cost.cluster import Cluster, LinkLevel
from shardwright.core.cost.collectives import sequential_messages
from shardwright.core.cost.flops import work_of
from shardwright.core.cost.optimizer_state import orthogonalized_parameters
from shardwright.core.cost.pipeline_timeline import (
    ChunkSeconds,
    Timeline,
    min_timeline_seconds,
    timeline,
)
from shardwright.core.cost.product_overlap import product_overlaps
from shardwright.core.cost.step_time import StepTime, step_time
from shardwright.core.cost.time_model import TimeModel
from shardwright.core.partition.chunk import Chunk
from shardwright.core.partition.chunk_key import chunk_key
from shardwright.core.partition.overlap import Overlap
from shardwright.core.partition.partitioned import Partitioned
from shardwright.core.partition.pipeline_spec import PipelineSpec
from shardwright.core.partition.transfer import Transfer


def predicted_timeline(partitioned: Partitioned, cluster: Cluster | None = None) -> Timeline:
    """Return the predicted timeline of the pipeline stages in one step.

    Args:
        cluster: cluster on which the step runs. If None, a chunk takes one second per GFLOP of its
            matrix products, and sending takes no time.

    Raises:
        PlanError: if the schedule cannot run.
        ConfigError: if the cluster has too few devices.
    """
    pipeline, chunks = partitioned.pipeline, partitioned.chunks
    # Without a cluster the shape of the timeline still shows bubbles and imbalance.
    if cluster is None:
        return timeline(pipeline, [_estimate_seconds_from_flops(chunk) for chunk in chunks])
    model = TimeModel(cluster, partitioned.mesh, pipeline.stages)
    times = chunk_times(partitioned, cluster)
    return timeline(pipeline, list(_chunk_seconds(times, pipeline, model)))


def _estimate_seconds_from_flops(chunk: Chunk) -> ChunkSeconds:
    work = [work_of(op) for op in chunk.graph.ops]
    # At least one FLOP, so that a chunk without matrix products has a span in the timeline.
    forward = max(sum(each.forward_flops for each in work), 1.0) / 1e9
    return ChunkSeconds(forward, max(sum(each.backward_flops for each in work) / 1e9, forward))


@dataclass(frozen=True)
class ChunkTime:
    """Predicted seconds of a chunk on a cluster, independent of the schedule.

    Args:
        step: components of the chunk's seconds in a step.
        sent_bytes: bytes per micro-batch that a device sends to the next chunk; None for the last
            chunk.
        copies: number of devices of a stage that each send a part of the same activations.
    """

    step: StepTime
    sent_bytes: int | None
    copies: int = 1


def chunk_times(
    partitioned: Partitioned,
    cluster: Cluster,
    blocking: bool = False,
    optimizer: str | torch.optim.Optimizer = "adamw",
    repeats_segments: bool = False,
    cached_times: dict[object, StepTime] | None = None,
) -> tuple[ChunkTime, ...]:
    """Return the predicted seconds of each chunk, which do not depend on the schedule.

    Args:
        blocking: whether redistributions of activations block, without overlap.
        optimizer: name or instance of the optimizer.
        repeats_segments: whether recomputed segments run to their end, instead of to the last
            tensor that autograd needs.
        cached_times: seconds of chunks of other plans on the same cluster, extended in place.
    """
    pipeline, chunks = partitioned.pipeline, partitioned.chunks
    model = TimeModel(cluster, partitioned.mesh, pipeline.stages)
    orthogonalized = orthogonalized_parameters(optimizer, partitioned.graph)
    # Schedules that split backward passes delay no weight gradients.
    splits_backward = pipeline.schedule_spec.splits_backward
    shared = partitioned.mesh, pipeline.stages, pipeline.micro_batches, splits_backward
    cached_times = {} if cached_times is None else cached_times
    times = []
    for chunk in chunks:
        # Most chunks of a deep model differ only in names; these are predicted once. By name,
        # Muon may orthogonalize the parameters of some of them only.
        muon = tuple(v.name in orthogonalized for v in chunk.graph.parameters)
        key = chunk_key(chunk), muon, blocking, repeats_segments, *shared
        time = cached_times.get(key)
        if time is None:
            time = cached_times[key] = step_time(
                chunk.graph,
                chunk.communication,
                chunk.decisions.cuts,
                model,
                micro_batches=pipeline.micro_batches,
                overlaps=overlaps_of_chunk(chunk, model, blocking),
                orthogonalized=orthogonalized,
                repeats_segments=repeats_segments,
            )
        sent_bytes = chunk.border_bytes[0] if chunk.leaving else None
        # Only devices that divide what they send need to know how many hold the same.
        copies = _num_copies_of_sent(chunk) if model.device.divides_sends else 1
        times.append(ChunkTime(time, sent_bytes, copies))
    return tuple(times)


def with_longer_backward(
    times: Sequence[ChunkTime], pipeline: PipelineSpec, stage_seconds: Sequence[float]
) -> list[ChunkTime]:
    """Return `times` with longer backward passes, as if stages recomputed more.

    Chunks of a stage share its seconds in proportion to their backward passes. Longer passes hide
    more communication of parameters.

    Args:
        stage_seconds: further seconds per micro-batch of each stage.
    """
    busy = [0.0] * pipeline.stages
    for number, each in enumerate(times):
        busy[pipeline.stage_of(number)] += each.step.backward
    longer = []
    for number, each in enumerate(times):
        stage, backward = pipeline.stage_of(number), each.step.backward
        # A stage without a backward pass has nothing to recompute.
        more = stage_seconds[stage] * backward / busy[stage] if busy[stage] else 0.0
        longer.append(replace(each, step=replace(each.step, backward=backward + more)))
    return longer


def _num_copies_of_sent(chunk: Chunk) -> int:
    """Return how many devices of a stage hold the same activations that `chunk` sends; 1 if it
    sends none."""
    whole_bytes = sum(value.numel * value.itemsize for value in chunk.leaving)
    # Devices that hold parts of different sizes, or of several tensors, share the mean.
    held_bytes = chunk.border_bytes[0] * chunk.mesh.num_devices
    return max(1, held_bytes // whole_bytes) if whole_bytes else 1


def _chunk_seconds(
    times: Sequence[ChunkTime], pipeline: PipelineSpec, model: TimeModel
) -> Iterator[ChunkSeconds]:
    """Yield the seconds of each pipeline chunk for one micro-batch, with the send to the next."""
    devices, received = model.mesh.num_devices, 0.0
    for number, time in enumerate(times):
        send = 0.0
        # A rank sends to the rank with the same position in the device matrix of another stage, so
        # all pairs of ranks are assumed to have the link between the first ranks of the stages.
        if time.sent_bytes is not None:
            source, target = pipeline.stage_of(number), pipeline.stage_of(number + 1)
            link = model.links.cluster.link_between(source * devices, target * devices)
            send = _send_seconds(time.sent_bytes, time.copies, link, model)
        forward, backward = time.step.forward_seconds, time.step.backward_seconds
        # Without stages no schedule runs passes, and a step is one call.
        if pipeline.stages > 1:
            overhead = model.device.pass_overhead
            forward, backward = forward + overhead, backward + overhead
        if model.device.exchanges_in_turn:
            # A pass lasts from the start of its message to the end of the next one, and begins
            # when the pass that sends the message has computed.
            forward, backward = forward + received + send, backward + received + send
            received, send = send, -send
        yield ChunkSeconds(forward, backward, send=send)


def _send_seconds(num_bytes: int, copies: int, link: LinkLevel, model: TimeModel) -> float:
    """Return the seconds of sending the activations of one micro-batch to the next stage.

    Args:
        num_bytes: bytes that a device holds.
        copies: number of devices that hold the same activations.
        link: link between the stages.
    """
    if copies == 1:
        return link.call + link.latency + num_bytes / link.rate
    # Each of `copies` devices sends its part, which the next stage gathers (Narayanan et al.,
    # arXiv:2104.04473, section 4.1).
    inner = model.links.cluster.levels[0]
    gather = inner.call + copies * inner.latency + (copies - 1) / copies * num_bytes / inner.rate
    return link.call + link.latency + num_bytes / copies / link.rate + gather


def overlaps_of_chunk(
    chunk: Chunk, model: TimeModel, blocking: bool = False
) -> Mapping[Transfer, Overlap]:
    """Return the computation that overlaps each redistribution of a chunk on the model's cluster.

    Args:
        blocking: whether redistributions of activations block, instead of being started early.
    """
    started_early = {} if blocking else chunk.overlaps
    if not model.device.overlaps_products:
        return started_early
    # Kernels that pipeline a product with its collective need no early start.
    return {**started_early, **product_overlaps(chunk.graph, chunk.communication)}


@dataclass(frozen=True)
class Predicted:
    """Predicted seconds of one training step.

    Args:
        cluster: cluster on which the step runs.
        chunks: seconds of each chunk in the step, in model order.
        timeline: timeline of the stages; None for a single stage.
        seconds: seconds of the step.
        blocking, repeats_segments: arguments of `predict`.
    """

    cluster: Cluster
    chunks: tuple[StepTime, ...]
    timeline: Timeline | None
    seconds: float
    blocking: bool = False
    repeats_segments: bool = False

    @property
    def bubble(self) -> float:
        """Mean fraction of the timeline for which a stage is idle; 0 for one stage."""
        return 0.0 if self.timeline is None else self.timeline.bubble

    @property
    def computation(self) -> float:
        """Seconds of computation in a step; the maximum over stages."""
        return max(self._sum_seconds_by_stage(lambda chunk: chunk.computation))

    @property
    def communication(self) -> float:
        """Seconds of exposed communication within a stage in a step; the maximum over stages."""
        return max(self._sum_seconds_by_stage(lambda chunk: chunk.communication))

    def _sum_seconds_by_stage(self, chunk_seconds: Callable[[StepTime], float]) -> list[float]:
        if self.timeline is None:
            return [chunk_seconds(chunk) for chunk in self.chunks]
        pipeline = self.timeline.pipeline
        stage_seconds = [0.0] * pipeline.stages
        for number, chunk in enumerate(self.chunks):
            stage_seconds[pipeline.stage_of(number)] += chunk_seconds(chunk)
        return stage_seconds


def predict(
    partitioned: Partitioned,
    cluster: Cluster,
    blocking: bool = False,
    optimizer: str | torch.optim.Optimizer = "adamw",
    times: Sequence[ChunkTime] | None = None,
    repeats_segments: bool = False,
) -> Predicted:
    """Return the predicted seconds of a training step.

    With pipeline stages, a step takes the timeline of the stages plus the seconds that the slowest
    stage spends once per step: exposed gradient reductions, reductions between stages that share a
    parameter, and the optimizer.

    Args:
        blocking: whether redistributions of activations block, instead of being started early to
            overlap computation.
        optimizer: name or instance of the optimizer; every optimizer is assumed to take the time of
            AdamW, except that Muon also orthogonalizes matrices.
        times: cached result of `chunk_times`; None to compute it.
        repeats_segments: whether recomputed segments run again to their end, as in frameworks that
            do not stop at the last tensor that autograd needs.

    Raises:
        ConfigError: if the cluster has too few devices.
    """
    pipeline = partitioned.pipeline
    model = TimeModel(cluster, partitioned.mesh, pipeline.stages)
    if times is None:
        times = chunk_times(partitioned, cluster, blocking, optimizer, repeats_segments)
    steps = tuple(time.step for time in times)
    predicted = partial(
        Predicted, cluster, steps, blocking=blocking, repeats_segments=repeats_segments
    )
    if pipeline.stages == 1:
        # A single stage has a single chunk, whose seconds include all micro-batches.
        return predicted(None, steps[0].seconds)
    seconds_of_chunks = list(_chunk_seconds(times, pipeline, model))
    stages = timeline(pipeline, seconds_of_chunks)
    once_per_step = _seconds_once_per_step(partitioned, steps, model)
    # Where stages share a processor, an idle stage leaves it to the others. So the step takes the
    # mean of the seconds of all stages instead of the longest path.
    if model.shares_processor:
        average_busy = (1 - stages.bubble) * stages.seconds
        # Twice: outputs forward and their gradients backward.
        sent = 2 * pipeline.micro_batches * sum(chunk.send for chunk in seconds_of_chunks)
        seconds = average_busy + (sent + sum(once_per_step)) / pipeline.stages
        return predicted(stages, seconds)
    return predicted(stages, stages.seconds + max(once_per_step))


def min_step_seconds(
    partitioned: Partitioned, cluster: Cluster, times: Sequence[ChunkTime]
) -> float:
    """Return a lower bound on `predict(partitioned, cluster, times=times).seconds`.

    Simulating a pipeline of hundreds of stages and micro-batches takes seconds, the bound
    milliseconds.
    """
    pipeline = partitioned.pipeline
    model = TimeModel(cluster, partitioned.mesh, pipeline.stages)
    if pipeline.stages == 1 or model.shares_processor:
        return predict(partitioned, cluster, times=times).seconds
    once_per_step = _seconds_once_per_step(partitioned, [time.step for time in times], model)
    seconds_of_chunks = list(_chunk_seconds(times, pipeline, model))
    return min_timeline_seconds(pipeline, seconds_of_chunks) + max(once_per_step)


def _seconds_once_per_step(
    partitioned: Partitioned, steps: Sequence[StepTime], model: TimeModel
) -> list[float]:
    """Return the seconds that each stage spends once per step, outside of the timeline."""
    once_per_step = _shared_gradient_seconds(partitioned, model)
    for number, step in enumerate(steps):
        once_per_step[partitioned.pipeline.stage_of(number)] += step.exposed + step.update
    return [seconds + model.device.step_overhead for seconds in once_per_step]


def _shared_gradient_seconds(partitioned: Partitioned, model: TimeModel) -> list[float]:
    """Return for each stage the seconds to all-reduce the gradients of parameters that stages
    share.

    Each parameter has its own all-reduce; all-reduces do not overlap each other.
    """
    seconds = [0.0] * partitioned.pipeline.stages
    devices = partitioned.mesh.num_devices
    for stages, num_bytes in partitioned.shared_gradients:
        # A ring over the stages is as slow as the link between the first and the last stage.
        link = model.links.cluster.link_between(stages[0] * devices, stages[-1] * devices)
        # A ring of n members sends n − 1 of n parts of the tensor in each round.
        moved = (len(stages) - 1) / len(stages) * num_bytes / link.rate
        message_seconds = sequential_messages(link, len(stages)) * link.latency + moved
        # An all-reduce is two rounds, a reduce-scatter and an all-gather.
        for stage in stages:
            seconds[stage] += link.call + 2 * message_seconds
    return seconds
