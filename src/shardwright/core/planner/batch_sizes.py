"""Compare graphs of one model for two batch sizes: what depends on the size.

A Python number such as `len(x)` is a constant in each graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import isclose

from shardwright.core.graph.graph import Graph, Op, Value
from shardwright.core.rules.notation import call_arguments
from shardwright.core.torch_internals import pytree

SIZE_ARGUMENTS = frozenset({"size", "shape", "end", "repeats"})
"""Arguments that may depend on the batch size: the shape of the result is checked instead."""


def batch_size(graph: Graph) -> int:
    """Batch size: the first dimension of the first input that is no scalar."""
    return next((value.shape[0] for value in graph.input_values if value.shape), 1)


def different_operator(graph: Graph, larger: Graph) -> tuple[Op, str] | None:
    """The first operator that only one of two graphs calls, and a verb phrase that says so."""
    # Python code may branch on the batch size, or loop over samples.
    for op, larger_op in zip(graph.ops, larger.ops, strict=False):
        if op.target != larger_op.target:
            return larger_op, "is not called for a micro-batch: operators depend on its size"
    if len(graph.ops) != len(larger.ops):
        longer_ops = max(graph.ops, larger.ops, key=len)
        return longer_ops[-1], "is called for one batch size only: operators depend on it"
    return None


def paired_values(graph: Graph, other: Graph) -> Iterator[tuple[Value, Value]]:
    """Values of `other`, each with the corresponding value of `graph`, a graph of the same
    operators."""
    yield from zip(other.input_values, graph.input_values, strict=True)
    yield from zip(other.constants, graph.constants, strict=True)
    for op, other_op in zip(graph.ops, other.ops, strict=True):
        yield from zip(other_op.outputs, op.outputs, strict=True)


def numbers_in_arguments(op: Op) -> dict[str, object]:
    """Numbers in the arguments other than sizes, keyed by argument name and position in it."""
    numbers: dict[str, object] = {}
    for name, argument in call_arguments(op).items():
        if name not in SIZE_ARGUMENTS:
            leaves = pytree.tree_leaves(argument)
            numbers |= {
                f"{name} {index}": leaf
                for index, leaf in enumerate(leaves)
                if isinstance(leaf, (int, float, complex))
            }
    return numbers


def divides_by_samples(op: Op, changed: Mapping[str, tuple[object, object]], ratio: float) -> bool:
    """Whether an operator divides a sum by a number proportional to the batch size, which makes it
    a mean: `sum / len(x)`, also traced as a product with the inverse."""
    if len(changed) != 1 or len(op.inputs) != 1 or op.args[0] is not op.inputs[0]:
        return False
    ((divisor, small_divisor),) = changed.values()
    if not isinstance(divisor, (int, float)) or not isinstance(small_divisor, (int, float)):
        return False
    # `isclose`, as an inverse is a rounded number.
    if op.short_name == "div":
        return isclose(divisor, small_divisor * ratio)
    return op.short_name == "mul" and isclose(divisor * ratio, small_divisor)
