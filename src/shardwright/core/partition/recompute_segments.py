"""Segments of operators that are recomputed together in the backward pass.

A segment is one function run by `torch.utils.checkpoint`, which saves its inputs and reruns it in
the backward pass up to the last tensor that autograd needs. So a segment ends with the last of its
operators that saves a tensor; operators after that are left outside and run once.
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
        name: segment name from the decisions; with `/2`, `/3` if it had to be divided.
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
    """Transfers to the inputs of operators.

    Args:
        routes: transfers to each input of an operator, by `(operator name, input index)`.
        communicating: names of operators that communicate inside their kernels.
    """

    graph: Graph
    routes: Mapping[tuple[str, int], Sequence[Transfer]]
    communicating: Collection[str]

    def to(self, op: Op) -> Iterator[tuple[Value, Transfer]]:
        """Transfers to the inputs of an operator, each with its value."""
        for index, value in enumerate(op.inputs):
            yield from ((value, transfer) for transfer in self.routes[op.name, index])

    @cached_property
    def maker(self) -> dict[Transfer, str]:
        """First operator that reads the result of each transfer, which is emitted before it."""
        readers: dict[Transfer, str] = {}
        for op in self.graph.ops:
            for _, transfer in self.to(op):
                readers.setdefault(transfer, op.name)
        return readers

    def sends(self, op: Op) -> bool:
        """Whether an operator communicates inside, or a transfer emitted before it sends data."""
        own_transfers = (t for _, t in self.to(op) if self.maker[t] == op.name)
        return op.name in self.communicating or any(t.forward_bytes for t in own_transfers)


def recompute_segments(
    graph: Graph, recompute: Mapping[str, Recompute], transfers: OperatorTransfers
) -> tuple[Segment, ...]:
    """Group operators with the same `Recompute` into segments that can each run as one function.

    Other operators between them run before the segment, or after it if they depend on its results.
    A segment is divided where one of its operators would read the result of an operator that runs
    after it, or of a redistribution that is not repeated; and around operators that communicate
    inside, if communication is not repeated.
    """
    counts: dict[str, int] = {}
    result = []
    for run in _runs(graph, recompute, transfers):
        ops = _ops_to_rerun(run, transfers)
        # A run in which autograd saves nothing needs no recomputation.
        if ops:
            number = counts[run.recompute.segment] = counts.get(run.recompute.segment, 0) + 1
            name = run.recompute.segment if number == 1 else f"{run.recompute.segment}/{number}"
            names, communication = tuple(op.name for op in ops), run.recompute.communication
            trained = any(value.requires_grad for op in ops for value in op.outputs)
            result.append(Segment(name, names, communication, trained))
    return tuple(result)


@dataclass
class _OpenSegment:
    """A segment under construction.

    Args:
        recompute: the decision that its operators share.
        segment_values: outputs of its operators.
        dependent: values that skipped operators computed from those.
        skipped: names of the other operators since its first one.
    """

    recompute: Recompute
    ops: list[Op] = field(default_factory=list)
    segment_values: set[Value] = field(default_factory=set)
    dependent: set[Value] = field(default_factory=set)
    skipped: set[str] = field(default_factory=set)

    def accepts(self, op: Op, recompute: Recompute, transfers: OperatorTransfers) -> bool:
        # Skipped operators run after the segment if they read from it, so none of its operators
        # may read from them.
        if recompute != self.recompute or not self.dependent.isdisjoint(op.inputs):
            return False
        return not any(
            value in self.segment_values
            and (transfers.maker[t] in self.skipped or not recompute.communication)
            for value, t in transfers.to(op)
        )

    def add(self, op: Op) -> None:
        self.ops.append(op)
        self.segment_values.update(op.outputs)

    def skip(self, op: Op, transfers: OperatorTransfers) -> None:
        names = {own_transfers.name for own_transfers in self.ops}
        self.skipped.add(op.name)
        if not (self.segment_values | self.dependent).isdisjoint(op.inputs) or any(
            transfers.maker[transfer] in names for _, transfer in transfers.to(op)
        ):
            self.dependent.update(op.outputs)


def _runs(
    graph: Graph, recompute: Mapping[str, Recompute], transfers: OperatorTransfers
) -> Iterator[_OpenSegment]:
    run: _OpenSegment | None = None
    for op in graph.ops:
        op_recompute = recompute.get(op.name)
        if op_recompute is None or (
            op.name in transfers.communicating and not op_recompute.communication
        ):
            if run is not None:
                run.skip(op, transfers)
            continue
        if run is None or not run.accepts(op, op_recompute, transfers):
            if run is not None:
                yield run
            run = _OpenSegment(op_recompute)
        run.add(op)
    if run is not None:
        yield run


def _ops_to_rerun(run: _OpenSegment, transfers: OperatorTransfers) -> list[Op]:
    """Operators up to the last that saves a tensor for backward, and those after it that send
    nothing and read nothing else that would have to be saved, such as the addition of a bias.

    An operator that communicates inside cannot be the last one, as the rerun may stop before or
    after its communication, depending on when it saves its last tensor.
    """
    # `torch.utils.checkpoint` stops the rerun at the last tensor that it has to restore.
    end = len(run.ops)
    while end and (
        run.ops[end - 1].name in transfers.communicating or not saved_tensors(run.ops[end - 1])
    ):
        end -= 1
    ops = run.ops[:end]
    available = {value for op in ops for value in (*op.inputs, *op.outputs)}
    for op in run.ops[end:] if ops else ():
        reads = {value for value in op.inputs if value.kind in (Kind.ACTIVATION, Kind.INPUT)}
        if transfers.sends(op) or not reads <= available:
            break
        ops.append(op)
        available.update(op.outputs)
    return ops


def assign_recomputed_transfers(
    segments: Sequence[Segment], transfers: OperatorTransfers, decisions: Decisions
) -> None:
    """Mark the transfers that segments repeat, by setting their `segment`.

    A value from outside is saved where it is smallest on its route: gathers are repeated,
    reductions are not. Parameters are gathered once, unless ZeRO frees them (`level3`).
    """
    reshards = decisions.sharding is not None and decisions.sharding.level == "level3"
    for segment in segments:
        ops = [transfers.graph.by_name[name] for name in segment.ops]
        segment_values = {value for op in ops for value in op.outputs}
        for op in ops:
            for index, value in enumerate(op.inputs):
                own_transfers = [
                    t for t in transfers.routes[op.name, index] if transfers.maker[t] == op.name
                ]
                if value.kind is Kind.PARAMETER:
                    repeated = own_transfers if reshards else []
                else:
                    repeated = own_transfers if segment.communication else []
                    if value not in segment_values:
                        repeated = repeated[_num_not_repeated(repeated, segment) :]
                for transfer in repeated:
                    transfer.segment, transfer.is_repeated = segment.name, segment.trained


def _num_not_repeated(route: Sequence[Transfer], segment: Segment) -> int:
    """Number of leading transfers of an outside value that are not repeated: up to the last that
    sends data and leaves the value no larger than it was."""
    first = route[0].previous if route else None
    if not route or (first is not None and first.segment == segment.name):
        return 0
    # Saving the value where it is smallest costs least memory; steps after that are repeated.
    smallest, number = _local_numel(route[0], route[0].step.source), 0
    for position, transfer in enumerate(route, start=1):
        size = _local_numel(transfer, transfer.step.target)
        if transfer.forward_bytes and size <= smallest:
            smallest, number = size, position
    return number


def _local_numel(transfer: Transfer, layout: TensorLayout) -> int:
    return prod(layout.shard_shape(transfer.value.shape))
