"""Which operators the backward pass computes again together.

One function computes the operators of a segment, and `torch.utils.checkpoint` runs it: it keeps
what the function is given, and runs it again, up to the last tensor that autograd needs, when the
backward pass comes to it. So a segment ends with the last operator that keeps something, and what
follows it is computed outside, once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from shardwright.decided import Recompute
from shardwright.graph.graph import Graph, Kind, Op, Value
from shardwright.graph.saved import saved


@dataclass(frozen=True)
class Segment:
    """Operators that one function computes, and again in the backward pass.

    Args:
        name: as it was decided; with `/2`, `/3` where it is in several parts.
        ops: names of the operators, in their order.
        communication: whether conversions inside are made again too.
    """

    name: str
    ops: tuple[str, ...]
    communication: bool


@dataclass(frozen=True)
class Ways:
    """What segments need to know of the conversions of a plan.

    Args:
        made_for: for each operator the values that it reads converted, each with the name of the
            operator that the conversion is made for first.
        sending: operators whose own conversions send bytes in the forward pass.
        talking: operators that talk inside.
    """

    made_for: Mapping[str, Collection[tuple[Value, str]]]
    sending: Collection[str]
    talking: Collection[str]


def segments(graph: Graph, recompute: Mapping[str, Recompute], ways: Ways) -> tuple[Segment, ...]:
    """Joins operators of one segment that can be computed by one function.

    Operators between them that are of no segment are computed before it, or after it if they read
    its results. A segment is in parts where an operator reads what such a one made of it, or a
    conversion of it that is not made again; and around operators that talk inside, where talking is
    not done again.
    """
    counts: dict[str, int] = {}
    result = []
    for run in _runs(graph, recompute, ways):
        ops = _trimmed(run, ways)
        if ops:
            number = counts[run.said.segment] = counts.get(run.said.segment, 0) + 1
            name = run.said.segment if number == 1 else f"{run.said.segment}/{number}"
            result.append(Segment(name, tuple(op.name for op in ops), run.said.communication))
    return tuple(result)


@dataclass
class _Run:
    """A segment under construction.

    Args:
        inside: what its operators make.
        after: what is made of that by operators that are not of it.
        others: the names of operators that are not of it, since its first one.
    """

    said: Recompute
    ops: list[Op] = field(default_factory=list)
    inside: set[Value] = field(default_factory=set)
    after: set[Value] = field(default_factory=set)
    others: set[str] = field(default_factory=set)

    def takes(self, op: Op, said: Recompute, ways: Ways) -> bool:
        if said != self.said or not self.after.isdisjoint(op.inputs):
            return False
        return not any(
            value in self.inside and (maker in self.others or not said.communication)
            for value, maker in ways.made_for.get(op.name, ())
        )

    def add(self, op: Op) -> None:
        self.ops.append(op)
        self.inside.update(op.outputs)

    def pass_by(self, op: Op) -> None:
        self.others.add(op.name)
        if not (self.inside | self.after).isdisjoint(op.inputs):
            self.after.update(op.outputs)


def _runs(graph: Graph, recompute: Mapping[str, Recompute], ways: Ways) -> Iterator[_Run]:
    run: _Run | None = None
    for op in graph.ops:
        said = recompute.get(op.name)
        if said is None or (op.name in ways.talking and not said.communication):
            if run is not None:
                run.pass_by(op)
            continue
        if run is None or not run.takes(op, said, ways):
            if run is not None:
                yield run
            run = _Run(said)
        run.add(op)
    if run is not None:
        yield run


def _trimmed(run: _Run, ways: Ways) -> list[Op]:
    """The operators up to the last that keeps something; further ones stay if they need nothing
    else to be kept and send nothing, as the addition of a bias does.

    What an operator that talks inside keeps may come before or after it talks, so it is not last.
    """
    end = len(run.ops)
    while end and (run.ops[end - 1].name in ways.talking or not saved(run.ops[end - 1])):
        end -= 1
    ops = run.ops[:end]
    known = {value for op in ops for value in (*op.inputs, *op.outputs)}
    for op in run.ops[end:] if ops else ():
        reads = {value for value in op.inputs if value.kind in (Kind.ACTIVATION, Kind.INPUT)}
        if op.name in ways.talking or op.name in ways.sending or not reads <= known:
            break
        ops.append(op)
        known.update(op.outputs)
    return ops
