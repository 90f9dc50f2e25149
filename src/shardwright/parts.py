"""The parts of a plan: what each of its pipeline stages runs, and how values pass between them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwright.communication import Communication, communication
from shardwright.decided import CutAxes, Decided
from shardwright.graph.graph import Graph, Value
from shardwright.graph.split import split
from shardwright.layout import Layout, TensorLayout
from shardwright.pipelining import Pipelining
from shardwright.rules import rule_of


@dataclass(frozen=True, eq=False)
class Part:
    """What one stage runs of a model, for one micro-batch.

    Args:
        number: in the order in which the parts run.
        stage: that owns it.
        graph: its operators; see `Piece`.
        decided: of the whole model, with how values arrive from the part before and how they are
            left for the next.
        arriving, leaving: the values that are received and sent.
        returned: outputs of the model that are made here.
    """

    number: int
    stage: int
    graph: Graph
    decided: Decided
    arriving: tuple[Value, ...] = ()
    leaving: tuple[Value, ...] = ()
    returned: tuple[Value, ...] = ()

    def sent_bytes(self, mesh: Layout) -> tuple[int, int]:
        """Bytes that one device sends to the next part, and back to the one before as gradients."""

        def size(value: Value, axes: CutAxes) -> int:
            numel = 1
            for extent in TensorLayout(mesh, axes).shard_shape(value.shape):
                numel *= extent
            return numel * value.itemsize

        forward = sum(size(v, self.decided.departures[v.name]) for v in self.leaving)
        gradients = [v for v in self.arriving if v.requires_grad]
        return forward, sum(size(v, self.decided.arrivals[v.name]) for v in gradients)


def parts(graph: Graph, mesh: Layout, decided: Decided, pipeline: Pipelining) -> tuple[Part, ...]:
    """The parts of a planned model, in the order in which they run.

    A value crosses in the layout in which it is made; if it is a partial sum, as its first consumer
    reads it. Sender and receiver stand at the same place of their device matrices.

    Raises:
        PlanError: if the operators cannot be divided so.
    """
    if pipeline.parts == 1:
        return (Part(0, 0, graph, decided, returned=tuple(dict.fromkeys(graph.output_values))),)
    pieces = split(graph, pipeline.part_of, random_operators(graph))
    crossing: dict[str, CutAxes] = {}
    found = []
    for number, piece in enumerate(pieces):
        mine = replace(
            decided,
            arrivals={
                **decided.arrivals,
                **{value.name: crossing[value.name] for value in piece.arriving},
            },
        )
        flow = communication(piece.graph, mesh, mine)
        for value in piece.leaving:
            if value.name not in crossing:
                crossing[value.name] = _departure(graph, value, flow, mesh, decided)
        departures = {value.name: crossing[value.name] for value in piece.leaving}
        if graph.loss is not None:
            others = [v for v in piece.returned if v is not graph.loss]
            for value in others:
                departures.setdefault(value.name, flow.layout(value).axes)
        found.append(
            Part(
                number,
                pipeline.stage_of(number),
                piece.graph,
                replace(mine, departures={**decided.departures, **departures}),
                piece.arriving,
                piece.leaving,
                piece.returned,
            )
        )
    return tuple(found)


def random_operators(graph: Graph) -> frozenset[str]:
    """The operators that draw random numbers, by name."""
    rules = ((op.name, rule_of(op)) for op in graph.ops)
    return frozenset(name for name, rule in rules if rule is not None and rule.random)


def _departure(
    graph: Graph, value: Value, flow: Communication, mesh: Layout, decided: Decided
) -> CutAxes:
    """How a value leaves the part that makes it."""
    made = flow.layout(value)
    if not made.partial:
        return made.axes
    source = next(v for v in graph.producer if v.name == value.name)
    consumer, index = graph.consumers[source][0]
    rule = rule_of(consumer)
    if rule is None:
        return ((),) * len(value.shape)
    inputs, _ = rule.layouts(mesh, decided.cuts.get(consumer.name, {}))
    return inputs[index].axes
