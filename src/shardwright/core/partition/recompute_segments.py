"""Segments of operators that are recomputed together in the backward pass.

A segment is one function run by `torch.utils.checkpoint`, which saves its inputs and reruns it in
the backward pass up to the last tensor that autograd needs. So a segment ends with the last of its
operators that saves a tensor; later operators are not part of the segment and run once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from shardwright.core.graph.graph import Graph, Kind, Op, Value
from shardwright.core.graph.saved_tensors import saved_tensors
from shardwright.core.layout.layout import TensorLayout
from shardwright.core.partition.decisions import Decisions, Recompute
from shardwright.core.partition.transfer import Transfer


@dataclass(frozen=True)
class Segment:
    """Operators that are recomputed together.

    Args:
        name: segment name from the decisions; `name/2`, `name/3` for parts after the first one.
        ops: names of the operators, in order.
        communication: whether redistributions inside are repeated.
        trained: whether gradients of the graph's `trained` outputs flow through it.
    """

    name: str
    ops: tuple[str, ...]
    communication: bool
    trained: bool


@dataclass(frozen=True)
class OperatorTransfers:
    """Transfers to the inputs of operators, and the operator before which each is emitted.

    Args:
        routes: transfers to each input of an operator, by `(operator name, input index)`.
        communicating: names of operators that communicate inside their kernels.
    """

    graph: Graph
    routes: Mapping[tuple[str, int], Sequence[Transfer]]
    communicating: Collection[str]

    def transfers_to(self, op: Op) -> Iterator[tuple[Value, Transfer]]:
        """Yield the transfers to the inputs of an operator, each with its value."""
        for index, value in enumerate(op.inputs):
            yield from ((value, transfer) for transfer in self.routes[op.name, index])

    @cached_property
    def first_consumer(self) -> dict[Transfer, str]:
        """Name of the first operator that needs each transfer, which is emitted right before it."""
        first_consumer: dict[Transfer, str] = {}
        for op in self.graph.ops:
            for _, transfer in self.transfers_to(op):
                first_consumer.setdefault(transfer, op.name)
        return first_consumer

    def sends(self, op: Op) -> bool:
        """Whether an operator communicates inside, or a transfer emitted before it sends data."""
        emitted = (t for _, t in self.transfers_to(op) if self.first_consumer[t] == op.name)
        return op.name in self.communicating or any(t.forward_bytes for t in emitted)


def recompute_segments(
    graph: Graph, recompute: Mapping[str, Recompute], transfers: OperatorTransfers
) -> tuple[Segment, ...]:
    """Group operators with the same `Recompute` into segments that can each run as one function.

    Other operators between them run before the segment, or after it if they depend on its results.
    A segment is divided where one of its operators would read the result of an operator that runs
    after it, or of a redistribution that is not repeated; and around operators that communicate
    inside, if communication is not repeated.
    """
    num_parts: dict[str, int] = {}
    result = []
    for candidate in _candidate_segments(graph, recompute, transfers):
        ops = _ops_to_rerun(candidate, transfers)
        # A segment in which autograd saves nothing needs no recomputation.
        if ops:
            segment = candidate.recompute.segment
            part = num_parts[segment] = num_parts.get(segment, 0) + 1
            name = segment if part == 1 else f"{segment}/{part}"
            names, communication = tuple(op.name for op in ops), candidate.recompute.communication
            trained = any(value.requires_grad for op in ops for value in op.outputs)
            result.append(Segment(name, names, communication, trained))
    return tuple(result)


@dataclass
class _OpenSegment:
    """A segment under construction.

    Args:
        recompute: the decision that its operators share.
        results: outputs of its operators.
        dependent_values: values that skipped operators compute from the results.
        skipped_ops: names of the operators since its first one that do not belong to it.
    """

    recompute: Recompute
    ops: list[Op] = field(default_factory=list)
    results: set[Value] = field(default_factory=set)
    dependent_values: set[Value] = field(default_factory=set)
    skipped_ops: set[str] = field(default_factory=set)

    def accepts(self, op: Op, recompute: Recompute, transfers: OperatorTransfers) -> bool:
        """Whether `op` may become the next operator of the segment."""
        # Skipped operators run after the segment if they read from it, so none of its operators
        # may read from them.
        if recompute != self.recompute or not self.dependent_values.isdisjoint(op.inputs):
            return False
        return not any(
            value in self.results
            and (transfers.first_consumer[t] in self.skipped_ops or not recompute.communication)
            for value, t in transfers.transfers_to(op)
        )

    def add(self, op: Op) -> None:
        self.ops.append(op)
        self.results.update(op.outputs)

    def skip(self, op: Op, transfers: OperatorTransfers) -> None:
        """Record an operator that runs before or after the segment."""
        names = {own_op.name for own_op in self.ops}
        self.skipped_ops.add(op.name)
        # A transfer that is emitted inside the segment makes its other consumers dependent, too.
        if not (self.results | self.dependent_values).isdisjoint(op.inputs) or any(
            transfers.first_consumer[transfer] in names
            for _, transfer in transfers.transfers_to(op)
        ):
            self.dependent_values.update(op.outputs)


def _candidate_segments(
    graph: Graph, recompute: Mapping[str, Recompute], transfers: OperatorTransfers
) -> Iterator[_OpenSegment]:
    """Yield maximal segments, before operators at their ends that need no rerun are removed."""
    segment: _OpenSegment | None = None
    for op in graph.ops:
        op_recompute = recompute.get(op.name)
        # The collective inside a kernel cannot be saved apart from the kernel.
        if op_recompute is None or (
            op.name in transfers.communicating and not op_recompute.communication
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


def _ops_to_rerun(segment: _OpenSegment, transfers: OperatorTransfers) -> list[Op]:
    """Return the operators up to the last one that saves a tensor for the backward pass, and later
    ones that send nothing and read nothing else that would be saved, such as the addition of a
    bias.

    An operator that communicates inside cannot be the last one, as the rerun may stop before or
    after its communication, depending on when it saves its last tensor.
    """
    # `torch.utils.checkpoint` stops the rerun at the last tensor that it has to restore.
    end = len(segment.ops)
    while end and (
        segment.ops[end - 1].name in transfers.communicating
        or not saved_tensors(segment.ops[end - 1])
    ):
        end -= 1
    ops = segment.ops[:end]
    available = {value for op in ops for value in (*op.inputs, *op.outputs)}
    for op in segment.ops[end:] if ops else ():
        inputs = {value for value in op.inputs if value.kind in (Kind.ACTIVATION, Kind.INPUT)}
        if transfers.sends(op) or not inputs <= available:
            break
        ops.append(op)
        available.update(op.outputs)
    return ops


def assign_recomputed_transfers(
    segments: Sequence[Segment], transfers: OperatorTransfers, decisions: Decisions
) -> None:
    """Set `segment` and `is_repeated` of the transfers that segments repeat.

    An input of a segment is saved where it is smallest on its route: gathers are repeated,
    reductions are not. Parameters are gathered once, unless ZeRO frees them (`level3`).
    """
    frees_parameters = decisions.sharding is not None and decisions.sharding.level == "level3"
    for segment in segments:
        ops = [transfers.graph.by_name[name] for name in segment.ops]
        results = {value for op in ops for value in op.outputs}
        for op in ops:
            for index, value in enumerate(op.inputs):
                emitted = [
                    transfer
                    for transfer in transfers.routes[op.name, index]
                    if transfers.first_consumer[transfer] == op.name
                ]
                if value.kind is Kind.PARAMETER:
                    repeated = emitted if frees_parameters else []
                else:
                    repeated = emitted if segment.communication else []
                    if value not in results:
                        repeated = repeated[_num_steps_before_save(repeated, segment) :]
                for transfer in repeated:
                    transfer.segment, transfer.is_repeated = segment.name, segment.trained


def _num_steps_before_save(route: Sequence[Transfer], segment: Segment) -> int:
    """Return the number of leading transfers of a segment's input that are not repeated: up to the
    last one that sends data and leaves the value no larger than any before."""
    previous = route[0].previous if route else None
    # The transfers before these are repeated already, so these must be, too.
    if not route or (previous is not None and previous.segment == segment.name):
        return 0
    # Saving the value where it is smallest costs least memory; steps after that are repeated.
    smallest, num_steps = _local_numel(route[0], route[0].step.source), 0
    for length, transfer in enumerate(route, start=1):
        numel = _local_numel(transfer, transfer.step.target)
        if transfer.forward_bytes and numel <= smallest:
            smallest, num_steps = numel, length
    return num_steps


def _local_numel(transfer: Transfer, layout: TensorLayout) -> int:
    return prod(layout.shard_shape(transfer.value.shape))
