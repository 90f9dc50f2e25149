"""Rewrite losses of micro-batches so that their mean or sum is the loss of the global batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shardwright.core.graph.graph import Graph
from shardwright.core.graph.python_call import PythonCall
from shardwright.core.micro_batches.analysis import graph_of_micro_batch
from shardwright.core.micro_batches.batch_norms import (
    PER_MICRO_BATCH,
    WHOLE_BATCH,
    refused_batch_norm,
)
from shardwright.core.micro_batches.paired_graphs import (
    OTHER_PYTHON,
    PairedGraphs,
    different_operator,
)
from shardwright.core.micro_batches.sample_flow import SampleFlow
from shardwright.core.micro_batches.sample_states import UnsplittableError
from shardwright.errors import CaptureError


def with_whole_batch(
    graph: Graph,
    micro_batches: int,
    captured: Callable[[int], Graph],
    batch_norm: str = WHOLE_BATCH,
) -> Graph:
    """Return the graph of a micro-batch with `Graph.whole_batch` set.

    Operators are rewritten such that the loss of the global batch is the mean or sum of the losses
    of micro-batches. If that is impossible, `Graph.whole_batch` is the reason as a `str`.

    Args:
        graph: the captured graph of a micro-batch.
        micro_batches: number of micro-batches in the global batch.
        captured: captures the model for a batch as large as a given number of micro-batches.
        batch_norm: one of `BATCH_NORMS`.

    Raises:
        CaptureError: if the model cannot be captured for the global batch.
    """
    if micro_batches == 1:
        return graph
    per_micro_batch = batch_norm == PER_MICRO_BATCH
    # First, as capturing the batch takes long.
    refusal = None if per_micro_batch else refused_batch_norm(graph)
    if refusal is not None:
        return replace(graph, whole_batch=refusal)
    try:
        pair = _pair_batch_and_micro_batch(graph, micro_batches, captured)
        # Python code runs once per batch, around all micro-batches.
        if not _have_equal_python_state(pair.batch.python, graph.python):
            return replace(graph, whole_batch=OTHER_PYTHON)
        return graph_of_micro_batch(SampleFlow(pair, micro_batches, per_micro_batch))
    except UnsplittableError as mixed:
        return replace(graph, whole_batch=str(mixed))


def _have_equal_python_state(
    of_batch: PythonCall | None, of_micro_batch: PythonCall | None
) -> bool:
    """Whether the Python code of `forward` reads and stores equal values in both captures."""
    if of_batch is None or of_micro_batch is None:
        return of_batch is of_micro_batch
    return (
        of_batch.current == of_micro_batch.current
        and of_batch.outputs == of_micro_batch.outputs
        and of_batch.stored == of_micro_batch.stored
    )


def _pair_batch_and_micro_batch(
    graph: Graph, micro_batches: int, captured: Callable[[int], Graph]
) -> PairedGraphs:
    # With all sizes of the global batch, to see which numbers depend on the batch size.
    batch = captured(micro_batches)
    twin, different = graph, different_operator(graph, batch)
    if different is not None:
        # Dimensions of size 1 are captured differently: they are broadcast, or dropped from views.
        # So are numbers such as `len(x) - 1` if they are 0 or 1. So the batch is compared with one
        # of another size.
        try:
            # Neither the batch, nor a micro-batch, which may be of one sample.
            twin = captured(4 if micro_batches == 2 else 2)
        except CaptureError:
            raise UnsplittableError(*different) from None
        if different_operator(twin, batch) is not None:
            raise UnsplittableError(*different)
    return PairedGraphs(batch, graph, twin)
