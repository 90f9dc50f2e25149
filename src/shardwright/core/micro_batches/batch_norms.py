"""Batch norms in training, with statistics of the global batch or of each micro-batch."""

from __future__ import annotations

from shardwright.core.graph.custom_ops import batch_norm_train, instance_norm_train
from shardwright.core.graph.graph import Graph, Op, Value
from shardwright.core.micro_batches.sample_states import UnsplittableError

WHOLE_BATCH = "whole_batch"
PER_MICRO_BATCH = "per_micro_batch"
BATCH_NORMS = (WHOLE_BATCH, PER_MICRO_BATCH)
"""Values of the option `batch_norm`."""

NORMALIZES_ALL = "the operator normalizes by statistics of all samples"
AVERAGES_ALL = "the operator updates running statistics with statistics of all samples"
OF_BATCH_NORMS = (NORMALIZES_ALL, AVERAGES_ALL)
"""Error texts about models that can be split with `batch_norm="per_micro_batch"` only."""


def takes_statistics(op: Op) -> bool:
    """Whether `op` computes statistics over the batch: a batch norm in training, or an instance
    norm with running statistics."""
    return op.target in (batch_norm_train, instance_norm_train)


def use_of_statistics(op: Op) -> str:
    """Return the reason why `op` needs all samples: `NORMALIZES_ALL` for a batch norm, or
    `AVERAGES_ALL` for an instance norm."""
    return NORMALIZES_ALL if op.target is batch_norm_train else AVERAGES_ALL


def running_statistics(graph: Graph) -> set[Value]:
    """Return all updated buffers, the new statistics of batch norms, and values computed from these
    only."""
    statistics = {before for before, _ in graph.updates}
    for op in graph.ops:
        if takes_statistics(op):
            # The first output is the normalized tensor.
            statistics.update(op.outputs[1:])
        # An operator without inputs, such as `zeros`, computes nothing from statistics.
        elif op.inputs and statistics.issuperset(op.inputs):
            statistics.update(op.outputs)
    return statistics


def refused_batch_norm(graph: Graph) -> str | None:
    """Return the error text if a graph with a loss has batch norms with running statistics; else
    None.

    The statistics of a micro-batch differ from those of the global batch.
    """
    # Batch norms without running statistics update nothing and are left to the analysis.
    batch_norms = _list_batch_norms_with_updates(graph)
    if graph.loss is None or not batch_norms:
        return None
    return str(UnsplittableError(batch_norms[0], use_of_statistics(batch_norms[0])))


def updated_statistics(graph: Graph) -> frozenset[Value]:
    """Return the buffers that each micro-batch updates with `batch_norm="per_micro_batch"`.

    These are running statistics, and counts of their updates (`num_batches_tracked`).
    """
    # New statistics, and what is computed from them and old statistics only, such as their average.
    measured = {value for op in _list_batch_norms_with_updates(graph) for value in op.outputs[1:]}
    statistics = running_statistics(graph)
    for op in graph.ops:
        if statistics.issuperset(op.inputs) and not measured.isdisjoint(op.inputs):
            measured.update(op.outputs)
    return frozenset(
        before
        for before, after in graph.updates
        if after in measured
        # `num_batches_tracked` counts micro-batches, as in gradient accumulation.
        or (before.name.rpartition(".")[2] == "num_batches_tracked" and after in statistics)
    )


def _list_batch_norms_with_updates(graph: Graph) -> list[Op]:
    return [op for op in graph.ops if takes_statistics(op) and len(op.outputs) > 1]
