"""Which parameters the backward pass needs once more."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from shardwright.graph.graph import Graph, Kind, Op, Value
from shardwright.graph.saved import Saved, saved

Use = tuple[str, int]
"""An input of an operator: its name and the index of the input."""

aten = torch.ops.aten


def kept_for_backward(graph: Graph) -> frozenset[Use]:
    """The inputs that read a parameter whose numbers the backward pass needs.

    A linear layer keeps its weight, an embedding and an addition do not. Where a view of a
    parameter is kept, the input counts that the first view was made from.
    """
    kept: set[Use] = set()
    views: dict[Value, Use] = {}
    known: dict[Any, Saved] = {}
    for op in graph.ops:
        uses = {
            index: views.get(value, (op.name, index))
            for index, value in enumerate(op.inputs)
            if value.kind is Kind.PARAMETER or value in views
        }
        if not uses:
            continue
        if _is_view(op) and 0 in uses:
            views[op.output] = uses[0]
            continue
        found = _saved(op, known)
        kept.update(use for index, use in uses.items() if index in found.inputs)
    return frozenset(kept)


def _saved(op: Op, known: dict[Any, Saved]) -> Saved:
    """Equal operators keep the same; `known` holds what was found."""

    def described(value: Value) -> tuple[Any, ...]:
        return value.shape, value.dtype, value.requires_grad

    key = repr((op.target, pytree.tree_map_only(Value, described, (op.args, op.kwargs))))
    if key not in known:
        known[key] = saved(op)
    return known[key]


def _is_view(op: Op) -> bool:
    """Whether the output shares the storage of the first input; a reshape of a parameter does."""
    if op.target is aten.reshape.default:
        return True
    if not isinstance(op.target, torch._ops.OpOverload):
        return False
    returns = op.target._schema.returns
    return len(returns) == 1 and returns[0].alias_info is not None
