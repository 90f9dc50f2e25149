"""Reads of the rows that a mask selects, as all rows: `x[mask]`, `masked_select`, `nonzero`."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from shardwright.core.capture.fx_nodes import (
    ORIGIN,
    insert,
    is_tensor,
    node_arguments,
    node_shape,
    replace,
    tensor,
)
from shardwright.core.capture.row_counts import (
    SYMBOLS,
    RowCounts,
    RowMask,
    count_refusal,
    expression_of,
)
from shardwright.core.torch_internals.tensors import FakeTensor

aten = torch.ops.aten

NONZERO = (aten.nonzero.default, aten.argwhere.default)
"""Operators that return the indices of True elements as one tensor, `[True elements, dimensions]`.
"""

COORDINATES = (aten.nonzero_numpy.default, aten.where.default)
"""Operators that return the indices of True elements as one tensor per dimension."""

READS = (aten.index.Tensor, aten.masked_select.default)
"""Operators that read the elements or rows that a mask selects."""


def select_rows(x: Tensor, mask: Tensor, dim: int, fill: bool = True) -> Tensor:
    """Mark `x` as all rows of a selection; removed from the graph by `keep_selected_rows`.

    Args:
        x: all rows along dimension `dim`.
        mask: whether each row is selected, `[rows]`.
        dim: the dimension of the rows.
        fill: whether to overwrite unselected rows, because their values may be infinite or NaN.
    """
    # A copy, as a selection by a mask is: `functionalize` takes what shares storage for a view.
    return x.clone()


def restore_rows(rows: Tensor, mask: Tensor, dim: int) -> Tensor:
    """Mark rows that a write puts back at the positions of `mask`; unselected rows are not used."""
    # A copy, so that this is no view either.
    return rows.clone()


class PaddedReads:
    """Rewriter of reads by masks to reads of all rows.

    Args:
        graph: the traced graph; modified in place.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        fakes = (node.meta.get("val") for node in graph.nodes)
        self.mode: Any = next(x.fake_mode for x in fakes if isinstance(x, FakeTensor))
        self.counts = RowCounts()
        self.coordinates: dict[fx.Node, tuple[RowMask, int]] = {}
        """(mask, dimension) of each tensor of indices of the True elements of a mask."""
        self.index_tables: dict[fx.Node, RowMask] = {}
        """The mask of each result of `nonzero`, `[True elements, dimensions]`."""
        self.positions: dict[fx.Node, Any] = {}
        """Symbolic number of rows of each `arange` over selected rows."""

    def _rewrite_selection(self, node: fx.Node) -> bool:
        """Replace `x[mask]`; return False if no index is a mask."""
        if node.target is aten.masked_select.default:
            arguments = node_arguments(node)
            masked = (arguments["self"], arguments["mask"])
            shape = torch.broadcast_shapes(*map(node_shape, masked))  # type: ignore[no-untyped-call]
            x, mask = (
                each
                if node_shape(each) == shape
                else insert(node, aten.expand.default, (each, list(shape)))
                for each in masked
            )
            self._replace_by_all_rows(node, x, self._copy_mask(node, mask), 0)
            return True
        x, indices = node.args
        assert isinstance(x, fx.Node) and isinstance(indices, (list, tuple))
        selection = self._find_mask_of_indices(node, x, indices)
        if selection is not None:
            self._replace_by_all_rows(node, x, *selection)
            return True
        if self._rewrite_gather_per_row(node, x, indices):
            return True
        if self._rewrite_gather_from_selection(node, x, indices):
            return True
        # PyTorch takes an index of dtype uint8 for a mask.
        if any(is_tensor(i) and tensor(i).dtype in (torch.bool, torch.uint8) for i in indices):
            raise count_refusal(node, "this combines a mask with other indices")
        return False

    def _find_mask_of_indices(
        self, node: fx.Node, x: fx.Node, indices: Sequence[Any]
    ) -> tuple[RowMask, int] | None:
        """Return the mask that `x[indices]` applies, and its first dimension in `x`."""
        indexed = [dim for dim, index in enumerate(indices) if index is not None]
        first, *others = (indices[dim] for dim in indexed)
        if not others and tensor(first).dtype == torch.bool:
            return self._copy_mask(node, first), indexed[0]
        if first not in self.coordinates:
            return None
        mask, start = self.coordinates[first][0], indexed[0]
        rank = len(mask.shape)
        # `x[where(mask)]` equals `x[mask]` if the indices are all those of one mask, in order, for
        # adjacent dimensions of the sizes of the mask.
        in_order = [(mask, dim) for dim in range(rank)]
        adjacent = indexed == [*range(start, start + rank)]
        same = adjacent and [self.coordinates.get(indices[dim]) for dim in indexed] == in_order
        return (mask, start) if same and node_shape(x)[start:][:rank] == mask.shape else None

    def _replace_by_all_rows(self, node: fx.Node, x: fx.Node, mask: RowMask, dim: int) -> None:
        """Replace a selection by all rows of `x`; `dim` is the first dimension of `mask` in `x`."""
        shape, traced = node_shape(x), node.meta["val"].shape
        self.counts.record(node, traced[dim], mask)
        sizes = (*shape[:dim], prod(mask.shape), *shape[dim + len(mask.shape) :])
        rows = self._insert_reshape(node, x, sizes)
        replace(node, self._insert_row_mark(node, rows, mask, dim, traced))

    def _copy_mask(self, node: fx.Node, mask: fx.Node) -> RowMask:
        """Insert a copy of a boolean tensor, so that later in-place writes do not change it."""
        shape = node_shape(mask)
        if prod(shape) == 1:
            raise count_refusal(node, "this selects by a mask of one element")
        flat = self._insert_reshape(node, mask, (prod(shape),))
        return RowMask(insert(node, aten.clone.default, (flat,)), shape)

    def _insert_reshape(self, node: fx.Node, x: fx.Node, shape: tuple[int, ...]) -> fx.Node:
        return x if node_shape(x) == shape else insert(node, aten.reshape.default, (x, list(shape)))

    def _insert_row_mark(
        self,
        node: fx.Node,
        rows: fx.Node,
        mask: RowMask,
        dim: int,
        traced: Sequence[Any],
        fill: bool = True,
    ) -> fx.Node:
        """Insert a `select_rows` mark before `node`; `traced` is the shape with symbolic sizes."""
        marked = insert(node, select_rows, (rows, mask.flat, dim, fill))
        self.counts.traced[marked] = tuple(map(expression_of, traced))
        return marked

    def _rewrite_gather_per_row(self, node: fx.Node, x: fx.Node, indices: Sequence[Any]) -> bool:
        """Replace `rows[arange(len(rows)), index]` by `gather`; return False for other indices."""
        if len(indices) != 2 or indices[0] not in self.positions or len(node_shape(x)) < 2:
            return False
        positions, index = indices
        if (
            node_shape(index) != node_shape(x)[:1]
            or self._get_symbolic_row_count(x) != self.positions[positions]
        ):
            return False
        self._replace_by_gather(node, x, index)
        return True

    def _rewrite_gather_from_selection(
        self, node: fx.Node, x: fx.Node, indices: Sequence[Any]
    ) -> bool:
        """Replace `x[where(mask)[0], index]` and `x[mask, index]`, with an index for each selected
        row, by `gather`; return False for other indices."""
        *of_mask, index = indices
        count = node.meta["val"].shape[0]
        if not of_mask or None in of_mask or not isinstance(count, SYMBOLS):
            return False
        if index not in self.counts.traced or tensor(index).dtype == torch.bool:
            return False
        selection = self._find_mask_of_indices(node, x, of_mask)
        if selection is None or node_shape(index) != (prod(selection[0].shape),):
            return False
        (mask, _), rank = selection, len(selection[0].shape)
        sizes = node_shape(x)[rank:]
        self.counts.record(node, count, mask)
        rows = self._insert_reshape(node, x, (prod(mask.shape), *sizes))
        rows = self._insert_row_mark(node, rows, mask, 0, (count, *sizes))
        self._replace_by_gather(node, rows, index)
        return True

    def _replace_by_gather(self, node: fx.Node, rows: fx.Node, index: fx.Node) -> None:
        """Replace a read of one element of dimension 1 for each row, as in `rows[i, index[i]]`."""
        shape = node_shape(rows)
        # Unlike indexing, `gather` does not count negative indices from the end.
        negative = insert(node, aten.lt.Scalar, (index, 0))
        from_end = insert(node, aten.add.Scalar, (index, shape[1]))
        index = insert(node, aten.where.self, (negative, from_end, index))
        column = insert(node, aten.reshape.default, (index, [-1, *(1,) * (len(shape) - 1)]))
        if len(shape) > 2:
            column = insert(node, aten.expand.default, (column, [-1, 1, *shape[2:]]))
        column = insert(node, aten.gather.default, (rows, 1, column))
        new = insert(node, aten.squeeze.dim, (column, 1))
        self.counts.traced[new] = tuple(map(expression_of, node.meta["val"].shape))
        replace(node, new)

    def _get_symbolic_row_count(self, x: fx.Node) -> Any:
        """Return the symbolic number of rows of `x`; None if dimension 0 has a static size."""
        size = self.counts.traced[x][0] if x in self.counts.traced else None
        return None if isinstance(size, int) else size

    # Indices of True elements

    def _replace_nonzero(self, node: fx.Node) -> None:
        value = node.meta["val"]
        mask = self._copy_mask(node, self._convert_to_boolean(node))
        table = insert(node, aten.stack.default, (self._insert_coordinates(node, mask), 1))
        self.counts.record(node, value.shape[0], mask)
        new = self._insert_row_mark(node, table, mask, 0, value.shape)
        self.index_tables[new] = mask
        replace(node, new)

    def _replace_coordinates(self, node: fx.Node) -> None:
        mask = self._copy_mask(node, self._convert_to_boolean(node))
        tensors = self._insert_coordinates(node, mask)
        for getitem in list(node.users):
            dim = getitem.args[1]
            assert isinstance(dim, int)
            self.counts.record(node, getitem.meta["val"].shape[0], mask)
            new = self._insert_row_mark(node, tensors[dim], mask, 0, getitem.meta["val"].shape)
            self.coordinates[new] = (mask, dim)
            replace(getitem, new)
        self.graph.erase_node(node)

    def _convert_to_boolean(self, node: fx.Node) -> fx.Node:
        (x,) = node.args
        assert isinstance(x, fx.Node)
        if tensor(x).dtype == torch.bool:
            return x
        return insert(node, aten.ne.Scalar, (x, 0))

    def _insert_coordinates(self, node: fx.Node, mask: RowMask) -> list[fx.Node]:
        """Insert the coordinates of all elements of a mask: `[elements]` for each dimension."""
        rank, coordinates = len(mask.shape), []
        for dim, size in enumerate(mask.shape):
            axis = self._insert_arange(node, size)
            sizes = (*(1,) * dim, size, *(1,) * (rank - dim - 1))
            grid = self._insert_reshape(node, axis, sizes)
            if node_shape(grid) != mask.shape:
                grid = insert(node, aten.expand.default, (grid, list(mask.shape)))
            coordinates.append(self._insert_reshape(node, grid, (prod(mask.shape),)))
        return coordinates

    def _insert_arange(self, node: fx.Node, size: int) -> fx.Node:
        with self.graph.inserting_before(node):
            new = self.graph.call_function(aten.arange.default, (size,))
        new.meta = {key: node.meta[key] for key in ORIGIN if key in node.meta}
        new.meta["val"] = self._run_on_fakes(new)
        return new

    def _run_on_fakes(self, node: fx.Node) -> Any:
        """Run an operator on fake tensors; unlike `insert`, also one without tensor arguments."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
        with torch.no_grad(), self.mode:
            return node.target(*args, **kwargs)  # type: ignore[operator]
