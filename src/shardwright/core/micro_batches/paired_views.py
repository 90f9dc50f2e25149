"""Compares values of the graphs of a batch and of a micro-batch, up to views that only one has."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from shardwright.core.graph.graph import Graph, Op, Value
from shardwright.core.rules.notation import call_arguments

VIEWS = frozenset({"view", "reshape", "unsqueeze", "squeeze", "expand", "permute", "transpose"})
"""Names of operators that may not be captured, or differ, where a dimension has size 1."""

NUM_POSITIONS = 64
"""Number of random elements by which views are compared."""

ElementIndex = tuple[int, ...]


def keeps_elements(op: Op) -> bool:
    """Whether an operator returns the elements of its input in another shape or order."""
    if op.short_name not in VIEWS or len(op.inputs) != 1:
        return False
    return op.short_name == "expand" or op.inputs[0].numel == op.output.numel


@dataclass(frozen=True)
class Viewed:
    """A value as a view of another.

    Args:
        result: the value.
        source: the value of which it is a view.
        views: operators from `result` back to `source`.
    """

    result: Value
    source: Value
    views: tuple[Op, ...]


def viewed(value: Value, graph: Graph, paired: Collection[Op]) -> Viewed:
    """Return a value as a view of the last value that is not one.

    Args:
        value: a value of `graph`.
        graph: one of two graphs.
        paired: operators of `graph` that the other graph has too.
    """
    source, views = value, list[Op]()
    op = graph.producer.get(source)
    while op is not None and op not in paired and keeps_elements(op):
        views.append(op)
        source = op.inputs[0]
        op = graph.producer.get(source)
    return Viewed(value, source, tuple(views))


def read_equal_elements(
    value: Viewed, own: Viewed, shape: Callable[[Value], Sequence[int]]
) -> bool:
    """Whether a view of a batch reads of its first sample what a view of that sample alone reads.

    Dimensions of size 1 are not compared.

    Args:
        value: a value of the batch.
        own: a value of a micro-batch of one sample.
        shape: returns the shape of a value in a micro-batch.
    """
    sizes, own_sizes = shape(value.result), shape(own.result)
    compared = [size for size in own_sizes if size != 1]
    if [size for size in sizes if size != 1] != compared:
        return False
    numbers = random.Random(0)
    for _ in range(NUM_POSITIONS):
        position = [numbers.randrange(max(size, 1)) for size in compared]
        read = _position_in_source(value.views, _with_zeros(position, sizes))
        own_read = _position_in_source(own.views, _with_zeros(position, own_sizes))
        source, own_source = shape(value.source), shape(own.source)
        if _without_zeros(read, source) != _without_zeros(own_read, own_source):
            return False
    return True


def _with_zeros(position: Sequence[int], sizes: Sequence[int]) -> ElementIndex:
    indices = iter(position)
    return tuple(0 if size == 1 else next(indices) for size in sizes)


def _without_zeros(position: ElementIndex, sizes: Sequence[int]) -> ElementIndex | None:
    """Return a position without dimensions of size 1; None if it is not in the first sample."""
    pairs = list(zip(position, sizes, strict=True))
    if any(index >= size for index, size in pairs):
        return None
    return tuple(index for index, size in pairs if size != 1)


def _position_in_source(views: Sequence[Op], position: ElementIndex) -> ElementIndex:
    for op in views:
        position = _position_in_input(op, position)
    return position


def _position_in_input(op: Op, position: ElementIndex) -> ElementIndex:
    shape, result = op.inputs[0].shape, op.output.shape
    if op.short_name in ("permute", "transpose"):
        read = dict(zip(_order_of_dims(op), position, strict=True))
        return tuple(read[dim] for dim in range(len(shape)))
    if op.short_name == "expand":
        last = position[len(result) - len(shape) :]
        return tuple(0 if size == 1 else i for i, size in zip(last, shape, strict=True))
    flat = 0
    for index, size in zip(position, result, strict=True):
        flat = flat * size + index
    indices = []
    for size in reversed(shape):
        flat, index = divmod(flat, size)
        indices.append(index)
    return tuple(reversed(indices))


def _order_of_dims(op: Op) -> list[int]:
    """Return the dimension of the input that each dimension of the output is."""
    arguments, rank = call_arguments(op), len(op.output.shape)
    if op.short_name == "permute":
        return [dim % rank for dim in arguments["dims"]]
    dims = list(range(rank))
    first, second = (arguments[name] % rank for name in ("dim0", "dim1"))
    dims[first], dims[second] = dims[second], dims[first]
    return dims
