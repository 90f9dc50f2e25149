"""Reads of one element or row by a tensor without dimensions: `x[i]`.

Python indexing converts such an index to a number, which a captured model does not know. Here the
read stays an operator on tensors, `index_select`, whose sharding rule applies.
"""

from __future__ import annotations

import torch
from torch import fx

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
