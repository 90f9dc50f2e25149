"""Segments of operators that are recomputed together in the backward pass.

A segment is a function that `torch.utils.checkpoint` runs: it saves the inputs of the function, and
recomputes the function in the backward pass up to the last tensor that autograd needs. So a segment
ends with the last operator that saves a tensor; later operators are not part of the segment and run
once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from shardwright.core.graph.graph import Graph, Op, Origin, Value
from shardwright.core.graph.saved_tensors import saved_tensors
from shardwright.core.layout.layout import TensorLayout
from shardwright.core.partition.decisions import Decisions, Recompute
from shardwright.core.partition.transfer import Transfer


@dataclass(frozen=True)
class Segment:
    """Operators that are recomputed together in the backward pass.

    Args:
        name: segment name from the decisions; `name/2`, `name/3` for the second and third part of a
            divided segment.
        ops: names of the operators, in order.
        repeated_ops: names of the operators whose kernels run again.
        communication: whether redistributions inside the segment are repeated.
        trained: whether the backward pass from `Graph.trained` runs through the segment.
    """

    name: str
    ops: tuple[str, ...]
    repeated_ops: tuple[str, ...]
    communication: bool
    trained: bool


@dataclass(frozen=True)
class OperatorTransfers:
    """Transfers to the inputs of operators, and the operator before which each is emitted.

    Args:
        routes: transfers to each input of an operator, by (operator name, input index).
        communicating_ops: names of operators that communicate inside their kernels.
    """

    graph: Graph
    routes: Mapping[tuple[str, int], Sequence[Transfer]]
    communicating_ops: Collection[str]

    def transfers_to(self, op: Op) -> Iterator[tuple[Value, Transfer]]:
        """Yield (input value, transfer) for all transfers to the inputs of an operator."""
        for index, value in enumerate(op.inputs):
            yield from ((value, transfer) for transfer in self.routes[op.name, index])

    @cached_property
    def first_consumer(self) -> dict[Transfer, str]:
        """Name of the first operator that needs the result of each transfer; the transfer is
        emitted right before it."""
        first_consumer: dict[Transfer, str] = {}
        for op in self.graph.ops:
            for _, transfer in self.transfers_to(op):
                # Operators come in graph order, so the first entry stays.
                first_consumer.setdefault(transfer, op.name)
        return first_consumer

    def sends(self, op: Op) -> bool:
        """Whether `op` communicates inside its kernel, or a transfer right before it sends data."""
        emitted = (t for _, t in self.transfers_to(op) if self.first_consumer[t] == op.name)
        return op.name in self.communicating_ops or any(t.forward_bytes for t in emitted)


def recompute_segments(
    graph: Graph, recompute: Mapping[str, Recompute], transfers: OperatorTransfers
) -> tuple[Segment, ...]:
    """Return the segments of operators with equal `Recompute` decisions; each can run as one
    function.

    Operators in between that are not recomputed run before the segment, or after it if they depend
    on its results. A segment is divided into several

    - before an operator that reads a result of these later operators,
    - before an operator that reads the result of a redistribution that is not repeated, and
    - around operators that communicate inside their kernels, unless communication is repeated.

    Args:
        recompute: recomputation of each recomputed operator, by operator name.
    """
    num_parts: dict[str, int] = {}
    result = []
    for candidate in _iterate_maximal_segments(graph, recompute, transfers):
        ops = _trim_unneeded_ops(candidate, transfers)
        # A segment in which autograd saves no tensors needs no recomputation.
        if ops:
            segment = candidate.recompute.segment
            number = num_parts[segment] = num_parts.get(segment, 0) + 1
            name = segment if number == 1 else f"{segment}/{number}"
            names, communication = tuple(op.name for op in ops), candidate.recompute.communication
            repeated = names[: _count_repeated_ops(ops)]
            trained = any(value.requires_grad for op in ops for value in op.outputs)
            result.append(Segment(name, names, repeated, communication, trained))
    return tuple(result)


def _count_repeated_ops(ops: Sequence[Op]) -> int:
    """Return the number of operators of a segment that `torch.utils.checkpoint` runs again.

    Recomputation stops once all saved tensors exist: before the last operator that saves tensors,
    or after it if it saves tensors other than its inputs.
    """
    # Some operator saves a tensor, or `_trim_unneeded_ops` would have left nothing of the segment.
    last = max(index for index, op in enumerate(ops) if saved_tensors(op))
    saved = saved_tensors(ops[last])
    return last + 1 if saved.outputs or saved.others else last


@dataclass
class _OpenSegment:
    """A recomputed segment under construction.

    Args:
        recompute: the `Recompute` decision of all operators of the segment.
        ops: operators of the segment so far, in order.
        results: outputs of `ops`.
        dependent_values: values that `skipped_ops` compute from `results`.
        skipped_ops: names of the operators that follow the first of `ops` but are not in the
            segment.
    """

    recompute: Recompute
    ops: list[Op] = field(default_factory=list)
    results: set[Value] = field(default_factory=set)
    dependent_values: set[Value] = field(default_factory=set)
    skipped_ops: set[str] = field(default_factory=set)

    def accepts(self, op: Op, recompute: Recompute, transfers: OperatorTransfers) -> bool:
        """Whether `op` may become the next operator of the segment."""
        # Skipped operators that read results of the segment run after it, so no operator of the
        # segment may read their results.
        if recompute != self.recompute or not self.dependent_values.isdisjoint(op.inputs):
            return False
        # Such a transfer is emitted after the segment, or its result is saved and not recomputed.
        return not any(
            value in self.results
            and (transfers.first_consumer[t] in self.skipped_ops or not recompute.communication)
            for value, t in transfers.transfers_to(op)
        )

    def add(self, op: Op) -> None:
        """Append `op` to the segment."""
        self.ops.append(op)
        self.results.update(op.outputs)

    def skip(self, op: Op, transfers: OperatorTransfers) -> None:
        """Leave `op` out of the segment; it runs before or after the segment."""
        names = {segment_op.name for segment_op in self.ops}
        self.skipped_ops.add(op.name)
        # All consumers of a transfer that is emitted inside the segment depend on the segment.
        if not (self.results | self.dependent_values).isdisjoint(op.inputs) or any(
            transfers.first_consumer[transfer] in names
            for _, transfer in transfers.transfers_to(op)
        ):
            self.dependent_values.update(op.outputs)


def _iterate_maximal_segments(
    graph: Graph, recompute: Mapping[str, Recompute], transfers: OperatorTransfers
) -> Iterator[_OpenSegment]:
    """Yield maximal segments, which may end with operators that need no recomputation."""
    segment: _OpenSegment | None = None
    for op in graph.ops:
        op_recompute = recompute.get(op.name)
        # The result of a collective inside a kernel cannot be saved without the result of the
        # kernel.
        if op_recompute is None or (
            op.name in transfers.communicating_ops and not op_recompute.communication
        ):
            if segment is not None:
                segment.skip(op, transfers)
            continue
        if segment is None or not segment.accepts(op, op_recompute, transfers):
            if segment is not None:
                yield segment
            segment = _OpenSegment(op_recompute)
        segment.add(op)
    if segment is not None:
        yield segment


def _trim_unneeded_ops(segment: _OpenSegment, transfers: OperatorTransfers) -> list[Op]:
    """Return the operators of `segment` without trailing operators that need no recomputation.

    Recomputation ends with the last operator that saves a tensor for the backward pass. It must not
    communicate inside its kernel, as recomputation may stop before or after the communication.
    Later operators, such as the addition of a bias, stay in the segment only if they send no data
    and read no tensors from outside of it.
    """
    # `torch.utils.checkpoint` stops at the last tensor that it has to recompute.
    end = len(segment.ops)
    while end and (
        segment.ops[end - 1].name in transfers.communicating_ops
        or not saved_tensors(segment.ops[end - 1])
    ):
        end -= 1
    ops = segment.ops[:end]
    available = {value for op in ops for value in (*op.inputs, *op.outputs)}
    # With these operators inside, the segment returns the sum with the bias only, not its operand
    # too.
    for op in segment.ops[end:] if ops else ():
        # Parameters, buffers and constants stay allocated anyway, so they count as available.
        inputs = {value for value in op.inputs if value.origin in (Origin.ACTIVATION, Origin.INPUT)}
        if transfers.sends(op) or not inputs <= available:
            break
        ops.append(op)
        available.update(op.outputs)
    return ops


def assign_recomputed_transfers(
    segments: Sequence[Segment], transfers: OperatorTransfers, decisions: Decisions
) -> None:
    """Set `segment` and `is_repeated` of the transfers that recomputing `segments` repeats.

    An input of a segment is saved where it is smallest on its route, so that gathers are repeated
    and reductions are not. Parameters are gathered once, unless `level3` frees them.
    """
    frees_parameters = decisions.sharding is not None and decisions.sharding.level == "level3"
    for segment in segments:
        ops = [transfers.graph.by_name[name] for name in segment.ops]
        results = {value for op in ops for value in op.outputs}
        for op in ops:
            for index, value in enumerate(op.inputs):
                # Transfers with an earlier first consumer are emitted there, and repeated with its
                # segment.
                emitted = [
                    transfer
                    for transfer in transfers.routes[op.name, index]
                    if transfers.first_consumer[transfer] == op.name
                ]
                if value.origin is Origin.PARAMETER:
                    repeated = emitted if frees_parameters else []
                else:
                    repeated = emitted if segment.communication else []
                    # A value from outside is saved at one point of its route, while results of the
                    # segment itself are recomputed.
                    if value not in results:
                        repeated = repeated[_count_transfers_before_saving(repeated, segment) :]
                for transfer in repeated:
                    # A segment without gradients has no backward pass that would repeat the
                    # transfer.
                    transfer.segment, transfer.is_repeated = segment.name, segment.trained


def _count_transfers_before_saving(route: Sequence[Transfer], segment: Segment) -> int:
    """Return the number of transfers of `route` before the point at which an input of `segment` is
    saved.

    The backward pass repeats the transfers after this point. The input is smallest there; of
    equally small points, the last is chosen. The point is the start of the route, or after a
    transfer that sends data.
    """
    previous = route[0].previous if route else None
    # The transfers before `route` are repeated already, so those of `route` must be repeated too.
    if not route or (previous is not None and previous.segment == segment.name):
        return 0
    # Saving the value where it is smallest needs the least memory; later steps are repeated.
    smallest, num_steps = _local_numel(route[0], route[0].step.source), 0
    for length, transfer in enumerate(route, start=1):
        numel = _local_numel(transfer, transfer.step.target)
        if transfer.forward_bytes and numel <= smallest:
            smallest, num_steps = numel, length
    return num_steps


def _local_numel(transfer: Transfer, layout: TensorLayout) -> int:
    return prod(layout.shard_shape(transfer.value.shape))
