"""Derive the graph of a model for one batch size from its graphs for two other batch sizes.

Capturing a deep model takes far longer than comparing two of its graphs, and a planner needs one
graph for each number of micro-batches. Sizes in a graph are `fixed + slope * rows` for most models,
so that two graphs determine a third:

    rows 128: reshape(x, [1048576, 64])      rows 64: reshape(x, [524288, 64])
    rows  32: reshape(x, [ 262144, 64])

Two graphs do not prove that a third batch size gives the same operators: a model may branch on the
size (`if len(x) < 40`). Derived graphs therefore only serve to compare plans; the graph of the
chosen plan is captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from shardwright.core.graph.graph import Graph, Op, Value


class NotInterpolableError(Exception):
    """Raised if two graphs differ in more than sizes that are linear in the batch size."""


@dataclass
class GraphsBySize:
    """Cache of one model's graphs by the sizes of its inputs, each captured or derived once.

    A graph is *derived* by interpolation between two captured graphs.

    Args:
        derive: whether graphs may be derived.
        captured: captured graphs, by cache key of the arguments.
        num_derived: number of times that a derived graph was returned.
    """

    derive: bool = True
    captured: dict[tuple[Any, ...], Graph] = field(default_factory=dict)
    num_derived: int = 0
    _derived: dict[tuple[Any, ...], Graph] = field(default_factory=dict)

    def graph(self, leaves: Sequence[Any], capture: Callable[[list[Any]], Graph]) -> Graph:
        """Return the model's graph for a call with the arguments `leaves`, captured or derived.

        Args:
            leaves: the leaves of the arguments of a call.
            capture: function that captures the model, given the leaves.

        Raises:
            CaptureError: if the model cannot be captured.
        """
        key = tuple(_make_argument_cache_key(leaf) for leaf in leaves)
        # A captured graph has precedence over a derived one, which only serves to compare plans.
        if key in self.captured:
            return self.captured[key]
        if self.derive and key not in self._derived and len(self.captured) > 1:
            graph = self._interpolate_graph(key)
            if graph is not None:
                self._derived[key] = graph
        if self.derive and key in self._derived:
            self.num_derived += 1
            return self._derived[key]
        self.captured[key] = capture(list(leaves))
        return self.captured[key]

    @contextmanager
    def deriving(self, derive: bool) -> Iterator[Callable[[], bool]]:
        """Within the context, allow or forbid graphs that are derived from two captured graphs.

        Yields:
            A function that returns whether a derived graph was returned in the context.
        """
        before, self.derive = self.derive, derive
        start = self.num_derived
        try:
            yield lambda: self.num_derived > start
        finally:
            self.derive = before

    def _interpolate_graph(self, key: tuple[Any, ...]) -> Graph | None:
        # Two points determine a line, so the first two captured graphs suffice.
        (key_a, graph_a), (key_b, graph_b), *_ = self.captured.items()
        try:
            rows = _find_batch_sizes(key_a, key_b, key)
            return _GraphInterpolation(graph_a, graph_b, *rows).graph()
        except NotInterpolableError:
            return None


def _make_argument_cache_key(leaf: Any) -> Any:
    """Return the cache key of one leaf of a call: properties of a tensor, or a Python object."""
    # Other objects by identity, as they need not be hashable.
    if not isinstance(leaf, Tensor):
        return type(leaf), leaf if isinstance(leaf, (int, float, str, bool)) else id(leaf)
    return tuple(leaf.shape), leaf.dtype, leaf.requires_grad


def _find_batch_sizes(
    key_a: Sequence[Any], key_b: Sequence[Any], key: Sequence[Any]
) -> tuple[int, int, int]:
    """Return the batch sizes of three calls whose arguments differ only in the batch size."""
    if not len(key_a) == len(key_b) == len(key):
        raise NotInterpolableError
    rows: set[tuple[int, int, int]] = set()
    for a, b, wanted in zip(key_a, key_b, key, strict=True):
        # Everything but the shape must be equal: dtype, `requires_grad`, or the value of a number.
        if a[1:] != b[1:] or a[1:] != wanted[1:]:
            raise NotInterpolableError
        if a[0] == b[0] == wanted[0]:
            continue
        shapes = (a[0], b[0], wanted[0])
        if not all(isinstance(s, tuple) for s in shapes) or len({*map(len, shapes)}) > 1:
            raise NotInterpolableError
        rows |= {sizes for sizes in zip(*shapes, strict=True) if len({*sizes}) > 1}
    # Sizes are interpolated by one number of rows, so all inputs must have the same one.
    if len(rows) != 1:
        raise NotInterpolableError
    (sizes_of_calls,) = rows
    # The wanted size differs, but two equal sizes do not determine a slope.
    if sizes_of_calls[0] == sizes_of_calls[1]:
        raise NotInterpolableError
    return sizes_of_calls


class _GraphInterpolation:
    """Derivation of the graph for batch size `rows` from graphs for `rows_a` and `rows_b`."""

    def __init__(self, a: Graph, b: Graph, rows_a: int, rows_b: int, rows: int) -> None:
        self._a, self._b = a, b
        self._rows_a, self._rows_b, self._rows = rows_a, rows_b, rows
        self._values: dict[Value, tuple[Value, Value]] = {}
        """(Matching value of graph `b`, value of the derived graph), by value of graph `a`."""

    def graph(self) -> Graph:
        """Return the graph derived for the batch size `rows`.

        Raises:
            NotInterpolableError: if the graphs differ in more than sizes.
        """
        a, b = self._a, self._b
        if a.python is not None or b.python is not None or len(a.ops) != len(b.ops):
            raise NotInterpolableError
        self._pair_equal_values(a.parameters, b.parameters)
        self._pair_equal_values(a.buffers, b.buffers)
        self._pair_equal_values(tuple(a.constants), tuple(b.constants))
        # Constants in the model may depend on the batch size; meta tensors have no values to
        # compare.
        for constant, other in zip(a.constants.values(), b.constants.values(), strict=True):
            if constant.is_meta or other.is_meta or not torch.equal(constant, other):
                raise NotInterpolableError
        inputs = self._interpolate_inputs(a.inputs, b.inputs)
        ops = tuple(self._interpolate_op(*pair) for pair in zip(a.ops, b.ops, strict=True))
        # Fields that must not depend on the batch size.
        named = ("tied", "frozen", "compute_dtype", "attributes", "autocast_on", "whole_batch")
        if any(getattr(a, name) != getattr(b, name) for name in named):
            raise NotInterpolableError
        derived = {
            each.name: self._interpolate_argument(getattr(a, each.name), getattr(b, each.name))
            for each in fields(Graph)
            if each.name in ("outputs", "updates", "loss", "other_losses")
        }
        return replace(a, ops=ops, inputs=inputs, capture_seconds=0.0, **derived)

    def _pair_equal_values(self, values_a: Sequence[Value], values_b: Sequence[Value]) -> None:
        """Match values of both graphs that must be equal; the derived graph contains them
        unchanged."""
        if len(values_a) != len(values_b):
            raise NotInterpolableError
        for value_a, value_b in zip(values_a, values_b, strict=True):
            if (
                _get_non_shape_fields(value_a) != _get_non_shape_fields(value_b)
                or value_a.shape != value_b.shape
            ):
                raise NotInterpolableError
            self._values[value_a] = value_b, value_a

    def _interpolate_inputs(
        self, leaves_a: Sequence[Any], leaves_b: Sequence[Any]
    ) -> tuple[Any, ...]:
        if len(leaves_a) != len(leaves_b):
            raise NotInterpolableError
        for leaf_a, leaf_b in zip(leaves_a, leaves_b, strict=True):
            if isinstance(leaf_a, Value) and isinstance(leaf_b, Value):
                # First, so that the next line finds the values; the inputs of a call may be nested.
                self._interpolate_value(leaf_a, leaf_b)
        return tuple(map(self._interpolate_argument, leaves_a, leaves_b))

    def _interpolate_value(self, value_a: Value, value_b: Value) -> Value:
        """Match two values of different size, and return the value of the derived graph."""
        if _get_non_shape_fields(value_a) != _get_non_shape_fields(value_b) or len(
            value_a.shape
        ) != len(value_b.shape):
            raise NotInterpolableError
        made = replace(
            value_a, shape=tuple(map(self._interpolate_size, value_a.shape, value_b.shape))
        )
        self._values[value_a] = value_b, made
        return made

    def _interpolate_op(self, op_a: Op, op_b: Op) -> Op:
        facts = ("name", "target", "module", "source", "flattened", "calls")
        if any(getattr(op_a, name) != getattr(op_b, name) for name in facts):
            raise NotInterpolableError
        if len(op_a.outputs) != len(op_b.outputs):
            raise NotInterpolableError
        args, kwargs = (
            self._interpolate_argument(op_a.args, op_b.args),
            self._interpolate_argument(op_a.kwargs, op_b.kwargs),
        )
        outputs = tuple(map(self._interpolate_value, op_a.outputs, op_b.outputs))
        return replace(op_a, args=args, kwargs=kwargs, outputs=outputs)

    def _interpolate_argument(self, argument_a: Any, argument_b: Any) -> Any:
        """Return an argument of the derived graph, given the matching argument of each graph."""
        if isinstance(argument_a, Value):
            # The graphs must agree in which value is read, not only in its shape.
            if argument_a not in self._values or self._values[argument_a][0] is not argument_b:
                raise NotInterpolableError
            return self._values[argument_a][1]
        if type(argument_a) is not type(argument_b):
            raise NotInterpolableError
        if isinstance(argument_a, (list, tuple)):
            if len(argument_a) != len(argument_b):
                raise NotInterpolableError
            items = map(self._interpolate_argument, argument_a, argument_b)
            return list(items) if isinstance(argument_a, list) else tuple(items)
        if isinstance(argument_a, dict):
            if argument_a.keys() != argument_b.keys():
                raise NotInterpolableError
            return {
                key: self._interpolate_argument(item, argument_b[key])
                for key, item in argument_a.items()
            }
        # `type` and not `isinstance`, as a bool is no size.
        if type(argument_a) is int:
            return self._interpolate_size(argument_a, argument_b)
        # By identity first, as NaN is not equal to itself.
        if argument_a is not argument_b and argument_a != argument_b:
            raise NotInterpolableError
        return argument_a

    def _interpolate_size(self, size_a: int, size_b: int) -> int:
        if size_a == size_b:
            return size_a
        # The line through two points; in integers, so that a derived size is exact or refused.
        slope, remainder = divmod(size_a - size_b, self._rows_a - self._rows_b)
        fixed = size_a - slope * self._rows_a
        # A negative fixed part is a sign of a number that grows faster than the batch.
        if remainder or fixed < 0:
            raise NotInterpolableError
        return fixed + slope * self._rows


def _get_non_shape_fields(value: Value) -> tuple[object, ...]:
    return tuple(getattr(value, each.name) for each in fields(Value) if each.name != "shape")
