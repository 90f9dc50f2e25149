"""Pairs the graphs of one model for two batch sizes.

A Python number such as `len(x)` is a constant in each graph, so only a comparison of graphs shows
which constants depend on the batch size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardwright.core.graph.graph import Graph, Op, Value
from shardwright.core.rules.notation import call_arguments, schema_parameters
from shardwright.core.torch_internals import pytree

SIZES = frozenset({"size", "sizes", "shape", "end", "repeats", "output_size", "split_sizes"})
"""Names of arguments that may depend on the batch size; shapes of results are checked instead."""


@dataclass(frozen=True)
class PairedGraphs:
    """The graph of a batch and the graph of one of its micro-batches, operator by operator.

    Args:
        whole: graph of the batch.
        micro: graph of a micro-batch.
        twin: graph with the same operators as `whole` for another batch size: `micro`, unless
            micro-batches have one sample.
    """

    whole: Graph
    micro: Graph
    twin: Graph

    @cached_property
    def twin_ops(self) -> Mapping[Op, Op]:
        return dict(zip(self.whole.ops, self.twin.ops, strict=True))

    @cached_property
    def twin_values(self) -> Mapping[Value, Value]:
        return dict(_paired_values(self.whole, self.twin, self.twin_ops))

    @cached_property
    def ops(self) -> Mapping[Op, Op]:
        """The operator of `micro` for each operator of `whole`, if it exists.

        Dimensions of size 1 are captured differently: they are broadcast, or dropped from views. So
        operators of a micro-batch of one sample are matched by name, target and source line.
        """
        if self.micro is self.twin:
            return self.twin_ops
        kinds = Counter(map(_op_key, self.whole.ops))
        micro_kinds = Counter(map(_op_key, self.micro.ops))
        pairs = ((op, self.micro.by_name.get(op.name)) for op in self.whole.ops)
        return {
            op: other
            for op, other in pairs
            if other is not None
            and _op_key(op) == _op_key(other)
            and len(op.inputs) == len(other.inputs)
            and kinds[_op_key(op)] == micro_kinds[_op_key(op)]
        }

    @cached_property
    def values(self) -> Mapping[Value, Value]:
        """The value of `micro` for each value of `whole`, if it exists."""
        return dict(_paired_values(self.whole, self.micro, self.ops))

    def changed_numbers(self, op: Op) -> bool:
        """Whether numbers in the arguments of an operator of `whole` depend on the batch size."""
        return numbers_in_arguments(op) != numbers_in_arguments(self.twin_ops[op])


def _op_key(op: Op) -> tuple[object, str, str]:
    return op.target, op.source, op.module


def _paired_values(
    graph: Graph, other: Graph, ops: Mapping[Op, Op]
) -> Iterator[tuple[Value, Value]]:
    yield from zip(graph.input_values, other.input_values, strict=True)
    for values, others in (
        (graph.parameters, other.parameters),
        (graph.buffers, other.buffers),
    ):
        by_name = {value.name: value for value in others}
        yield from ((value, by_name[value.name]) for value in values if value.name in by_name)
    if len(graph.constants) == len(other.constants):
        yield from zip(graph.constants, other.constants, strict=True)
    for op, other_op in ops.items():
        yield from zip(op.outputs, other_op.outputs, strict=True)


def different_operator(graph: Graph, larger: Graph) -> tuple[Op, str] | None:
    """Return the first operator that only one of two graphs calls, and a verb phrase for errors;
    None if the graphs call the same operators.

    Args:
        graph: graph of a micro-batch.
        larger: graph of a larger batch.
    """
    for op, larger_op in zip(graph.ops, larger.ops, strict=False):
        if op.target != larger_op.target:
            return larger_op, "is not called for a micro-batch: operators depend on its size"
    if len(graph.ops) != len(larger.ops):
        longer_ops = max(graph.ops, larger.ops, key=len)
        return longer_ops[-1], "is called for one batch size only: operators depend on it"
    return None


def numbers_in_arguments(op: Op) -> dict[str, object]:
    """Return the numbers in the arguments of an operator, except sizes, by argument name and index
    in the argument."""
    numbers: dict[str, object] = {}
    for name, argument in call_arguments(op).items():
        if name not in SIZES:
            leaves = pytree.tree_leaves(argument)
            numbers |= {
                f"{name} {index}": leaf
                for index, leaf in enumerate(leaves)
                if isinstance(leaf, (int, float, complex))
            }
    return numbers


def merged_arguments(
    op: Op, micro: Op, read: Callable[[Value, int], Value | None]
) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
    """Merge the arguments of an operator of a micro-batch: its own sizes, and the batch's numbers.

    Args:
        op: the operator in the graph of the batch.
        micro: the operator in the graph of a micro-batch.
        read: returns the value to read for a value of `op` and its index in `op.inputs`; None for
            that of `micro`.

    Returns:
        Positional and keyword arguments, and whether any differs from those of `micro`.
    """
    index, changed = 0, False

    def merged(name: str, leaf: Any, own: Any) -> Any:
        nonlocal index, changed
        result = own
        if isinstance(leaf, Value):
            result = read(leaf, index) or own
            index += 1
        elif isinstance(leaf, (int, float, complex)) and name not in SIZES and leaf != own:
            result = leaf
        changed = changed or result is not own
        return result

    def merged_argument(name: str, argument: Any, own: Any) -> Any:
        leaves, _ = pytree.tree_flatten(argument)
        own_leaves, spec = pytree.tree_flatten(own)
        if len(leaves) != len(own_leaves):  # A shape with another number of dimensions.
            return own
        pairs = zip(leaves, own_leaves, strict=True)
        return pytree.tree_unflatten([merged(name, *pair) for pair in pairs], spec)

    names = tuple(schema_parameters(op.target))
    names += tuple(map(str, range(len(names), len(op.args))))
    args = tuple(merged_argument(*each) for each in zip(names, op.args, micro.args, strict=False))
    pairs = ((name, op.kwargs.get(name), own) for name, own in micro.kwargs.items())
    kwargs = {name: merged_argument(name, argument, own) for name, argument, own in pairs}
    return args, kwargs, changed
