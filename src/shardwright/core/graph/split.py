"""Split a graph into model chunks for pipeline parallelism.

A value that one chunk computes and a later chunk reads is a *crossing* value: it is an output of
the first chunk, an input of the later chunk, and passed on by the chunks in between. Values that
depend only on the model's inputs, constants and unchanged buffers, without gradient or random
numbers, are *repeatable*: every chunk that reads them recomputes them. A parameter belongs to every
chunk that reads it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import itemgetter
from weakref import WeakKeyDictionary

from shardwright.core.graph.graph import Graph, Op, Origin, Value, WholeBatch
from shardwright.core.torch_internals import pytree
from shardwright.errors import PlanError


@dataclass(frozen=True, eq=False)
class GraphChunk:
    """Chunk of a model as a graph, with the values that it receives and sends.

    Args:
        graph: the chunk as a graph. Its inputs are the model inputs that the chunk reads, then
            `arriving`; its outputs are `leaving`, then `returned`, without duplicates.
        arriving: values received from the previous chunk, as inputs of this graph.
        leaving: values sent to the next chunk, in the order of its `arriving`.
        returned: the model outputs that this chunk computes; the last chunk returns the loss even
            if an earlier chunk computes it.
    """

    graph: Graph
    arriving: tuple[Value, ...]
    leaving: tuple[Value, ...]
    returned: tuple[Value, ...]


def split_graph(
    graph: Graph, chunk_of: Mapping[str, int], random: frozenset[str] = frozenset()
) -> tuple[GraphChunk, ...]:
    """Split `graph` into chunks, in execution order.

    Args:
        graph: the graph of the model.
        chunk_of: index of the chunk of each operator, by operator; indices start at 0 without gaps.
        random: names of operators that draw random numbers; they are never recomputed.

    Raises:
        PlanError: if an operator has no chunk, a chunk has no operator, a value is read in an
            earlier chunk than the one that computes it, or a buffer is read in one chunk and
            updated in another.
    """
    cached = _CACHED_CHUNKS.setdefault(graph, {})
    # Without the names, whose hashes would take longer than most uses of the chunks.
    key = tuple(map(chunk_of.get, (op.name for op in graph.ops))), random
    if key not in cached:
        cached[key] = _split_into_chunks(graph, chunk_of, random)
    return cached[key]


_CACHED_CHUNKS: WeakKeyDictionary[Graph, dict[object, tuple[GraphChunk, ...]]] = WeakKeyDictionary()
"""Chunks of each graph, by operator assignment: plans with equal stages share chunk objects, and
thereby the caches keyed by chunks."""


def _split_into_chunks(
    graph: Graph, chunk_of: Mapping[str, int], random: frozenset[str]
) -> tuple[GraphChunk, ...]:
    count = _count_chunks(graph, chunk_of)
    repeatable = _find_recomputable_activations(graph, random)
    ops_of_chunk = _group_ops_by_chunk(graph, chunk_of, count, repeatable)
    _check_buffer_updates(graph, chunk_of)
    crossing = _find_crossing_values(graph, chunk_of, ops_of_chunk, repeatable)
    chunks = []
    for chunk_index, ops in enumerate(ops_of_chunk):
        arriving = [v for v, (first, last) in crossing.items() if first < chunk_index <= last]
        leaving = [v for v, (first, last) in crossing.items() if first <= chunk_index < last]
        chunks.append(_build_chunk(graph, chunk_of, chunk_index, ops, arriving, leaving))
    return tuple(chunks)


def _count_chunks(graph: Graph, chunk_of: Mapping[str, int]) -> int:
    missing = [op.name for op in graph.ops if op.name not in chunk_of]
    if missing:
        raise PlanError(
            f"operator {missing[0]!r} is not assigned to a stage ({len(missing)} unassigned in"
            " total)\nassign the module that calls it"
        )
    indices = {chunk_of[op.name] for op in graph.ops}
    count = max(indices) + 1
    empty = sorted(set(range(count)) - indices)
    if empty:
        raise PlanError(
            f"of the {count} chunks of the model, {', '.join(map(str, empty))} would be empty\n"
            "use fewer stages, or assign a module to each of these chunks"
        )
    return count


def _find_recomputable_activations(graph: Graph, random: frozenset[str]) -> frozenset[Value]:
    """Return the *repeatable* activations, which each chunk recomputes instead of receiving
    them."""
    updated = {buffer for buffer, _ in graph.updates}
    repeatable = {
        value
        for value in (*graph.input_values, *graph.buffers, *graph.constants)
        # A buffer that is updated may have changed before another chunk reads it.
        if not value.requires_grad and value not in updated
    }
    for op in graph.ops:
        # Repeated random draws would differ; with a gradient, each chunk would run its own backward
        # pass through the value.
        can_repeat = op.name not in random and not any(v.requires_grad for v in op.outputs)
        if can_repeat and all(value in repeatable for value in op.inputs):
            repeatable.update(op.outputs)
    return frozenset(value for op in graph.ops for value in op.outputs if value in repeatable)


def _group_ops_by_chunk(
    graph: Graph, chunk_of: Mapping[str, int], count: int, repeatable: frozenset[Value]
) -> list[tuple[Op, ...]]:
    """Return the operators of each chunk, including the operators that the chunk recomputes."""
    results = {*graph.output_values, *(value for _, value in graph.updates)}
    ops_of_chunk: list[list[tuple[int, Op]]] = [[] for _ in range(count)]
    repeatable_ops: list[tuple[int, Op]] = []
    for index, op in enumerate(graph.ops):
        # Either all outputs of an operator are repeatable or none.
        if op.outputs[0] in repeatable:
            repeatable_ops.append((index, op))
        else:
            ops_of_chunk[chunk_of[op.name]].append((index, op))
    for chunk_index, ops in enumerate(ops_of_chunk):
        needed = {value for _, op in ops for value in op.inputs}
        # Backwards, so that the producers of recomputed values are added too.
        for index, op in reversed(repeatable_ops):
            # Only its own chunk returns the value or assigns it to a buffer.
            returned = chunk_of[op.name] == chunk_index and any(v in results for v in op.outputs)
            if returned or any(value in needed for value in op.outputs):
                ops.append((index, op))
                needed.update(op.inputs)
    # By index alone, as operators cannot be compared.
    return [tuple(op for _, op in sorted(ops, key=itemgetter(0))) for ops in ops_of_chunk]


def updates_between_micro_batches(graph: Graph) -> list[tuple[Value, Value]]:
    """Return (buffer, new value) for each buffer that every micro-batch updates.

    Other buffers are updated once per step.
    """
    whole_batch = graph.whole_batch
    if not isinstance(whole_batch, WholeBatch):
        return list(graph.updates)
    return [pair for pair in graph.updates if not whole_batch.updates_once(pair[0])]


def _check_buffer_updates(graph: Graph, chunk_of: Mapping[str, int]) -> None:
    """Check that buffers updated by every micro-batch are read and updated in the same chunk.

    In separate chunks, several micro-batches would read the buffer before the first one updates it.

    Raises:
        PlanError: if a buffer is read in one chunk and updated in another.
    """
    for buffer, value in updates_between_micro_batches(graph):
        producer = graph.producer.get(value)
        # The new value is an input or another buffer, which no chunk computes.
        if producer is None:
            continue
        for op, _ in graph.consumers[buffer]:
            if chunk_of[op.name] != chunk_of[producer.name]:
                raise PlanError(
                    f"buffer {buffer.name!r} is read by {op.name!r} in chunk"
                    f" {chunk_of[op.name]} but updated by {producer.name!r} in chunk"
                    f" {chunk_of[producer.name]}, while other micro-batches are running\n"
                    "assign both to the same stage"
                )


def _find_crossing_values(
    graph: Graph,
    chunk_of: Mapping[str, int],
    ops_of_chunk: Iterable[tuple[Op, ...]],
    repeatable: frozenset[Value],
) -> dict[Value, tuple[int, int]]:
    """Map each value that a later chunk receives to its (producing chunk, last reading chunk)."""
    last: dict[Value, int] = {}
    for chunk_index, ops in enumerate(ops_of_chunk):
        for op in ops:
            for value in op.inputs:
                producer = graph.producer.get(value)
                # Every chunk reads leaves and recomputes repeatable values by itself.
                if producer is None or value in repeatable:
                    continue
                if chunk_of[producer.name] > chunk_index:
                    raise PlanError(
                        f"{op.name!r} in chunk {chunk_index} reads the output of {producer.name!r}"
                        f" in the later chunk {chunk_of[producer.name]}\n"
                        "assign stages that do not decrease along the forward pass"
                    )
                # Chunks come in order, so that the last reader is assigned last.
                last[value] = chunk_index
    if graph.loss is not None and graph.loss in graph.producer:
        # The backward pass of a pipeline starts in the last chunk, so the loss must arrive there.
        last[graph.loss] = max(chunk_of.values())
    # In execution order, so that sender and receiver list the values in one order.
    crossing = {}
    for op in graph.ops:
        for value in op.outputs:
            if last.get(value, 0) > chunk_of[op.name] and value not in repeatable:
                crossing[value] = (chunk_of[op.name], last[value])
    return crossing


def _build_chunk(
    graph: Graph,
    chunk_of: Mapping[str, int],
    chunk_index: int,
    ops: tuple[Op, ...],
    arriving: list[Value],
    leaving: list[Value],
) -> GraphChunk:
    # No operator of this chunk computes these values.
    received = {value: replace(value, origin=Origin.INPUT) for value in arriving}
    ops = tuple(_replace_received_inputs(op, received) for op in ops)
    read = {value for op in ops for value in op.inputs}
    loss = _get_loss_of_chunk(graph, chunk_of, chunk_index, received)
    returned = _find_chunk_outputs(graph, chunk_of, chunk_index, loss)
    updates = tuple(
        (buffer, value)
        for buffer, value in graph.updates
        if _find_producing_chunk(graph, chunk_of, value) == chunk_index
    )
    used = read | set(returned) | {v for pair in updates for v in pair}
    inputs = (*(v for v in graph.input_values if v in used), *received.values())
    passed = tuple(received.get(value, value) for value in leaving)
    # A value may be both passed on and returned.
    outputs = tuple(dict.fromkeys((*passed, *returned)))
    subgraph = replace(
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
        # The backward pass of a pipeline starts from one loss.
        other_losses=(),
    )
    return GraphChunk(subgraph, tuple(received.values()), passed, returned)


def _find_producing_chunk(graph: Graph, chunk_of: Mapping[str, int], value: Value) -> int:
    """Return the index of the chunk that computes a value; 0 for inputs of the model."""
    producer = graph.producer.get(value)
    return 0 if producer is None else chunk_of[producer.name]


def _get_loss_of_chunk(
    graph: Graph, chunk_of: Mapping[str, int], chunk_index: int, received: Mapping[Value, Value]
) -> Value | None:
    """Return the loss if `chunk_index` is the last chunk, else None.

    Args:
        graph: the graph of the model.
        chunk_of: index of the chunk of each operator.
        chunk_index: index of this chunk.
        received: the input of this chunk for each value that an earlier chunk computes.
    """
    if graph.loss is None or chunk_index != max(chunk_of.values()):
        return None
    return received.get(graph.loss, graph.loss)


def _find_chunk_outputs(
    graph: Graph, chunk_of: Mapping[str, int], chunk_index: int, loss: Value | None
) -> tuple[Value, ...]:
    """Return the model outputs that a chunk computes; `loss`, if it is not None, comes last."""
    outputs = [
        value
        for value in graph.output_values
        if value is not graph.loss and _find_producing_chunk(graph, chunk_of, value) == chunk_index
    ]
    return tuple(dict.fromkeys((*outputs, *([] if loss is None else [loss]))))


def _replace_received_inputs(op: Op, received: Mapping[Value, Value]) -> Op:
    """Return `op` with inputs that other chunks compute replaced by received values.

    Args:
        op: an operator of the model's graph.
        received: the input of the chunk for each value that an earlier chunk computes.
    """
    if not any(value in received for value in op.inputs):
        return op
    args, kwargs = op.arguments(lambda value: received.get(value, value))
    return replace(op, args=args, kwargs=kwargs)


def assign_neighbors(
    graph: Graph,
    anchor_chunks: Mapping[str, int],
    preferred: Mapping[str, Sequence[int]] | None = None,
) -> dict[str, int]:
    """Assign all operators to chunks, given the chunks of some operators.

    Operators not in `anchor_chunks` are assigned to the first preferred chunk that lies between
    their producers and their consumers; else to the latest chunk of their producers or, without
    producers, to the earliest chunk of their consumers.

    Args:
        graph: the graph of the model.
        anchor_chunks: index of the chunk of some operators, by operator name.
        preferred: indices of chunks in ascending order, by operator name.

    Returns:
        The index of the chunk of each operator, by operator name.
    """
    latest = _find_latest_chunks(graph, anchor_chunks)
    num_chunks = 1 + max(chain(anchor_chunks.values(), *(preferred or {}).values()), default=0)
    chunk_of: dict[str, int] = {}
    for op in graph.ops:
        producers = (graph.producer.get(value) for value in op.inputs)
        chunks = (chunk_of.get(producer.name, -1) for producer in producers if producer)
        # The latest chunk, as a value must not be read in an earlier chunk than computed.
        earliest = max(chunks, default=-1)
        last = latest.get(op.name, num_chunks)
        fitting = [c for c in (preferred or {}).get(op.name, ()) if earliest <= c <= last]
        if op.name in anchor_chunks:
            chunk_of[op.name] = anchor_chunks[op.name]
        elif fitting or earliest >= 0:
            chunk_of[op.name] = fitting[0] if fitting else earliest
    # Backwards, so that the consumers of an operator are assigned before it.
    for op in reversed(graph.ops):
        if op.name not in chunk_of:
            # Without producers, any chunk up to the first consumer is valid; in the chunk of the
            # consumer, the value need not be sent.
            chunk_of[op.name] = min(_consumer_chunks(graph, op, chunk_of), default=0)
    return chunk_of


def _find_latest_chunks(graph: Graph, anchor_chunks: Mapping[str, int]) -> dict[str, int]:
    """Return the latest chunk of each operator from which anchored consumers can read."""
    latest: dict[str, int] = {}
    for op in reversed(graph.ops):
        chunks = _consumer_chunks(graph, op, latest)
        if op.name in anchor_chunks:
            latest[op.name] = anchor_chunks[op.name]
        elif chunks:
            latest[op.name] = min(chunks)
    return latest


def _consumer_chunks(graph: Graph, op: Op, chunk_of: Mapping[str, int]) -> list[int]:
    consumers = (consumer for value in op.outputs for consumer, _ in graph.consumers[value])
    return [chunk_of[op.name] for op in consumers if op.name in chunk_of]
