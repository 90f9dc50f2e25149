"""Divide a model into consecutive pipeline chunks of nearly equal work.

The work of a chunk is the multiply-adds of its main operators plus the elements of its parameters,
or seconds if these are known. Among the divisions whose largest chunk is within a tolerance of the
smallest possible, the division with the least communication volume between chunks is chosen. In a
transformer, one value crosses a boundary between layers, but two cross a boundary within a layer.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from math import prod

from shardwright.core.cost.flops import forward_flops
from shardwright.core.graph.custom_ops import experts
from shardwright.core.graph.graph import Graph, Op, Origin
from shardwright.core.graph.split import updates_between_micro_batches
from shardwright.core.rules import rule_of
from shardwright.errors import StrategyError

WORK_TOLERANCE = 0.1
"""Fraction by which the work of the largest chunk may exceed its minimum, in order to decrease the
communication volume between chunks."""

SECONDS_TOLERANCE = 0.01
"""Fraction by which the seconds of the slowest chunk may exceed their minimum, in order to decrease
the communication volume between chunks. Smaller than `WORK_TOLERANCE`, as every micro-batch waits
for the slowest chunk and communication between chunks takes comparatively little time."""


def balanced_chunks(
    graph: Graph, count: int, work: Sequence[float] | None = None
) -> dict[str, int]:
    """Return the chunk index of each operator, by name, for `count` chunks of nearly equal work.

    Args:
        work: seconds of each operator; by default its multiply-adds plus the elements of its
            parameters.

    Raises:
        StrategyError: if fewer than `count` operators have work.
    """
    # Without a cluster there are no seconds; multiply-adds and elements of parameters stand for
    # them.
    op_work = list(work) if work is not None else operator_work(graph)
    positions = _valid_chunk_boundaries(graph)
    weights = [sum(op_work[start:end]) for start, end in pairwise(positions)]
    # A chunk without work, such as a view, would occupy a stage for nothing.
    usable = sum(weight > 0 for weight in weights)
    if usable < count:
        raise StrategyError(
            f"cannot divide the model into {count} pipeline chunks: only {usable} of its operators"
            f" have parameters or multiply-adds\nuse at most {usable} stages, or assign modules to"
            " stages with stage_config"
        )
    # Prefix sums: the work of any chunk is a difference of two of them.
    total = [0.0]
    for weight in weights:
        total.append(total[-1] + weight)
    tolerance = WORK_TOLERANCE if work is None else SECONDS_TOLERANCE
    limit = (1 + tolerance) * _min_work_of_largest_chunk(total, weights, count)
    crossing = _bytes_crossing_positions(graph)
    ends = _cheapest_chunk_ends(total, [crossing[position] for position in positions], count, limit)
    # Operator `index` ends at position `index + 1`, so that the first chunk that ends there or
    # later has it.
    chunk_ends = [positions[end] for end in ends]
    return {op.name: bisect_left(chunk_ends, index + 1) for index, op in enumerate(graph.ops)}


def _valid_chunk_boundaries(graph: Graph) -> list[int]:
    """Return the positions where a chunk may end; position `i` is in front of operator `i`.

    If every micro-batch updates a buffer, no chunk ends between the operators that read the buffer
    and the operator that updates it: otherwise the next micro-batch could read the old value.
    """
    op_index = {op.name: index for index, op in enumerate(graph.ops)}
    joined: set[int] = set()
    for buffer, value in updates_between_micro_batches(graph):
        producer = graph.producer.get(value)
        if producer is not None:
            consumer_indices = (op_index[op.name] for op, _ in graph.consumers[buffer])
            connected = [op_index[producer.name], *consumer_indices]
            # The position in front of the first of these operators stays valid, as does that behind
            # the last.
            joined.update(range(min(connected) + 1, max(connected) + 1))
    return [position for position in range(len(graph.ops) + 1) if position not in joined]


def operator_work(graph: Graph) -> list[float]:
    """Return for each operator its multiply-adds plus the elements of its parameters.

    A parameter that several operators read counts only for the first of these operators.
    """
    counted_parameters = set()
    work = []
    for op in graph.ops:
        new_parameters = {
            v for v in op.inputs if v.origin is Origin.PARAMETER and v not in counted_parameters
        }
        counted_parameters |= new_parameters
        work.append(float(_num_multiply_adds(op) + sum(value.numel for value in new_parameters)))
    return work


def _num_multiply_adds(op: Op) -> int:
    """Return the multiply-adds of a main operator, as the product of its factor sizes; else 0.

    For a mixture of experts, each token counts only for the experts to which it is routed.
    """
    rule = rule_of(op)
    if rule is None or rule.main is None:
        return 0
    if op.target is experts:
        # A multiply-add is two floating-point operations.
        return int(forward_flops(op, rule) / 2)
    sizes: dict[str, int] = {}
    for dims, value in zip((*rule.inputs, *rule.outputs), (*op.inputs, *op.outputs), strict=True):
        for factor, size in zip(dims, value.shape, strict=True):
            if factor is not None and factor not in rule.joined:
                # Dims with one factor may differ in size; the largest counts.
                sizes[factor] = max(sizes.get(factor, 1), size)
    return prod(sizes.values())


def _min_work_of_largest_chunk(
    total: Sequence[float], weights: Sequence[float], count: int
) -> float:
    """Return the minimum, over all divisions into `count` chunks, of the largest chunk's work.

    Bisects to a relative precision of 1e-6.

    Args:
        total: work of the operators before each position where a chunk may end.
        weights: work between each position and the next.
    """
    # No largest chunk is below the heaviest indivisible part, nor below the mean.
    low, high = max(max(weights), total[-1] / count), total[-1]
    # Far below the tolerances by which a chunk may exceed the minimum.
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        # Filling each chunk up to the limit gives the fewest chunks that respect it.
        chunks, filled = 1, 0.0
        for weight in weights:
            if filled + weight > middle:
                chunks, filled = chunks + 1, 0.0
            filled += weight
        low, high = (low, middle) if chunks <= count else (middle, high)
    return high


def _bytes_crossing_positions(graph: Graph) -> list[int]:
    """Return for each position the bytes of values computed before the position and read after it.

    Position `i` is in front of operator `i`.
    """
    op_index = {op.name: index for index, op in enumerate(graph.ops)}
    change_at = [0] * (len(graph.ops) + 2)
    for index, op in enumerate(graph.ops):
        for value in op.outputs:
            consumer_indices = [op_index[consumer.name] for consumer, _ in graph.consumers[value]]
            if consumer_indices:
                # A prefix sum over these changes takes one pass, however long values live.
                change_at[index + 1] += value.numel * value.itemsize
                change_at[max(consumer_indices) + 1] -= value.numel * value.itemsize
    bytes_at, crossing = [], 0
    for added_bytes in change_at[: len(graph.ops) + 1]:
        crossing += added_bytes
        bytes_at.append(crossing)
    return bytes_at


def _cheapest_chunk_ends(
    total: Sequence[float], crossing: Sequence[int], count: int, limit: float
) -> list[int]:
    """Divide a model into `count` pipeline chunks with the fewest bytes sent between chunks.

    Uses dynamic programming over chunk ends. The work of every chunk is above 0 and at most
    `limit`.

    Returns the end position of each chunk. `total` is the work before each position, `crossing` the
    bytes of values computed before and read after it.
    """
    num_positions = len(total)
    infinity = float("inf")
    # Differences of prefix sums round differently from the sums that gave the limit.
    max_weight = limit * (1 + 1e-9)
    # The positions where each chunk may start: the chunks before can take all work before it, and
    # the chunks from it on the work after it.
    windows = [
        range(
            bisect_left(total, total[-1] - (count - chunk) * max_weight),
            bisect_right(total, chunk * max_weight),
        )
        for chunk in range(count)
    ]
    # The last chunk ends at the last position.
    windows.append(range(num_positions - 1, num_positions))
    # By start of the next chunk: the first chunk starts at position 0.
    least_bytes: list[float] = [0.0] + [infinity] * (num_positions - 1)
    starts_of_chunks: list[list[int]] = []
    for chunk, (starts_in, ends_in) in enumerate(pairwise(windows)):
        starts = _cheapest_chunk_starts(total, least_bytes, max_weight, starts_in, ends_in)
        is_last = chunk == count - 1
        next_least_bytes = [infinity] * num_positions
        for end in ends_in:
            if starts[end] >= 0:
                # The last chunk sends nothing on.
                sent_bytes = 0 if is_last else crossing[end]
                next_least_bytes[end] = least_bytes[starts[end]] + sent_bytes
        least_bytes = next_least_bytes
        starts_of_chunks.append(starts)
    # Backwards: each chunk starts where the one before it ends.
    ends = [num_positions - 1]
    for starts in reversed(starts_of_chunks[1:]):
        ends.append(starts[ends[-1]])
    return ends[::-1]


def _cheapest_chunk_starts(
    total: Sequence[float],
    least_bytes: Sequence[float],
    max_weight: float,
    starts_in: range,
    ends_in: range,
) -> list[int]:
    """Return for each chunk end the start with the fewest `least_bytes`, among valid starts.

    A start is valid if the chunk has work, at most `max_weight`. Ties go to the first start.

    Args:
        total: work before each position.
        least_bytes: for each start the fewest bytes that cross the ends of all earlier chunks.
        max_weight: maximum work of a chunk.
        starts_in, ends_in: positions where the chunk may start and end.

    Returns:
        One position per end; -1 for an end without a valid start.
    """
    candidates: deque[int] = deque()
    starts, start = [-1] * len(total), starts_in.start
    for end in ends_in:
        weight = total[end]
        # Strictly less: from a start with an equal total on, the chunk would have no work.
        while start < starts_in.stop and total[start] < weight:
            if least_bytes[start] < float("inf"):
                # A later start that is cheaper outlives earlier ones in the window. Strictly
                # cheaper, so that the first of equal starts is taken.
                while candidates and least_bytes[candidates[-1]] > least_bytes[start]:
                    candidates.pop()
                candidates.append(start)
            start += 1
        while candidates and weight - total[candidates[0]] > max_weight:
            candidates.popleft()
        if candidates:
            starts[end] = candidates[0]
    return starts
