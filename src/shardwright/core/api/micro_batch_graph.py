"""Capture a model for one micro-batch, and determine the batch dimension of each input."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from shardwright.core.capture.explanation import error_of_model
from shardwright.core.graph.graph import Graph, WholeBatch
from shardwright.core.micro_batches.batch_dims import JoinedDims
from shardwright.core.micro_batches.batch_norms import OF_BATCH_NORMS, PER_MICRO_BATCH
from shardwright.core.micro_batches.whole_batch import with_whole_batch
from shardwright.core.runtime.micro_batches import (
    SPLIT_NOTE,
    SampleDims,
    empty_full_batch,
    first_dims,
    micro_batch,
)
from shardwright.errors import (
    CaptureError,
    MixedSamplesError,
    PlanError,
    ShardwrightError,
    with_note,
)


@dataclass(frozen=True)
class MicroBatchCapture:
    """Capture of a model for one of `count` micro-batches.

    Args:
        capture: captures the model for a call, given the leaves of the arguments.
        leaves: leaves of the arguments of a call with the global batch.
        count: number of micro-batches.
        averages: whether the loss of the global batch must be the mean of the losses of
            micro-batches; otherwise their sum.
        batch_norm: one of `BATCH_NORMS`.
    """

    capture: Callable[[list[Any]], Graph]
    leaves: Sequence[Any]
    count: int
    averages: bool
    batch_norm: str

    def graph(self, batch_dims: Mapping[str, int | None] | None) -> tuple[Graph, SampleDims]:
        """Return the graph of a micro-batch, and the batch dimension of each leaf.

        The default is dimension 0 of all inputs with the same size of dimension 0 as the first
        input. If micro-batches with these dimensions cannot compute the loss of the global batch,
        other dimensions are tried, and those with the fewest elements computed for the global batch
        are chosen. If no dimensions work, `graph.whole_batch` is the reason as a string.

        Args:
            batch_dims: batch dimensions by input name, as specified by the user; None for the
                default.

        Raises:
            StrategyError: if a name in `batch_dims` is not the name of an input of the model.
            PlanError: if the number of micro-batches does not divide the batch size.
            CaptureError: if the model cannot be captured.
            MixedSamplesError: if the model can be captured for the global batch, but not for a
                micro-batch.
        """
        if self.count == 1:
            return self.capture(list(self.leaves)), ()
        if batch_dims is not None:
            dims = JoinedDims(self._global_batch_graph).named(batch_dims)
            try:
                return self._capture_with_batch_dims(dims), dims
            except CaptureError as error:
                raise self._explain_capture_error(error) from error
        graph, failure = None, None
        try:
            graph = self._capture_with_batch_dims(())
        except (CaptureError, PlanError) as error:
            failure = error
        # The reduction `sum` needs no analysis: the user has chosen that micro-batches are summed.
        if self.averages and (graph is None or _may_have_better_batch_dims(graph)):
            with_other_dims = self._capture_with_best_batch_dims(graph)
            if with_other_dims is not None:
                return with_other_dims
        if graph is None:
            assert failure is not None
            raise self._explain_capture_error(failure)
        return self._explain_batch_norm(graph), ()

    def _explain_batch_norm(self, graph: Graph) -> Graph:
        """Return `graph` with the reason that prevents micro-batches in `graph.whole_batch`.

        Replaces the reason "batch norm" by the reason that remains with
        `batch_norm="per_micro_batch"`, if any: errors must not recommend an option that fails.
        """
        reason = graph.whole_batch
        if not (self.averages and isinstance(reason, str) and reason.endswith(OF_BATCH_NORMS)):
            return graph
        # A remedy that the next call refuses would be of no use.
        of_each = self._capture_with_batch_dims((), PER_MICRO_BATCH)
        is_refused = isinstance(of_each.whole_batch, str)
        return replace(graph, whole_batch=of_each.whole_batch) if is_refused else graph

    def _explain_capture_error(self, error: ShardwrightError) -> ShardwrightError:
        """Return the error to raise after the capture of a micro-batch has failed with `error`.

        Raises:
            CaptureError: if the model cannot be captured for the global batch either.
        """
        # `_capture_with_batch_dims` sets this cause if the model rejected the micro-batch.
        if not self.averages or not isinstance(error.__cause__, CaptureError):
            return error
        # Raises its own error, if the model cannot be captured for the global batch either.
        _ = self._global_batch_graph
        return MixedSamplesError(
            f"micro_batches={self.count}: the model runs for the batch, but not for a micro-batch:"
            f" {error_of_model(str(error.__cause__).splitlines()[0])} ({SPLIT_NOTE})\n"
            "write `forward` for any number of samples; plan with fewer micro-batches, or 1"
            " (`recompute='auto'` saves memory); or name the batch dimension of each input, None"
            " for what all samples share (`batch_dims={'x': 1, 'table': None}`)"
        )

    def _capture_with_best_batch_dims(
        self, default_graph: Graph | None
    ) -> tuple[Graph, SampleDims] | None:
        tried = first_dims(self.leaves)
        try:
            candidates = list(JoinedDims(self._global_batch_graph).candidates(self.count))
        except CaptureError:
            # `graph` then reports the error for the default batch dimensions.
            return None
        captured: list[tuple[Graph, SampleDims]] = []
        # First, so that it wins if several choices read equally many elements.
        if default_graph is not None and not isinstance(default_graph.whole_batch, str):
            captured.append((default_graph, ()))
        for dims in candidates:
            # The default has been captured, or has failed.
            if dims == tried:
                continue
            # A model may reject a micro-batch along a wrong dimension.
            with suppress(CaptureError, PlanError):
                graph = self._capture_with_batch_dims(dims)
                if not isinstance(graph.whole_batch, str):
                    captured.append((graph, dims))
        # A tensor that is split only because of its size, such as a table, is read in full by each
        # micro-batch.
        return min(captured, key=lambda each: _count_prologue_elements(each[0]), default=None)

    def _capture_with_batch_dims(self, dims: SampleDims, batch_norm: str | None = None) -> Graph:
        piece = micro_batch(self.leaves, 0, self.count, dims)
        try:
            graph = self.capture(piece)
        except CaptureError as error:
            note = f" (captured for one of {self.count} micro-batches: {SPLIT_NOTE})"
            raise CaptureError(with_note(error, note)) from error
        if not self.averages:
            return graph

        def captured(number: int) -> Graph:
            # Captured once, for all candidates.
            if number == self.count:
                return self._global_batch_graph
            return self.capture(empty_full_batch(piece, number, dims))

        return with_whole_batch(graph, self.count, captured, batch_norm or self.batch_norm)

    @cached_property
    def _global_batch_graph(self) -> Graph:
        return self.capture(list(self.leaves))


def _may_have_better_batch_dims(graph: Graph) -> bool:
    """Whether to try other batch dimensions: with the current ones micro-batches cannot compute
    the loss of the global batch, or read slices of tensors computed for the global batch."""
    of_batch = graph.whole_batch
    if not isinstance(of_batch, WholeBatch):
        return isinstance(of_batch, str)
    return any(dim is not None for _, dim in of_batch.values)


def _count_prologue_elements(graph: Graph) -> int:
    """Return the number of elements that the prologue computes for the global batch."""
    if not isinstance(graph.whole_batch, WholeBatch) or graph.whole_batch.prologue is None:
        return 0
    return sum(value.numel for value in graph.whole_batch.prologue.output_values)
