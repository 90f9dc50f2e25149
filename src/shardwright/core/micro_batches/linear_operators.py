"""Operators that are linear in samples, or in sums over samples."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from shardwright.core.graph.graph import Op, Value
from shardwright.core.micro_batches.sample_states import WHOLE, SampleState
from shardwright.core.rules.notation import call_arguments

LINEAR = frozenset(
    {
        *("mul", "div", "neg", "to", "_to_copy", "detach", "clone", "alias", "sum", "mean"),
        *("view", "reshape", "flatten", "squeeze", "unsqueeze", "permute", "t", "transpose"),
        *("expand", "select", "slice", "unbind", "split", "index_select", "diagonal"),
        *("linear", "matmul", "mm", "mv", "bmm", "dot"),
    }
)
"""Names of operators f with f(x + y) = f(x) + f(y) in one operand, the others being constant."""

ADDITIVE = frozenset({"add", "sub", "rsub", "cat", "stack", "where"})
"""Names of operators that are linear in all operands together."""

INDEXED_SUMS = frozenset({"scatter_add", "index_add"})
"""Names of operators that add slices of a tensor to a base, `op.inputs[0]`, each at its index."""


def dims_of_indexed_sum(
    op: Op, states: Mapping[Value, SampleState], outside: Collection[Value]
) -> tuple[int | None, ...] | None:
    """Return the batch dimension of each input of an operator that adds all samples to a base
    without batch dimension; None for another operator.

    Args:
        op: an operator with an input that is split into micro-batches.
        states: states of values.
        outside: values that the prologue computes, of which micro-batches can read slices.
    """
    if op.short_name not in INDEXED_SUMS or not op.output.dtype.is_floating_point:
        return None
    base, index, added = op.inputs
    if states[base] != WHOLE or not base.shape or len(added.shape) != len(base.shape):
        return None
    dim = call_arguments(op)["dim"] % len(base.shape)
    index_dim = dim if op.short_name == "scatter_add" else 0
    # Slices behind the last index are not added.
    if not index.shape or index.shape[index_dim] != added.shape[dim]:
        return None
    pairs = ((index, index_dim), (added, dim))
    split = all(states[value] == along or value in outside for value, along in pairs)
    return (None, index_dim, dim) if split else None
