"""Compare values of the graphs of a batch and of a micro-batch; ignore views in only one graph."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from shardwright.core.graph.graph import Graph, Op, Value
from shardwright.core.rules.notation import call_arguments

VIEWS = frozenset({"view", "reshape", "unsqueeze", "squeeze", "expand", "permute", "transpose"})
"""Names of operators that may be missing or different in a graph where a dimension has size 1."""

NUM_POSITIONS = 64
"""Number of random elements at which two views are compared."""

ElementIndex = tuple[int, ...]


def keeps_elements(op: Op) -> bool:
    """Whether `op` only changes the shape or order of elements, or expands them."""
    if op.short_name not in VIEWS or len(op.inputs) != 1:
        return False
    # `expand` repeats elements, all others keep their number.
    return op.short_name == "expand" or op.inputs[0].numel == op.output.numel


@dataclass(frozen=True)
class Viewed:
    """A view, the value that it views, and the view operators between them.

    Args:
        result: the view.
        source: the viewed value; equals `result` if `views` is empty.
        views: view operators in order from `result` back to `source`.
    """

    result: Value
    source: Value
    views: tuple[Op, ...]


def viewed(value: Value, graph: Graph, paired: Collection[Op]) -> Viewed:
    """Trace a value back through view operators that the other of two graphs lacks.

    Args:
        value: a value of `graph`.
        graph: one of the two graphs.
        paired: operators of `graph` that have a match in the other graph; the trace ends at these.
    """
    source, views = value, list[Op]()
    op = graph.producer.get(source)
    while op is not None and op not in paired and keeps_elements(op):
        views.append(op)
        source = op.inputs[0]
        op = graph.producer.get(source)
    return Viewed(value, source, tuple(views))


def read_equal_elements(
    value: Viewed, micro_view: Viewed, shape: Callable[[Value], Sequence[int]]
) -> bool:
    """Whether two views read the same elements of the first sample, up to dimensions of size 1.

    Evaluates both views on random elements.

    Args:
        value: a view in the graph of the batch.
        micro_view: a view in the graph of a micro-batch of one sample.
        shape: returns the shape that a value of either graph has in a micro-batch.
    """
    sizes, own_sizes = shape(value.result), shape(micro_view.result)
    compared = [size for size in own_sizes if size != 1]
    if [size for size in sizes if size != 1] != compared:
        return False
    # A fixed seed makes the result reproducible.
    numbers = random.Random(0)
    # A view without elements reads none.
    for _ in range(0 if 0 in compared else NUM_POSITIONS):
        position = [numbers.randrange(size) for size in compared]
        read = _trace_position_through_views(value.views, _insert_unit_dim_indices(position, sizes))
        own_read = _trace_position_through_views(
            micro_view.views, _insert_unit_dim_indices(position, own_sizes)
        )
        source, own_source = shape(value.source), shape(micro_view.source)
        if _drop_unit_dim_indices(read, source) != _drop_unit_dim_indices(own_read, own_source):
            return False
    return True


def _insert_unit_dim_indices(position: Sequence[int], sizes: Sequence[int]) -> ElementIndex:
    indices = iter(position)
    # A dimension of size 1 has only index 0, and none in `position`.
    return tuple(0 if size == 1 else next(indices) for size in sizes)


def _drop_unit_dim_indices(position: ElementIndex, sizes: Sequence[int]) -> ElementIndex | None:
    """Drop the indices of dimensions of size 1; return None for a position out of range."""
    pairs = list(zip(position, sizes, strict=True))
    if any(index >= size for index, size in pairs):
        return None
    return tuple(index for index, size in pairs if size != 1)


def _trace_position_through_views(views: Sequence[Op], position: ElementIndex) -> ElementIndex:
    for op in views:
        position = _trace_position_through_view(op, position)
    return position


def _trace_position_through_view(op: Op, position: ElementIndex) -> ElementIndex:
    shape, result = op.inputs[0].shape, op.output.shape
    if op.short_name in ("permute", "transpose"):
        # From a dimension of the input to the index in it.
        read = dict(zip(_get_dim_permutation(op), position, strict=True))
        return tuple(read[dim] for dim in range(len(shape)))
    if op.short_name == "expand":
        # `expand` aligns dimensions from the end.
        last = position[len(result) - len(shape) :]
        return tuple(0 if size == 1 else i for i, size in zip(last, shape, strict=True))
    # All other views keep the row-major order of elements.
    flat = 0
    for index, size in zip(position, result, strict=True):
        flat = flat * size + index
    indices = []
    # In reverse, as the last dimension varies fastest.
    for size in reversed(shape):
        flat, index = divmod(flat, size)
        indices.append(index)
    return tuple(reversed(indices))


def _get_dim_permutation(op: Op) -> list[int]:
    """Return the input dimension of each output dimension of a `permute` or `transpose`."""
    arguments, rank = call_arguments(op), len(op.output.shape)
    if op.short_name == "permute":
        return [dim % rank for dim in arguments["dims"]]
    dims = list(range(rank))
    first, second = (arguments[name] % rank for name in ("dim0", "dim1"))
    dims[first], dims[second] = dims[second], dims[first]
    return dims
