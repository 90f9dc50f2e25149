"""The parts of a plan: what each of its pipeline stages runs, and how values pass between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from shardwright.graph.graph import Graph, Value
from shardwright.graph.split import GraphPiece, split_graph
from shardwright.layout.layout import Layout, TensorLayout
from shardwright.partition.communication import Communication
from shardwright.partition.decisions import CutAxes, Decisions
from shardwright.partition.pipeline_spec import PipelineSpec
from shardwright.rules import rule_of


@dataclass(frozen=True, eq=False)
class Chunk:
    """What one stage runs of a model, for one micro-batch.

    Args:
        number: in the order in which the parts run.
        stage: that owns it.
        graph: its operators; see `GraphPiece`.
        decided: of the whole model, with how values arrive from the part before and how they are
            left for the next.
        arriving, leaving: the values that are received and sent.
        returned: outputs of the model that are made here.
    """

    number: int
    stage: int
    graph: Graph
    decisions: Decisions
    arriving: tuple[Value, ...] = ()
    leaving: tuple[Value, ...] = ()
    returned: tuple[Value, ...] = ()

    def sent_bytes(self, mesh: Layout) -> tuple[int, int]:
        """Bytes that one device sends to the next part, and back to the one before as gradients."""
        departures, arrivals = self.decisions.departures, self.decisions.arrivals
        forward = sum(_local_bytes(v, departures[v.name], mesh) for v in self.leaving)
        gradients = [v for v in self.arriving if v.requires_grad]
        return forward, sum(_local_bytes(v, arrivals[v.name], mesh) for v in gradients)


def chunks(
    graph: Graph, mesh: Layout, decisions: Decisions, pipeline: PipelineSpec
) -> tuple[Chunk, ...]:
    """The parts of a planned model, in the order in which they run.

    A value crosses in the layout in which it is made; if it is a partial sum, as its first consumer
    reads it. Sender and receiver stand at the same place of their device matrices.

    Raises:
        PlanError: if the operators cannot be divided so.
    """
    if pipeline.parts == 1:
        return (Chunk(0, 0, graph, decisions, returned=tuple(dict.fromkeys(graph.output_values))),)
    pieces = split_graph(graph, pipeline.chunk_of, random_operators(graph))
    crossing = {
        value.name: _crossing(graph, value, mesh, decisions)
        for piece in pieces
        for value in piece.leaving
        if value in graph.producer
    }
    return tuple(
        _part(graph, mesh, decisions, pipeline, number, piece, crossing)
        for number, piece in enumerate(pieces)
    )


def _part(
    graph: Graph,
    mesh: Layout,
    decisions: Decisions,
    pipeline: PipelineSpec,
    number: int,
    piece: GraphPiece,
    crossing: dict[str, CutAxes],
) -> Chunk:
    arrivals = {value.name: crossing[value.name] for value in piece.arriving}
    departures = {value.name: crossing[value.name] for value in piece.leaving}
    if graph.loss is not None:
        for value in piece.returned:
            if value is not graph.loss and value in graph.producer:
                departures.setdefault(value.name, _crossing(graph, value, mesh, decisions))
    mine = replace(
        decisions,
        arrivals={**decisions.arrivals, **arrivals},
        departures={**decisions.departures, **departures},
    )
    stage = pipeline.stage_of(number)
    return Chunk(number, stage, piece.graph, mine, piece.arriving, piece.leaving, piece.returned)


def random_operators(graph: Graph) -> frozenset[str]:
    """The operators that draw random numbers, by name."""
    rules = ((op.name, rule_of(op)) for op in graph.ops)
    return frozenset(name for name, rule in rules if rule is not None and rule.random)


def stages_of_parameters(found: Sequence[Chunk]) -> dict[str, tuple[int, ...]]:
    """For each parameter the stages whose parts read it."""
    stages: dict[str, set[int]] = {}
    for part in found:
        for value in part.graph.parameters:
            stages.setdefault(value.name, set()).add(part.stage)
    return {name: tuple(sorted(numbers)) for name, numbers in stages.items()}


def step_bytes(
    found: Sequence[Chunk], flows: Sequence[Communication], mesh: Layout, pipeline: PipelineSpec
) -> tuple[tuple[int, int], ...]:
    """For each stage the bytes that one of its devices sends in a training step, forward and
    backward: conversions, what crosses to other stages, and gradients of parameters that several
    stages hold.

    Args:
        flows: the communication of each part.
    """
    count = pipeline.micro_batches
    sent = [[0, 0] for _ in range(pipeline.stages)]
    for part, flow in zip(found, flows, strict=True):
        forward, backward = flow.step_bytes(count)
        after, before = part.sent_bytes(mesh)
        if part.number + 1 < len(found) and found[part.number + 1].stage != part.stage:
            forward += count * after
        if part.number and found[part.number - 1].stage != part.stage:
            backward += count * before
        sent[part.stage][0] += forward
        sent[part.stage][1] += backward
    values = {v.name: v for part in found for v in part.graph.parameters if v.requires_grad}
    for name, stages in stages_of_parameters(found).items():
        if name in values and len(stages) > 1:
            axes = found[0].decisions.storage[name]
            shard = TensorLayout(mesh, axes).shard_shape(values[name].shape)
            local = prod(shard) * values[name].stored_dtype.itemsize
            for stage in stages:
                sent[stage][1] += -(-2 * (len(stages) - 1) * local // len(stages))
    return tuple((forward, backward) for forward, backward in sent)


def _crossing(graph: Graph, value: Value, mesh: Layout, decisions: Decisions) -> CutAxes:
    """How a value leaves the part that makes it."""
    producer = graph.producer[value]
    index = producer.outputs.index(value)
    told = decisions.outputs.get(producer.name, ())
    axes = told[index] if index < len(told) else None
    if axes is not None:
        return axes
    rule = rule_of(producer)
    if rule is None:
        return ((),) * len(value.shape)
    _, outputs = rule.layouts(mesh, decisions.cuts.get(producer.name, {}))
    if not outputs[index].partial:
        return outputs[index].axes
    return _as_read(graph, value, mesh, decisions)


def _as_read(graph: Graph, value: Value, mesh: Layout, decisions: Decisions) -> CutAxes:
    """How its first consumer reads a value; whole if none does."""
    for consumer, index in graph.consumers[value]:
        rule = rule_of(consumer)
        if rule is not None:
            inputs, _ = rule.layouts(mesh, decisions.cuts.get(consumer.name, {}))
            return inputs[index].axes
    return ((),) * len(value.shape)


def _local_bytes(value: Value, axes: CutAxes, mesh: Layout) -> int:
    return prod(TensorLayout(mesh, axes).shard_shape(value.shape)) * value.itemsize
