"""What a stage sends in a step by kind of collective and axes: how often, how many bytes, seconds.

It counts what `Partitioned.step_bytes` sums up, without what crosses between stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from shardwright.core.cost.cluster import Cluster
from shardwright.core.cost.collectives import Links
from shardwright.core.layout.axes import Axes
from shardwright.core.layout.collective_spec import COLLECTIVES
from shardwright.core.partition.chunk import Chunk
from shardwright.core.partition.parameter_buckets import Bucket
from shardwright.core.partition.partitioned import Partitioned
from shardwright.core.partition.transfer import Transfer


@dataclass(frozen=True)
class CollectiveTotal:
    """What one device does of a kind of collective in a step.

    Args:
        kind: one of `COLLECTIVES`.
        over: the names of its axes.
        count: how often.
        bytes: that the device sends.
        seconds: None if they are not known.
    """

    kind: str
    over: str
    count: float
    bytes: float
    seconds: float | None


_Sent = tuple[str, Axes, int, int]
"""Kind, axes, how often in a step, and the bytes of the larger side of the local tensor."""


def collective_totals(
    partitioned: Partitioned, stage: int, cluster: Cluster | None
) -> tuple[CollectiveTotal, ...]:
    """The collectives of a device of `stage` in a training step.

    Args:
        cluster: predicts their seconds, those beside computation too.
    """
    mesh, pipeline = partitioned.mesh, partitioned.pipeline
    links = None if cluster is None else Links(cluster, mesh, pipeline.stages)
    totals: dict[tuple[str, Axes], list[float]] = {}
    for chunk in partitioned.chunks_of(stage):
        for kind, axes, times, size in _of_chunk(chunk, pipeline.micro_batches):
            total = totals.setdefault((kind, tuple(sorted(axes))), [0, 0, 0])
            seconds = 0.0 if links is None else links.seconds(kind, axes, size)
            each = (1, COLLECTIVES[kind].sent(size, mesh.size(axes)), seconds)
            total[:] = [sum_ + times * one for sum_, one in zip(total, each, strict=True)]
    return tuple(
        CollectiveTotal(kind, mesh.named(axes), count, sent, None if links is None else seconds)
        for (kind, axes), (count, sent, seconds) in totals.items()
    )


def _of_chunk(chunk: Chunk, micro_batches: int) -> Iterator[_Sent]:
    flow = chunk.communication
    bucketed = {id(t) for b in flow.buckets for member in b.members for t in member.transfers}
    for transfer in flow.transfers:
        if id(transfer) not in bucketed:
            yield from _of_transfer(transfer, micro_batches)
    for name, inner in flow.reductions.items():
        trained = any(value.requires_grad for value in chunk.graph.by_name[name].outputs)
        for each in inner:
            reduction = each.reduction
            forward, backward = reduction.num_collectives(flow.mesh.size(each.axes), trained)
            runs = forward + backward + (forward if name in flow.computed_again else 0)
            size = prod(reduction.shape) * reduction.dtype.itemsize
            yield reduction.collective, each.axes, runs * micro_batches, size
    for bucket in flow.buckets:
        yield from _of_bucket(bucket, micro_batches)


def _of_transfer(transfer: Transfer, times: int) -> Iterator[_Sent]:
    step, value = transfer.step, transfer.value
    size = max(prod(side.shard_shape(value.shape)) for side in (step.source, step.target))
    if step.forward is not None:
        again = 2 if transfer.again else 1
        yield step.forward, step.axes, again * times, size * value.itemsize
    if step.backward is not None and transfer.trained:
        yield step.backward, step.axes, times, size * value.itemsize


def _of_bucket(bucket: Bucket, micro_batches: int) -> Iterator[_Sent]:
    """All its gathers as one over all their axes, and likewise what reduces its gradients."""
    runs = micro_batches if bucket.level == "level3" else 1
    runs += micro_batches if bucket.again else 0
    stored = bucket.numel * bucket.members[0].value.itemsize
    steps = {
        "all_gather": [step for step in bucket.steps if step.kind == "all_gather"],
        "reduce_scatter": [step for step in bucket.steps if step.backward == "reduce_scatter"],
        "all_reduce": [step for step in bucket.steps if step.backward == "all_reduce"],
    }
    for kind, those in steps.items():
        if those and (kind == "all_gather" or bucket.trained):
            axes = tuple({axis for step in those for axis in step.axes})
            times = runs if kind == "all_gather" else 1 if bucket.once else micro_batches
            whole = stored if kind == "all_reduce" else stored * prod(s.group_size for s in those)
            yield kind, axes, times, whole
