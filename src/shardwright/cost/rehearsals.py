"""Rehearsals that are made once for parts that are alike, such as the middle stages of a model
whose layers are equal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from shardwright.cost.rehearsal import Rehearsal, rehearse
from shardwright.graph.graph import Graph, Kind, Op, Value
from shardwright.layout import Layout
from shardwright.parts import Part


class Rehearsals:
    """What parts need that were rehearsed before."""

    def __init__(self) -> None:
        self._found: dict[object, Rehearsal] = {}
        self._operators: dict[Any, Any] = {}

    def of(
        self, part: Part, whole: Graph, mesh: Layout, kinds: Sequence[str], several: bool
    ) -> Rehearsal:
        """What a part needs; the arguments are those of `rehearse`."""
        key = (likeness(part), mesh, tuple(kinds), several)
        if key not in self._found:
            found = rehearse(part, whole, mesh, kinds, several, self._operators)
            self._found[key] = found
        return self._found[key]


def likeness(part: Part) -> tuple[object, ...]:
    """What the bytes of a part depend on: everything but the names of its values and operators, in
    place of which stand numbers in the order of their first appearance."""
    return tuple(_Description(part).lines())


class _Description:
    """A part without names."""

    def __init__(self, part: Part) -> None:
        self.part, self.decided = part, part.decided
        self._numbers: dict[object, int] = {}

    def lines(self) -> Iterator[object]:
        part, graph, decided = self.part, self.part.graph, self.decided
        yield decided.sharding, decided.bucket_bytes, part.number > 0, graph.loss is None
        given = (graph.input_values, graph.parameters, graph.buffers, tuple(graph.constants))
        for values in given:
            yield tuple(map(self._value, values))
        for op in graph.ops:
            yield self._op(op)
        yield tuple((self._number(old), self._number(new)) for old, new in graph.updates)
        for values in (part.arriving, part.leaving, part.returned, graph.output_values):
            yield tuple(map(self._number, values))

    def _number(self, thing: object) -> int:
        return self._numbers.setdefault(thing, len(self._numbers))

    def _value(self, value: Value) -> tuple[object, ...]:
        name, decided = value.name, self.decided
        return (
            self._number(value),
            *(value.shape, value.dtype, value.stored_dtype, value.requires_grad),
            decided.storage.get(name) if value.kind is Kind.PARAMETER else None,
            *(decided.arrivals.get(name), decided.departures.get(name)),
        )

    def _op(self, op: Op) -> tuple[object, ...]:
        decided, said = self.decided, self.decided.recompute.get(op.name)
        cuts = decided.cuts.get(op.name, {})
        return (
            op.target,
            self._argument(op.args),
            self._argument(op.kwargs),
            tuple(map(self._value, op.outputs)),
            tuple((factor, tuple(axes)) for factor, axes in cuts.items() if axes),
            decided.outputs.get(op.name),
            None if said is None else (self._number(said.segment), said.communication),
        )

    def _argument(self, given: Any) -> object:
        if isinstance(given, Value):
            return Value, self._number(given)
        if isinstance(given, list | tuple):
            return tuple(map(self._argument, given))
        if isinstance(given, dict):
            return tuple((name, self._argument(each)) for name, each in given.items())
        return repr(given)
