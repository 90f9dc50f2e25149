"""Totals of the collectives of a stage in one step: number of calls, bytes and seconds.

There is one total for each type of collective and its mesh axes. Their bytes add up to
`Partitioned.step_bytes`, without the transfers between stages.
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
    """Totals of one type of collective over the same mesh axes, for one device in one step.

    Args:
        kind: type of collective, one of `COLLECTIVES`.
        over: names of the mesh axes.
        count: number of calls.
        bytes: bytes that the device sends in all calls.
        seconds: predicted or measured seconds of all calls; None if unknown.
    """

    kind: str
    over: str
    count: float
    bytes: float
    seconds: float | None


_CollectiveCalls = tuple[str, Axes, int, int]
"""(Type of collective, mesh axes, calls per step, bytes per call); bytes are those of the local
input or output, whichever is larger."""


def collective_totals(
    partitioned: Partitioned, stage: int, cluster: Cluster | None
) -> tuple[CollectiveTotal, ...]:
    """Return the totals of the collectives that a device of `stage` runs in a training step.

    Args:
        stage: index of the pipeline stage.
        cluster: cluster for which seconds are predicted, overlapped communication included; None
            for no seconds.
    """
    mesh, pipeline = partitioned.mesh, partitioned.pipeline
    links = None if cluster is None else Links(cluster, mesh, pipeline.stages)
    totals: dict[tuple[str, Axes], list[float]] = {}
    for chunk in partitioned.chunks_of(stage):
        for collective, axes, calls, size in _collectives_of_chunk(chunk, pipeline.micro_batches):
            # Steps may list the axes of one group in different orders.
            total = totals.setdefault((collective, tuple(sorted(axes))), [0, 0, 0])
            seconds = 0.0 if links is None else links.seconds(collective, axes, size)
            per_call = (1, COLLECTIVES[collective].sent_volume(size, mesh.size(axes)), seconds)
            total[:] = [
                total_so_far + calls * value
                for total_so_far, value in zip(total, per_call, strict=True)
            ]
    return tuple(
        CollectiveTotal(name, mesh.named(axes), count, sent, None if links is None else seconds)
        for (name, axes), (count, sent, seconds) in totals.items()
    )


def _collectives_of_chunk(chunk: Chunk, micro_batches: int) -> Iterator[_CollectiveCalls]:
    communication = chunk.communication
    # The gathers and reductions of parameters in a bucket are one collective, counted below.
    bucketed = {
        id(t) for b in communication.buckets for member in b.members for t in member.transfers
    }
    for transfer in communication.transfers:
        if id(transfer) not in bucketed:
            yield from _collectives_of_transfer(transfer, micro_batches)
    # Collectives inside operators, such as the sums of a batch norm.
    for name, op_reductions in communication.reductions.items():
        trained = any(value.requires_grad for value in chunk.graph.by_name[name].outputs)
        for inner_reduction in op_reductions:
            reduction = inner_reduction.reduction
            forward, backward = reduction.num_collectives(
                communication.mesh.size(inner_reduction.axes), trained
            )
            # Recomputed operators run their forward collectives again in the backward pass.
            calls = forward + backward + (forward if name in communication.recomputed_ops else 0)
            size = prod(reduction.shape) * reduction.dtype.itemsize
            yield reduction.collective, inner_reduction.axes, calls * micro_batches, size
    for bucket in communication.buckets:
        yield from _collectives_of_bucket(bucket, micro_batches)


def _collectives_of_transfer(transfer: Transfer, micro_batches: int) -> Iterator[_CollectiveCalls]:
    step, value = transfer.step, transfer.value
    # The larger of input and output: the output of an all-gather, the input of a reduce-scatter.
    size = max(prod(side.shard_shape(value.shape)) for side in (step.source, step.target))
    if step.forward is not None:
        # Recomputation in the backward pass repeats the forward collective.
        runs = 2 if transfer.is_repeated else 1
        yield step.forward, step.axes, runs * micro_batches, size * value.itemsize
    if step.backward is not None and transfer.trained:
        yield step.backward, step.axes, micro_batches, size * value.itemsize


def _collectives_of_bucket(bucket: Bucket, micro_batches: int) -> Iterator[_CollectiveCalls]:
    """Yield the collectives of a parameter bucket: at most one all-gather of its parameters, and
    one reduce-scatter and one all-reduce of its gradients, each over all of its axes."""
    # Level 3 (ZeRO-3) frees gathered parameters after use, so each micro-batch gathers them.
    gathers = micro_batches if bucket.level == "level3" else 1
    # Reshard after forward: the backward pass gathers the parameters again.
    gathers += micro_batches if bucket.regathers else 0
    stored_bytes = bucket.numel * bucket.members[0].value.itemsize
    # Gradients are reduced by the backward passes of the steps that gather or replicate parameters.
    steps = {
        "all_gather": [step for step in bucket.steps if step.operation == "all_gather"],
        "reduce_scatter": [step for step in bucket.steps if step.backward == "reduce_scatter"],
        "all_reduce": [step for step in bucket.steps if step.backward == "all_reduce"],
    }
    for collective, steps_of_collective in steps.items():
        if steps_of_collective and (collective == "all_gather" or bucket.trained):
            axes = tuple({axis for step in steps_of_collective for axis in step.axes})
            reductions = 1 if bucket.reduces_once else micro_batches
            calls = gathers if collective == "all_gather" else reductions
            group_size = prod(step.group_size for step in steps_of_collective)
            # With HSDP the all-reduce follows the reduce-scatter, so it sends shards.
            size = stored_bytes if collective == "all_reduce" else stored_bytes * group_size
            yield collective, axes, calls, size
