"""Writes of selected rows that add: `x[index] += rows`.

PyTorch reads rows, adds to them, and writes the sums. With all rows in place of those that a mask
selects, the write must add, since several rows that are not selected have the same index.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import BuiltinFunctionType, FunctionType

import torch
from torch import fx

from shardwright.core.capture.constant_rows import MaskTrials, find_first_integers
from shardwright.core.capture.fx_nodes import is_tensor, node_arguments, node_shape, tensor
from shardwright.core.capture.row_counts import RowMask
from shardwright.core.torch_internals.operators import OpOverload, schema_of
from shardwright.core.torch_internals.tensors import storage_id

aten = torch.ops.aten


def find_added_rows(
    write: fx.Node, coordinates: Mapping[fx.Node, tuple[RowMask, int]]
) -> fx.Node | None:
    """Return the rows that `x[index] += rows` adds; None if `write` is no such addition.

    Also None if `index` may repeat a position: `x[index] += rows` then adds only one of its rows,
    but an adding write adds all.

    Args:
        write: an `index_put` that does not add.
        coordinates: (mask, its dimension) of each tensor of indices of True elements.
    """
    arguments = node_arguments(write)
    x, indices, value = arguments["self"], arguments["indices"], arguments["values"]
    if not all(index in coordinates for index in indices):
        return None
    if value.target not in (aten.add_.Tensor, aten.add.Tensor) or value.kwargs:
        return None
    read, added = value.args
    if not is_tensor(added) or node_shape(added) != node_shape(value):
        return None
    if not is_tensor(read) or read.target is not aten.index.Tensor:
        return None
    if read.args != (x, list(indices)) or _is_written_between(x, read, write, value):
        return None
    masks, dims = zip(*(coordinates[index] for index in indices), strict=True)
    return added if _selects_different_positions(masks, dims) else None


def _is_written_between(x: fx.Node, read: fx.Node, write: fx.Node, value: fx.Node) -> bool:
    """Whether an operator other than `value` may change `x` between `read` and `write`."""
    node = read
    while node is not write:
        if node is not value and _may_write(node, x):
            return True
        node = node.next
    return False


def _may_write(node: fx.Node, x: fx.Node) -> bool:
    """Whether an operator may write to the memory of `x`."""
    if not isinstance(node.target, OpOverload):
        # Higher-order operators may; marks of rows and `getitem` do not.
        return not isinstance(node.target, (FunctionType, BuiltinFunctionType))
    written = [
        node_arguments(node)[argument.name]
        for argument in schema_of(node.target).arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return any(storage_id(tensor(each)) == storage_id(tensor(x)) for each in written)


def _selects_different_positions(masks: Sequence[RowMask], dims: Sequence[int]) -> bool:
    """Whether no two True elements of an expert mask have equal coordinates in `dims`."""
    first, *others = masks
    if any(mask is not first for mask in others):
        return False
    # Of integers that are not chosen by `topk`, equal ones may be drawn.
    trials = MaskTrials(find_first_integers(first.flat), [first.flat])
    positions = [mask.view(first.shape).nonzero()[:, list(dims)] for _, (mask,) in trials.draws]
    return bool(positions) and all(
        len(set(map(tuple, each.tolist()))) == len(each) for each in positions
    )
