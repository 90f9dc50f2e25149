"""Slices that divide the result of a projection, as one split.

Queries, keys and values of one projection may be written as `x[..., :q]`, `x[..., q:k]` and
`x[..., k:]`. Along a sharded dimension each slice would move all rows to other devices.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from shardwright.core.capture.annotations import tags_of
from shardwright.core.capture.fx_nodes import insert, node_shape, replace

aten = torch.ops.aten


def split_sliced_projections(graph: fx.Graph) -> None:
    """Replace slices that divide the last dimension of a projection by one split; in place."""
    for node in list(graph.nodes):
        if node.target is aten.linear.default or "bias_of" in node.meta:
            _replace_slices(node)


def _replace_slices(node: fx.Node) -> None:
    rank = len(node_shape(node))
    slices = [user for user in node.users if _is_slice(user, rank - 1)]
    ranges = sorted({_range_of(user) for user in slices})
    ends = [0, *(end for _, end in ranges)]
    # Each begins where the one before ends.
    if len(ranges) < 2 or [start for start, _ in ranges] != ends[:-1]:
        return
    if ends[-1] != node_shape(node)[-1]:
        return
    sizes = [end - start for start, end in ranges]
    arguments = (node, sizes, rank - 1)
    split = insert(node.next, aten.split_with_sizes.default, arguments, like=slices[0])
    for user in slices:
        index = ranges.index(_range_of(user))
        replace(user, insert(user, operator.getitem, (split, index)))


def _is_slice(node: fx.Node, dim: int) -> bool:
    """Whether a node slices consecutive elements along `dim`, and no pin applies to it."""
    return node.target is aten.slice.Tensor and node.args[1::3] == (dim, 1) and not tags_of(node)


def _range_of(node: fx.Node) -> tuple[int, int]:
    """Return (start, end) of a slice in canonical form."""
    _, _, start, end, _ = node.args
    assert isinstance(start, int) and isinstance(end, int)
    return start, end
