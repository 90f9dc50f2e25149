"""Static shapes for selections by boolean masks, `x[mask]`, in a traced graph.

The number of rows that a mask selects is known only when the model runs. Each selection becomes a
call of `select_rows`, which returns all rows, so that every later operator has a static shape.
Writes of selected rows (`x[mask] = rows`) become `torch.where`, and the number of rows as a divisor
or factor becomes the sum of the mask. `selected_rows.py` then makes operators on all rows compute
what they would compute from the selected rows.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from shardwright.core.capture.added_rows import find_added_rows
from shardwright.core.capture.fx_nodes import (
    insert,
    is_tensor,
    node_arguments,
    node_shape,
    replace,
    tensor,
)
from shardwright.core.capture.padded_reads import (
    COORDINATES,
    NONZERO,
    READS,
    PaddedReads,
    restore_rows,
)
from shardwright.core.capture.row_counts import (
    SYMBOLS,
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

aten = torch.ops.aten


_INDEXED_WRITES = (aten.index_put.default, aten.index_put_.default)
_WRITES = (*_INDEXED_WRITES, aten.masked_scatter.default, aten.masked_scatter_.default)
_CREATIONS = (
    *(aten.zeros.default, aten.ones.default, aten.full.default),
    *(aten.new_zeros.default, aten.new_ones.default, aten.new_full.default),
)


def pad_selected_rows(graph: fx.Graph) -> None:
    """Make each selection by a mask return all rows, so that all sizes are static; in place.

    Raises:
        CaptureError: if an operator needs the number of selected rows as a Python number.
    """
    erase_unread_sizes(graph)
    selections = (*NONZERO, *READS)
    if any(
        # Of `x[index]`, only reads by masks have symbolic sizes.
        node.target in COORDINATES
        or (node.target in selections and has_symbols(node.meta.get("val")))
        for node in graph.nodes
    ):
        padding = _PaddingRewrite(graph)
        for node in list(graph.nodes):
            # The rewrite of a node may erase later ones, such as the results of `where`.
            if node.op == "call_function" and not is_erased(node):
                padding.run(node)
        padding.erase_sizes()


class _PaddingRewrite(PaddedReads):
    """Rewriter of selections by masks, which gives all operators of a graph static shapes.

    Args:
        graph: the traced graph; modified in place.
    """

    def run(self, node: fx.Node) -> None:
        """Rewrite one node to static sizes."""
        value, target, inputs = node.meta.get("val"), node.target, node.all_input_nodes
        if target in COORDINATES:
            self._replace_coordinates(node)
            return
        # Arithmetic on sizes stays until no operator reads it (`erase_sizes`).
        if isinstance(value, SYMBOLS) or value is None:
            return
        if target in READS and has_symbols(value) and self._rewrite_selection(node):
            return
        if target in NONZERO:
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
