"""Static shapes for selections by boolean masks, `x[mask]`, in a traced graph.

The number of rows that a mask selects is known only when the model runs. Each selection becomes a
call of `select_rows`, which returns all rows, so that every later operator has a static shape.
Writes of selected rows (`x[mask] = rows`) become `torch.where`, and the number of rows as a divisor
or factor becomes the sum of the mask. `selected_rows.py` then makes operators on all rows compute
what they would compute from the selected rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from shardwright.core.capture.added_rows import find_added_rows
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
    checks_size,
    count_refusal,
    erase_unread_sizes,
    expression_of,
    has_symbols,
)
from shardwright.core.capture.views import SAME_ELEMENTS
from shardwright.core.torch_internals.operators import (
    OpOverload,
    is_erased,
    schema_of,
)
from shardwright.core.torch_internals.tensors import FakeTensor

aten = torch.ops.aten


_NONZERO = (aten.nonzero.default, aten.argwhere.default)
_COORDINATES = (aten.nonzero_numpy.default, aten.where.default)
_READS = (aten.index.Tensor, aten.masked_select.default)
_INDEXED_WRITES = (aten.index_put.default, aten.index_put_.default)
_WRITES = (*_INDEXED_WRITES, aten.masked_scatter.default, aten.masked_scatter_.default)
_CREATIONS = (
    *(aten.zeros.default, aten.ones.default, aten.full.default),
    *(aten.new_zeros.default, aten.new_ones.default, aten.new_full.default),
)


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


def pad_selected_rows(graph: fx.Graph) -> None:
    """Make each selection by a mask return all rows, so that all sizes are static; in place.

    Raises:
        CaptureError: if an operator needs the number of selected rows as a Python number.
    """
    erase_unread_sizes(graph)
    selections = (*_NONZERO, *_READS)
    if any(
        # Of `x[index]`, only reads by masks have symbolic sizes.
        node.target in _COORDINATES
        or (node.target in selections and has_symbols(node.meta.get("val")))
        for node in graph.nodes
    ):
        padding = _PaddingRewrite(graph)
        for node in list(graph.nodes):
            # The rewrite of a node may erase later ones, such as the results of `where`.
            if node.op == "call_function" and not is_erased(node):
                padding.run(node)
        padding.erase_sizes()


class _PaddingRewrite:
    """Rewriter of selections by masks, which gives all operators of a graph static shapes.

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

    def run(self, node: fx.Node) -> None:
        """Rewrite one node to static sizes."""
        value, target, inputs = node.meta.get("val"), node.target, node.all_input_nodes
        if target in _COORDINATES:
            self._replace_coordinates(node)
            return
        # Arithmetic on sizes stays until no operator reads it (`erase_sizes`).
        if isinstance(value, SYMBOLS) or value is None:
            return
        if target in _READS and has_symbols(value) and self._rewrite_selection(node):
            return
        if target in _NONZERO:
            self._replace_nonzero(node)
        elif target in _WRITES and self._rewrite_write(node):
            return
        elif target is aten.arange.default and has_symbols(value):
            # Accepted only as the first of two indices (`_rewrite_gather_per_row`).
            self.positions[node] = expression_of(value.shape[0])
        elif (
            has_symbols(value)
            or any(each in self.counts.traced for each in inputs)
            or any(isinstance(each.meta.get("val"), SYMBOLS) for each in inputs)
        ):
            self._infer_static_shape(node, value)

    def erase_sizes(self) -> None:
        """Erase unused arithmetic on row counts, and checks of row counts."""
        # In reverse, so that what reads a size is erased before the size.
        for node in reversed(list(self.graph.nodes)):
            is_size = isinstance(node.meta.get("val"), SYMBOLS) or node in self.positions
            if node.op == "call_function" and not node.users and (is_size or checks_size(node)):
                self.graph.erase_node(node)

    # Reads

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

    # Writes

    def _rewrite_write(self, node: fx.Node) -> bool:
        """Rewrite `x[mask] = rows` as `torch.where`; return False for a write that needs no row
        count."""
        arguments = node_arguments(node)
        # The fourth argument of `index_put` is `accumulate`.
        x, options = arguments["self"], node.args[3:]
        if node.target in _INDEXED_WRITES:
            indices, values = arguments["indices"], arguments["values"]
            by_index = any(each in self.coordinates for each in indices)
        else:
            indices, values, by_index = arguments["mask"], arguments["source"], False
        # `x[mask] = value` needs no rows; `canonicalize` makes it a `where`.
        if not by_index and values not in self.counts.traced:
            return False
        if node.target in _INDEXED_WRITES:
            selection = self._find_mask_of_indices(node, x, indices)
            # Not the positions of a mask, but for example those of the tokens of an expert.
            if selection is None and (arguments["accumulate"] or self._rewrite_addition(node)):
                return False
        else:
            selection = self._find_row_mask(node, x, indices, values)
        if selection is None:
            raise count_refusal(
                node, "this writes selected rows at positions other than the mask's"
            )
        mask, dim = selection
        trailing = len(node_shape(x)) - dim - len(mask.shape)
        if values in self.counts.traced:
            values = self._insert_rows_at_mask(node, values, mask, trailing)
        elif len(node_shape(values)) > trailing:
            raise count_refusal(node, "this writes rows that this mask has not selected")
        condition = self._insert_reshape(node, mask.flat, (*mask.shape, *(1,) * trailing))
        if tensor(values).dtype != tensor(x).dtype:
            values = insert(node, aten.to.dtype, (values, tensor(x).dtype))
        # Exact, because a mask selects each position once.
        if options and options[0]:
            values = insert(node, aten.add.Tensor, (x, values))
        new = insert(node, aten.where.self, (condition, values, x))
        # `functionalize`, which runs later, carries the write to what `x` is a view of.
        if schema_of(node.target).is_mutable:  # type: ignore[arg-type]
            new = insert(node, aten.copy_.default, (x, new))
        replace(node, new)
        return True

    def _rewrite_addition(self, node: fx.Node) -> bool:
        """Rewrite `x[index] += rows` as an adding `index_put`; return False for other writes."""
        x, indices = node.args[:2]
        added = find_added_rows(node, self.coordinates)
        if added is None:
            return False
        # The sum, then the read, whose only user is the sum.
        unread = [node.args[2], node.args[2].args[0]]  # type: ignore[union-attr]
        if tensor(added).dtype != tensor(x).dtype:  # type: ignore[arg-type]
            added = insert(node, aten.to.dtype, (added, tensor(x).dtype))  # type: ignore[arg-type]
        node.args, node.kwargs = (x, indices, added, True), {}
        for each in unread:
            if not each.users:  # type: ignore[union-attr]
                self.graph.erase_node(each)  # type: ignore[arg-type]
        return True

    def _insert_rows_at_mask(
        self, node: fx.Node, rows: fx.Node, mask: RowMask, trailing: int
    ) -> fx.Node:
        """Insert selected rows in the shape of the mask, so that they are at its positions."""
        sizes = node_shape(rows)
        dim = len(sizes) - trailing - 1
        if (
            dim < 0
            or sizes[dim] != prod(mask.shape)
            # A static size in the trace was not the number of selected rows.
            or isinstance(self.counts.traced[rows][dim], int)
        ):
            raise count_refusal(node, "this broadcasts selected rows")
        restored = insert(node, restore_rows, (rows, mask.flat, dim))
        return self._insert_reshape(node, restored, (*sizes[:dim], *mask.shape, *sizes[dim + 1 :]))

    def _find_row_mask(
        self, node: fx.Node, x: fx.Node, mask: fx.Node, values: fx.Node
    ) -> tuple[RowMask, int] | None:
        """Return the row mask and dimension 0 if the element mask `mask` selects full rows of `x`;
        None if the rows of `values` have another shape."""
        shape = node_shape(x)
        # `masked_scatter` reads its source element by element, whatever the shape of `x`.
        if len(node_shape(values)) == 1:
            if node_shape(mask) != shape:
                mask = insert(node, aten.expand.default, (mask, list(shape)))
            return self._copy_mask(node, mask), 0
        while (source := _find_unexpanded_mask(mask)) is not None:
            mask = source
        rank = len(node_shape(mask))
        same = node_shape(mask) == shape[:rank] and node_shape(values)[1:] == shape[rank:]
        return (self._copy_mask(node, mask), 0) if same else None

    # Other operators

    def _infer_static_shape(self, node: fx.Node, value: Any) -> None:
        """Replace symbolic sizes in the arguments of an operator, and infer its static shape."""
        # First, while symbols in the traced sizes still tell rows from other dimensions.
        self._check_reshape_keeps_rows(node, value)
        if any(each in self.positions for each in node.all_input_nodes):
            raise count_refusal(node, "this uses the numbers 0, 1, … of the selected rows")
        if isinstance(node.target, OpOverload):
            self.counts.replace_symbols(node)
        node.meta["val"] = self._run_on_fakes(node)
        if isinstance(value, Tensor) and has_symbols(value):
            self.counts.traced[node] = tuple(map(expression_of, value.shape))
        self.counts.check_sizes(node, value)
        self._mark_constant(node, value)
        source = node.args[0] if node.args else None
        if isinstance(source, fx.Node) and source in self.index_tables:
            self._follow_index_table(node, self.index_tables[source])

    def _mark_constant(self, node: fx.Node, value: Any) -> None:
        """Mark a constant with one element per selected row, such as `zeros(len(rows))`."""
        if node.target not in _CREATIONS or not has_symbols(value):
            return
        dims = [dim for dim, size in enumerate(value.shape) if isinstance(size, SYMBOLS)]
        symbol = expression_of(value.shape[dims[0]])
        if len(dims) > 1 or symbol not in self.counts.masks:
            raise count_refusal(node, "this needs the number of selected rows")
        # No fill: a constant has its value in all rows.
        marked = self._insert_row_mark(
            node.next, node, self.counts.masks[symbol], dims[0], value.shape, fill=False
        )
        # All users but the mark, which reads the constant.
        node.replace_all_uses_with(marked, delete_user_cb=lambda user: user is not marked)

    def _follow_index_table(self, node: fx.Node, mask: RowMask) -> None:
        """Record a view of the result of `nonzero`: a column of indices, or all of them."""
        arguments = node_arguments(node)
        if node.target in SAME_ELEMENTS and len(mask.shape) == 1:
            if len(node_shape(node)) == 1:
                self.coordinates[node] = (mask, 0)
        elif node.target is aten.select.int and arguments["dim"] in (1, -1):
            self.coordinates[node] = (mask, arguments["index"] % len(mask.shape))
        # `indices[:, 0]` may be traced as a slice of all rows and then a `select`.
        elif node.target is aten.slice.Tensor and self._reads_all_rows(node):
            self.index_tables[node] = mask

    def _reads_all_rows(self, node: fx.Node) -> bool:
        """Whether a slice of the result of `nonzero` reads all of its rows."""
        traced = self.counts.traced
        return node in traced and traced[node] == traced.get(node.args[0])  # type: ignore[arg-type]

    def _check_reshape_keeps_rows(self, node: fx.Node, value: Any) -> None:
        """Check that a reshape keeps the elements of a row adjacent.

        Other reshapes mix rows: if n rows of 4 elements are reshaped to `(4, n)`, a column has
        elements of several rows, and other ones for all rows than for the selected rows.
        """
        source = node.args[0] if node.args else None
        if node.target not in SAME_ELEMENTS or not is_tensor(source) or not is_tensor(node):
            return
        before = self.counts.traced.get(source, node_shape(source))
        after = [expression_of(size) for size in value.shape]
        firsts = []
        for shape in (before, after):
            rows = [dim for dim, size in enumerate(shape) if not isinstance(size, int)]
            # Number of blocks before the rows: if it is unchanged, rows keep their elements.
            firsts.append(prod(shape[: rows[0]]) if len(rows) == 1 else None)
        if firsts[0] is None or firsts[0] != firsts[1]:
            raise count_refusal(node, "this reshapes selected rows so that their elements mix")


def _find_unexpanded_mask(mask: fx.Node) -> fx.Node | None:
    """Return the mask that `mask` expands along its last dimension; None for other masks."""
    source, shape = mask.args[0] if mask.args else None, node_shape(mask)
    if not is_tensor(source):
        return None
    sizes = node_shape(source)
    if mask.target in (aten.expand.default, aten.expand_as.default):
        expanded = sizes[:-1] == shape[:-1] and len(sizes) == len(shape) and sizes[-1] == 1
        return source if expanded else None
    is_new = mask.target is aten.unsqueeze.default and mask.args[1] in (-1, len(sizes))
    return source if is_new else None
