"""Operators that are linear in samples, or in sums over samples."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from shardwright.core.graph.graph import Op, Value
from shardwright.core.micro_batches.sample_states import SUM, WHOLE, SampleState
from shardwright.core.rules.notation import call_arguments

LINEAR = frozenset(
    {
        *("mul", "div", "neg", "to", "_to_copy", "detach", "clone", "alias", "sum", "mean"),
        *("view", "reshape", "flatten", "squeeze", "unsqueeze", "permute", "t", "transpose"),
        *("expand", "select", "slice", "unbind", "split", "index_select", "diagonal"),
        *("linear", "matmul", "mm", "mv", "bmm", "dot"),
    }
)
"""Names of operators with f(x + y) = f(x) + f(y) in one operand while the others are constant."""

ADDITIVE = frozenset({"add", "sub", "rsub", "cat", "stack", "where", "lerp"})
"""Names of operators with f(a + b, x + y) = f(a, x) + f(b, y), jointly linear in all operands."""

INDEXED_SUMS = frozenset({"scatter_add", "scatter_reduce", "index_add", "index_put"})
"""Names of operators that can add slices of one tensor to another tensor at given indices."""


def dims_of_indexed_sum(
    op: Op,
    states: Mapping[Value, SampleState],
    outside: Collection[Value],
    free: Collection[Value],
) -> tuple[int | None, ...] | None:
    """Return the batch dimension of each input of an operator that adds all samples to a tensor,
    such as `index_add`.

    Returns None for any other operator.

    Args:
        op: an operator with an input that is split into micro-batches.
        states: the `SampleState` of each value.
        outside: values that the prologue computes; micro-batches can read slices of these.
        free: values that the prologue can compute.
    """
    if not _adds_rows_at_indices(op):
        return None
    base, *indices, added = op.inputs
    # A sum over samples adds the base once: a value that is equal in all micro-batches, or a sum.
    if states[base] not in (WHOLE, SUM) or not base.shape or not added.shape:
        return None
    # An integer cannot be divided by the number of micro-batches: the prologue passes the base to
    # the first one.
    if states[base] == WHOLE and not base.dtype.is_floating_point and base not in free:
        return None
    if op.short_name == "index_put":
        index_dim = dim = 0
        # Indices of the first dimensions, each with one number for each sample.
        if None in op.args[1] or any(len(index.shape) != 1 for index in indices):
            return None
    elif len(added.shape) != len(base.shape):
        return None
    else:
        dim = call_arguments(op)["dim"] % len(base.shape)
        # The index of `index_add` is a vector, those of `scatter_add` have the shape of the added
        # tensor.
        index_dim = 0 if op.short_name == "index_add" else dim
    # Slices behind the last index are not added.
    if any(not v.shape or v.shape[index_dim] != added.shape[dim] for v in indices):
        return None
    pairs = (*((index, index_dim) for index in indices), (added, dim))
    split = all(states[value] == along or value in outside for value, along in pairs)
    return (None, *(index_dim for _ in indices), dim) if split else None


def _adds_rows_at_indices(op: Op) -> bool:
    arguments = call_arguments(op)
    adds = {
        # Without `include_self` the base is no term of the sum where an element is added.
        "scatter_reduce": arguments.get("reduce") == "sum" and arguments.get("include_self", True),
        "index_put": bool(arguments.get("accumulate")) and len(op.inputs) > 2,
    }
    # A sum of booleans is their disjunction.
    is_number = op.output.dtype != torch.bool
    return op.short_name in INDEXED_SUMS and is_number and adds.get(op.short_name, True)
