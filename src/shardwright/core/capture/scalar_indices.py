"""Reads and writes of one element or row by a tensor without dimensions: `x[i]`, `x[i] = y`.

Python indexing converts such an index to a number, which a captured model does not know. Here they
stay operators on tensors, `index_select` and `index_put`, whose sharding rules apply.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from shardwright.core.capture.fx_nodes import insert, is_tensor, node_shape, replace

aten = torch.ops.aten


def keep_scalar_indices(graph: fx.Graph) -> None:
    """Replace `select` at the value of an integer tensor by `index_select`, in place."""
    for node in list(graph.nodes):
        if node.target is not aten.item.default or not is_tensor(node.args[0]):
            continue
        for user in list(node.users):
            if user.target is aten.select.int and user.args[2] is node:
                replace(user, _select_by_tensor(user, node.args[0]))
        if not node.users:
            graph.erase_node(node)


def _select_by_tensor(select: fx.Node, index: fx.Node) -> fx.Node:
    source, dim, _ = select.args
    assert isinstance(source, fx.Node) and isinstance(dim, int)
    row = insert(select, aten.reshape.default, (index, [1]))
    # `select` counts negative indices from the end, `index_select` refuses them.
    size = node_shape(source)[dim]
    from_end = insert(select, aten.add.Tensor, (row, size))
    is_negative = insert(select, aten.lt.Scalar, (row, 0))
    row = insert(select, aten.where.self, (is_negative, from_end, row))
    rows = insert(select, aten.index_select.default, (source, dim, row))
    return insert(select, aten.squeeze.dim, (rows, dim))


def at_one_row(x: Tensor, index: Any, value: Any) -> tuple[Any, Any]:
    """Return index and value of the write `x[index] = value` with a row of one index in place of an
    integer tensor without dimensions; unchanged without such a tensor, or with other tensors."""
    entries = index if isinstance(index, tuple) else (index,)
    tensors = [n for n, entry in enumerate(entries) if not _is_basic(entry)]
    if len(tensors) != 1 or not _is_number(entries[tensors[0]]):
        return index, value
    (position,) = tensors
    after = entries[position + 1 :]
    indexed = sum(entry is not None and entry is not Ellipsis for entry in entries)
    # Dimensions that no entry names are in the place of `...`, by default the last.
    unnamed = 0 if any(entry is Ellipsis for entry in entries[:position]) else x.ndim - indexed
    following = unnamed + sum(entry is None or isinstance(entry, slice) for entry in after)
    if isinstance(value, Tensor):
        # A write at a number converts the value, one at rows refuses another dtype.
        value = value.to(x.dtype)
        if value.ndim > following:
            value = value.unsqueeze(value.ndim - following)
    return (*entries[:position], entries[position].reshape(1), *after), value


def _is_basic(entry: Any) -> bool:
    """Whether an entry of an index is no tensor or sequence of indices."""
    # A truth value adds a dimension.
    is_number = isinstance(entry, (int, torch.SymInt)) and not isinstance(entry, bool)
    return entry is None or entry is Ellipsis or isinstance(entry, slice) or is_number


def _is_number(entry: Any) -> bool:
    return (
        isinstance(entry, Tensor)
        and not entry.ndim
        and not entry.is_floating_point()
        and entry.dtype is not torch.bool
    )
