"""Divides a graph into parts that run one after the other, on devices of their own.

A value that is made in one part and read in a later one crosses: it is an output of the one and an
input of the other, and passes through the parts between. What follows from the model's inputs,
constants and unchanging buffers alone, without gradient and without chance, does not cross: every
part that reads it computes it again. Parameters are read by every part that uses them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from shardwright.errors import PlanError
from shardwright.graph.graph import Graph, Kind, Op, Value
from shardwright.torch_internals import pytree


@dataclass(frozen=True, eq=False)
class GraphPiece:
    """One part of a graph.

    Args:
        graph: what it computes. Its inputs are inputs of the whole that it reads, then `arriving`;
            its outputs are `leaving`, then `returned`, each once.
        arriving: what comes from the part before, as inputs of this graph.
        leaving: what the next part is given, in the order in which it arrives there.
        returned: outputs of the whole model that are made in this part; the loss in the last.
    """

    graph: Graph
    arriving: tuple[Value, ...]
    leaving: tuple[Value, ...]
    returned: tuple[Value, ...]


def split_graph(
    graph: Graph, chunk_of: Mapping[str, int], random: frozenset[str] = frozenset()
) -> tuple[GraphPiece, ...]:
    """The parts of `graph`, in the order in which they run.

    Args:
        part_of: for each operator the number of its part, from 0 without gaps.
        random: operators that draw random numbers; they are never computed twice.

    Raises:
        PlanError: if an operator has no part, a part no operator, a value is read in an earlier
            part than it is made in, or a buffer is updated in another part than it is read in.
    """
    count = _count(graph, chunk_of)
    again = _repeatable(graph, random)
    kept = [_operators(graph, chunk_of, number, again) for number in range(count)]
    _check_buffers(graph, chunk_of)
    crossing = _crossing(graph, chunk_of, kept, again)
    pieces = []
    for number, ops in enumerate(kept):
        arriving = [v for v, (made, last) in crossing.items() if made < number <= last]
        leaving = [v for v, (made, last) in crossing.items() if made <= number < last]
        pieces.append(_piece(graph, chunk_of, number, ops, arriving, leaving))
    return tuple(pieces)


def _count(graph: Graph, chunk_of: Mapping[str, int]) -> int:
    missing = [op.name for op in graph.ops if op.name not in chunk_of]
    if missing:
        raise PlanError(f"operator {missing[0]!r} has no stage; {len(missing)} in all have none")
    numbers = {chunk_of[op.name] for op in graph.ops}
    count = max(numbers) + 1
    empty = sorted(set(range(count)) - numbers)
    if empty:
        raise PlanError(
            f"of {count} parts of the model, {', '.join(map(str, empty))} would have no operator;"
            " use fewer stages, or give each of them a module"
        )
    return count


def _repeatable(graph: Graph, random: frozenset[str]) -> frozenset[Value]:
    """The activations that any part may compute itself."""
    updated = {buffer for buffer, _ in graph.updates}
    found = {
        value
        for value in (*graph.input_values, *graph.buffers, *graph.constants)
        if not value.requires_grad and value not in updated
    }
    for op in graph.ops:
        certain = op.name not in random and not any(v.requires_grad for v in op.outputs)
        if certain and all(value in found for value in op.inputs):
            found.update(op.outputs)
    return frozenset(value for op in graph.ops for value in op.outputs if value in found)


def _operators(
    graph: Graph, chunk_of: Mapping[str, int], number: int, again: frozenset[Value]
) -> tuple[Op, ...]:
    """The operators of one part, with those that it repeats."""
    results = {*graph.output_values, *(value for _, value in graph.updates)}
    needed: set[Value] = set()
    kept = []
    for op in reversed(graph.ops):
        if op.outputs[0] in again:
            wanted = any(v in needed for v in op.outputs) or (
                chunk_of[op.name] == number and any(v in results for v in op.outputs)
            )
        else:
            wanted = chunk_of[op.name] == number
        if wanted:
            kept.append(op)
            needed.update(op.inputs)
    return tuple(reversed(kept))


def _check_buffers(graph: Graph, chunk_of: Mapping[str, int]) -> None:
    for buffer, value in graph.updates:
        producer = graph.producer.get(value)
        if producer is None:
            continue
        for op, _ in graph.consumers[buffer]:
            if chunk_of[op.name] != chunk_of[producer.name]:
                raise PlanError(
                    f"buffer {buffer.name!r} is read by {op.name!r} in part {chunk_of[op.name]} but"
                    f" updated by {producer.name!r} in part {chunk_of[producer.name]}, while other"
                    " micro-batches run; put both into one stage"
                )


def _crossing(
    graph: Graph,
    chunk_of: Mapping[str, int],
    kept: Iterable[tuple[Op, ...]],
    again: frozenset[Value],
) -> dict[Value, tuple[int, int]]:
    """For each value that crosses the part that makes it and the last that reads it."""
    last: dict[Value, int] = {}
    for number, ops in enumerate(kept):
        for op in ops:
            for value in op.inputs:
                producer = graph.producer.get(value)
                if producer is None or value in again:
                    continue
                if chunk_of[producer.name] > number:
                    raise PlanError(
                        f"{op.name!r} in part {number} reads what {producer.name!r} makes in part"
                        f" {chunk_of[producer.name]}; stages must ascend in the order of execution"
                    )
                last[value] = number
    if graph.loss is not None and graph.loss in graph.producer:
        # Gradients start in the last part.
        last[graph.loss] = max(chunk_of.values())
    found = {}
    for op in graph.ops:
        for value in op.outputs:
            if last.get(value, 0) > chunk_of[op.name] and value not in again:
                found[value] = (chunk_of[op.name], last[value])
    return found


def _piece(
    graph: Graph,
    chunk_of: Mapping[str, int],
    number: int,
    ops: tuple[Op, ...],
    arriving: list[Value],
    leaving: list[Value],
) -> GraphPiece:
    given = {value: replace(value, kind=Kind.INPUT) for value in arriving}
    ops = tuple(_reading(op, given) for op in ops)
    read = {value for op in ops for value in op.inputs}
    loss = _loss(graph, chunk_of, number, given)
    returned = _returned(graph, chunk_of, number, loss)
    updates = tuple(
        (buffer, value)
        for buffer, value in graph.updates
        if _made_in(graph, chunk_of, value) == number
    )
    used = read | set(returned) | {v for pair in updates for v in pair}
    inputs = (*(v for v in graph.input_values if v in used), *given.values())
    passed = tuple(given.get(value, value) for value in leaving)
    outputs = tuple(dict.fromkeys((*passed, *returned)))
    part = replace(
        graph,
        ops=ops,
        inputs=inputs,
        in_spec=pytree.tree_structure((inputs, {})),
        outputs=outputs,
        out_spec=pytree.tree_structure(outputs),
        parameters=tuple(v for v in graph.parameters if v in used),
        buffers=tuple(v for v in graph.buffers if v in used),
        constants={v: tensor for v, tensor in graph.constants.items() if v in used},
        updates=updates,
        loss=loss,
    )
    return GraphPiece(part, tuple(given.values()), passed, returned)


def _made_in(graph: Graph, chunk_of: Mapping[str, int], value: Value) -> int:
    """The part that makes a value; the first for what is given to the model."""
    producer = graph.producer.get(value)
    return 0 if producer is None else chunk_of[producer.name]


def _loss(
    graph: Graph, chunk_of: Mapping[str, int], number: int, given: Mapping[Value, Value]
) -> Value | None:
    """The loss, in the last part."""
    if graph.loss is None or number != max(chunk_of.values()):
        return None
    return given.get(graph.loss, graph.loss)


def _returned(
    graph: Graph, chunk_of: Mapping[str, int], number: int, loss: Value | None
) -> tuple[Value, ...]:
    """What the model returns from one part: what is made in it, and the loss from the last."""
    found = [
        value
        for value in graph.output_values
        if value is not graph.loss and _made_in(graph, chunk_of, value) == number
    ]
    return tuple(dict.fromkeys((*found, *([] if loss is None else [loss]))))


def _reading(op: Op, given: Mapping[Value, Value]) -> Op:
    """`op` with values that arrive from elsewhere in place of those that are made elsewhere."""
    if not any(value in given for value in op.inputs):
        return op
    args, kwargs = op.arguments(lambda value: given.get(value, value))
    return replace(op, args=args, kwargs=kwargs)


def with_neighbors(graph: Graph, anchored: Mapping[str, int]) -> dict[str, int]:
    """The part of every operator: as named, or the latest of what it reads, or else the earliest of
    what reads it."""
    chunk_of: dict[str, int] = {}

    def producer_parts(op: Op) -> list[int]:
        makers = (graph.producer.get(value) for value in op.inputs)
        return [chunk_of[maker.name] for maker in makers if maker and maker.name in chunk_of]

    def readers(values: Iterable[Value]) -> list[int]:
        names = (op.name for value in values for op, _ in graph.consumers[value])
        return [chunk_of[name] for name in names if name in chunk_of]

    for op in graph.ops:
        if op.name in anchored:
            chunk_of[op.name] = anchored[op.name]
        elif found := producer_parts(op):
            chunk_of[op.name] = max(found)
    for op in reversed(graph.ops):
        if op.name not in chunk_of:
            chunk_of[op.name] = min(readers(op.outputs), default=0)
    return chunk_of
