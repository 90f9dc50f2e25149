"""Which operators the backward pass computes again together.

One function computes the operators of a segment, and `torch.utils.checkpoint` runs it: it keeps
what the function is given, and runs it again, up to the last tensor that autograd needs, when the
backward pass comes to it. So a segment ends with the last operator that keeps something, and what
follows it is computed outside, once.
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
    """Operators that one function computes, and again in the backward pass.

    Args:
        name: as it was decided; with `/2`, `/3` where it is divided.
        ops: names of the operators, in their order.
        communication: whether redistributions inside are made again too.
        trained: whether gradients of the graph's `trained` outputs flow through it.
    """

    name: str
    ops: tuple[str, ...]
    communication: bool
    trained: bool


@dataclass(frozen=True)
class OperatorTransfers:
    """The redistributions of a plan on the way to its operators.

    Args:
        routes: for each input of an operator, `(operator name, index)`, the transfers on the way.
        communicating: operators that communicate inside their kernels.
    """

    graph: Graph
    routes: Mapping[tuple[str, int], Sequence[Transfer]]
    communicating: Collection[str]

    def to(self, op: Op) -> Iterator[tuple[Value, Transfer]]:
        """The transfers on the way to an operator, each with the value that it converts."""
        for index, value in enumerate(op.inputs):
            yield from ((value, transfer) for transfer in self.routes[op.name, index])

    @cached_property
    def maker(self) -> dict[Transfer, str]:
        """For each transfer the first operator that reads its result; it is made for that one."""
        readers: dict[Transfer, str] = {}
        for op in self.graph.ops:
            for _, transfer in self.to(op):
                readers.setdefault(transfer, op.name)
        return readers

    def sends(self, op: Op) -> bool:
        """Whether something is sent in the forward pass for this operator first."""
        mine = (t for _, t in self.to(op) if self.maker[t] == op.name)
        return op.name in self.communicating or any(t.forward_bytes for t in mine)


def recompute_segments(
    graph: Graph, recompute: Mapping[str, Recompute], transfers: OperatorTransfers
) -> tuple[Segment, ...]:
    """Joins operators of one segment that can be computed by one function.

    Operators between them that are of no segment are computed before it, or after it if they read
    its results. A segment is divided where an operator reads what such a one made of it, or a
    redistribution of it that is not made again; and around operators that communicate inside, where
    communication is not repeated.
    """
    counts: dict[str, int] = {}
    result = []
    for run in _runs(graph, recompute, transfers):
        ops = _trimmed(run, transfers)
        if ops:
            number = counts[run.mark.segment] = counts.get(run.mark.segment, 0) + 1
            name = run.mark.segment if number == 1 else f"{run.mark.segment}/{number}"
            names, again = tuple(op.name for op in ops), run.mark.communication
            trained = any(value.requires_grad for op in ops for value in op.outputs)
            result.append(Segment(name, names, again, trained))
    return tuple(result)


@dataclass
class _OpenSegment:
    """A segment under construction.

    Args:
        inside: what its operators make.
        after: what is made of that by operators that are not of it.
        others: the names of operators that are not of it, since its first one.
    """

    mark: Recompute
    ops: list[Op] = field(default_factory=list)
    inside: set[Value] = field(default_factory=set)
    after: set[Value] = field(default_factory=set)
    others: set[str] = field(default_factory=set)

    def takes(self, op: Op, mark: Recompute, transfers: OperatorTransfers) -> bool:
        if mark != self.mark or not self.after.isdisjoint(op.inputs):
            return False
        return not any(
            value in self.inside and (transfers.maker[t] in self.others or not mark.communication)
            for value, t in transfers.to(op)
        )

    def add(self, op: Op) -> None:
        self.ops.append(op)
        self.inside.update(op.outputs)

    def pass_by(self, op: Op, transfers: OperatorTransfers) -> None:
        names = {mine.name for mine in self.ops}
        self.others.add(op.name)
        if not (self.inside | self.after).isdisjoint(op.inputs) or any(
            transfers.maker[transfer] in names for _, transfer in transfers.to(op)
        ):
            self.after.update(op.outputs)


def _runs(
    graph: Graph, recompute: Mapping[str, Recompute], transfers: OperatorTransfers
) -> Iterator[_OpenSegment]:
    run: _OpenSegment | None = None
    for op in graph.ops:
        mark = recompute.get(op.name)
        if mark is None or (op.name in transfers.communicating and not mark.communication):
            if run is not None:
                run.pass_by(op, transfers)
            continue
        if run is None or not run.takes(op, mark, transfers):
            if run is not None:
                yield run
            run = _OpenSegment(mark)
        run.add(op)
    if run is not None:
        yield run


def _trimmed(run: _OpenSegment, transfers: OperatorTransfers) -> list[Op]:
    """The operators up to the last that keeps something; further ones stay if they need nothing
    else to be kept and send nothing, as the addition of a bias does.

    What an operator that communicates inside keeps may come before or after it does, so it is not
    last.
    """
    end = len(run.ops)
    while end and (
        run.ops[end - 1].name in transfers.communicating or not saved_tensors(run.ops[end - 1])
    ):
        end -= 1
    ops = run.ops[:end]
    known = {value for op in ops for value in (*op.inputs, *op.outputs)}
    for op in run.ops[end:] if ops else ():
        reads = {value for value in op.inputs if value.kind in (Kind.ACTIVATION, Kind.INPUT)}
        if transfers.sends(op) or not reads <= known:
            break
        ops.append(op)
        known.update(op.outputs)
    return ops


def assign_recomputed_transfers(
    segments: Sequence[Segment], transfers: OperatorTransfers, decisions: Decisions
) -> None:
    """Lets segments make transfers again, by their `segment`.

    A value from outside is kept where it is smallest on its way in: a gather is made again, a sum
    is not. Parameters are gathered once, unless optimizer parallel frees them (`level3`).
    """
    frees = decisions.sharding is not None and decisions.sharding.level == "level3"
    for segment in segments:
        ops = [transfers.graph.by_name[name] for name in segment.ops]
        inside = {value for op in ops for value in op.outputs}
        for op in ops:
            for index, value in enumerate(op.inputs):
                mine = [
                    t for t in transfers.routes[op.name, index] if transfers.maker[t] == op.name
                ]
                if value.kind is Kind.PARAMETER:
                    again = mine if frees else []
                else:
                    again = mine if segment.communication else []
                    if value not in inside:
                        again = again[_smallest(again, segment) :]
                for transfer in again:
                    transfer.segment, transfer.again = segment.name, segment.trained


def _smallest(route: Sequence[Transfer], segment: Segment) -> int:
    """How many transfers on the way of a value from outside are made once: up to the last that
    sends something and leaves the value no larger than it was."""
    first = route[0].before if route else None
    if not route or (first is not None and first.segment == segment.name):
        return 0
    smallest, number = _size(route[0], route[0].step.source), 0
    for position, transfer in enumerate(route, start=1):
        size = _size(transfer, transfer.step.target)
        if transfer.forward_bytes and size <= smallest:
            smallest, number = size, position
    return number


def _size(transfer: Transfer, layout: TensorLayout) -> int:
    return prod(layout.shard_shape(transfer.value.shape))
