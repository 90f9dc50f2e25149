"""Compute the rows of all experts at once, each row with the parameters of its expert.

The template repeats the operators of the first expert on the rows of all experts. Where experts
read different tensors, such as parameters, it stacks them, and each row reads its expert's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from shardwright.core.capture.canonicalize import insert_permute, insert_reshape, permutation
from shardwright.core.capture.constant_rows import (
    compute_constant,
    find_num_choices,
    repeats_of_rows,
)
from shardwright.core.capture.equal_nodes import EqualNodes
from shardwright.core.capture.fx_nodes import insert, is_tensor, node_arguments, node_shape, tensor
from shardwright.core.capture.padded_reads import restore_rows, select_rows
from shardwright.core.capture.routed_products import routed_product
from shardwright.core.capture.row_factors import find_row_dims, find_row_factor
from shardwright.core.capture.row_layouts import NoTemplateError, RowLayout
from shardwright.core.capture.sorted_rows import insert_sum_of_rows

aten = torch.ops.aten

LINEAR_LAYERS = (aten.linear.default, aten.matmul.default, aten.mm.default)
"""Products of rows with a matrix."""

_SIZED = (aten.reshape.default, aten.expand.default)


class ExpertTemplate:
    """One computation that replaces the computations of all experts of a loop.

    The rows of the computation are the (token, expert) pairs, in the order of `root`.

    Args:
        regions: the operators of each expert, equal except for the tensors that they read.
        root: expert indices, `[tokens, top_k]` or `[tokens]`; indices without an expert in
            `regions` compute nothing.
        layout: map from pairs to the rows of a mask.
        before: node before which the computation is inserted.
        equal: nodes that compute equal values.
    """

    def __init__(
        self,
        regions: Sequence[Sequence[fx.Node]],
        root: fx.Node,
        layout: RowLayout,
        before: fx.Node,
        equal: EqualNodes,
    ) -> None:
        self.products: list[fx.Node] = []
        """Nodes that multiply each row by the matrix of its expert."""
        self._regions, self._layout, self._before, self._equal = regions, layout, before, equal
        self._index = {node: index for index, node in enumerate(regions[0])}
        self._pairs = len(layout.positions)
        self._rows: dict[fx.Node, tuple[fx.Node, int]] = {}
        """Rows of all (token, expert) pairs and their dimension, by operator of the first expert.
        """
        if tensor(root).dtype == torch.bool:
            root = insert(before, aten.to.dtype, (root, torch.int64))
        self._ids = insert_reshape(root, (self._pairs,), before)
        self._is_complete = find_num_choices(root) == len(regions)
        """Whether the experts of the loop compute all (token, expert) pairs."""

    def counterparts(self, node: fx.Node) -> list[fx.Node]:
        """Return the operators of all experts that correspond to `node` of the first expert."""
        return [nodes[self._index[node]] for nodes in self._regions]

    # Results

    def add_rows(self, end: fx.Node, base: fx.Node) -> fx.Node:
        """Insert the result of `base.index_add(0, index, rows)` for the rows of all experts."""
        arguments = node_arguments(end)
        if end.target is aten.index_add.default:
            indices, added = [arguments["index"]], arguments["source"]
            is_sum = arguments["dim"] == 0 and arguments["alpha"] == 1
        else:
            indices, added = arguments["indices"], arguments["values"]
            is_sum = arguments["accumulate"]
        sizes = node_shape(base)
        numbers = self._ravel_indices(indices, sizes)
        count = prod(sizes[: len(indices)])
        repeats = repeats_of_rows(numbers, count)
        if not is_sum or repeats is None:
            raise NoTemplateError("this loop adds rows to other tokens than those of the mask")
        flat = insert_reshape(base, (count, *sizes[len(indices) :]), self._before)
        return self._insert_row_sum(
            end, flat, self._zero_uncomputed_rows(self._compute_leading_rows(added)), repeats
        )

    def add_at_mask(self, end: fx.Node, base: fx.Node, added: fx.Node) -> fx.Node:
        """Insert the result of `base[mask] += added` for the rows of all experts."""
        rows = self._zero_uncomputed_rows(self._compute_leading_rows(added))
        sizes = (self._layout.num_rows, *node_shape(rows)[1:])
        repeats = self._layout.top_k if self._layout.repeats else 1
        rows = rows if self._layout.repeats else self._restore_mask_order(rows)
        return self._insert_row_sum(end, insert_reshape(base, sizes, self._before), rows, repeats)

    def write_at_mask(self, end: fx.Node, base: fx.Node, written: fx.Node) -> fx.Node:
        """Insert the result of `base[mask] = written` for the rows of all experts."""
        if self._layout.repeats:
            raise NoTemplateError("this loop overwrites the rows of a token by each of its experts")
        rows = self._restore_mask_order(self._compute_leading_rows(written))
        new = insert_reshape(rows, node_shape(end), self._before)
        if not self._is_complete:
            computed = self._restore_mask_order(self._mark_computed_pairs(1))
            ranks = (*node_shape(computed), *(1,) * (len(node_shape(rows)) - 1))
            sizes = node_shape(rows)
            start = insert_reshape(base, sizes, self._before)
            computed = insert_reshape(computed, ranks, self._before)
            new = insert(self._before, aten.where.self, (computed, rows, start))
            new = insert_reshape(new, node_shape(end), self._before)
        return new

    def _insert_row_sum(self, end: fx.Node, base: fx.Node, rows: fx.Node, repeats: int) -> fx.Node:
        if node_shape(rows)[1:] != node_shape(base)[1:]:
            raise NoTemplateError("this loop broadcasts the rows that it adds")
        new = insert_sum_of_rows(self._before, base, rows, repeats)
        return insert_reshape(new, node_shape(end), self._before)

    def _compute_leading_rows(self, node: Any) -> fx.Node:
        """Compute an operator of the first expert for all pairs; rows must be in dimension 0."""
        rows, dim = self._compute_rows(node)
        if dim != 0:
            raise NoTemplateError("this loop writes selected rows along a dimension other than 0")
        return rows

    def _restore_mask_order(self, rows: fx.Node) -> fx.Node:
        """Insert a permutation of rows from the order of pairs to that of the mask."""
        if self._layout.top_k == 1:
            return rows
        sizes, top_k = node_shape(rows), self._layout.top_k
        blocks = insert_reshape(rows, (sizes[0] // top_k, top_k, *sizes[1:]), self._before)
        dims = (1, 0, *range(2, len(sizes) + 1))
        return insert_reshape(insert_permute(blocks, dims, self._before), sizes, self._before)

    def _mark_computed_pairs(self, rank: int) -> fx.Node:
        """Insert a mask of the pairs whose expert is in the loop, `[pairs, 1, ...]`."""
        computed = insert(self._before, aten.eq.Tensor, (self._ids, self._clamp_ids()))
        return insert_reshape(computed, (self._pairs, *(1,) * (rank - 1)), self._before)

    def _zero_uncomputed_rows(self, rows: fx.Node) -> fx.Node:
        """Insert zeros in the rows of pairs whose expert is not in the loop."""
        if self._is_complete:
            return rows
        computed = self._mark_computed_pairs(len(node_shape(rows)))
        others = insert(self._before, aten.logical_not.default, (computed,))
        return insert(self._before, aten.masked_fill.Scalar, (rows, others, 0))

    # Operators of the experts

    def _compute_rows(self, node: Any) -> tuple[fx.Node, int]:
        """Compute an operator of the first expert for all (token, expert) pairs.

        Returns the result and the dimension of its rows.
        """
        if node not in self._index:
            raise NoTemplateError(
                "this loop over experts adds a tensor that is not computed from an expert's tokens"
            )
        if node not in self._rows:
            self._rows[node] = self._insert_operator(node)
        return self._rows[node]

    def _insert_operator(self, node: fx.Node) -> tuple[fx.Node, int]:
        if node.target is select_rows:
            dim: Any = node.args[2]
            return self._read_rows(
                self._list_arguments_of_experts(node, 0),
                lambda x: self._reorder_to_pairs(x, dim),
                dim,
            )
        if node.target is restore_rows:
            return self._compute_rows(node.args[0])
        if node.target is aten.index.Tensor:
            return self._read_at_indices(node)
        if node.target in LINEAR_LAYERS and node.args[0] in self._index and len(node.args) == 2:
            matrices = self._list_arguments_of_experts(node, 1)
            if matrices[0] not in self._index and not self._is_same_for_all_experts(matrices):
                return self._multiply_rows(node, matrices)
        if node.target is aten.add.Tensor and not node.kwargs and self._add_bias(node):
            return self.products[-1], 0
        return self._compute_each_row(node)

    def _list_arguments_of_experts(self, node: fx.Node, position: int) -> list[Any]:
        return [each.args[position] for each in self.counterparts(node)]

    def _is_same_for_all_experts(self, arguments: Sequence[Any]) -> bool:
        """Whether an argument, given for each expert, is equal for all experts."""
        first, *others = arguments
        if isinstance(first, fx.Node) and first in self._index:
            return list(arguments) == self.counterparts(first)
        if isinstance(first, fx.Node):
            return all(
                isinstance(each, fx.Node) and self._equal.first(each) is self._equal.first(first)
                for each in others
            )
        if isinstance(first, (list, tuple)):
            lengths = {len(each) if isinstance(each, (list, tuple)) else -1 for each in arguments}
            return len(lengths) == 1 and all(
                self._is_same_for_all_experts(items) for items in zip(*arguments, strict=True)
            )
        return all(type(each) is type(first) and each == first for each in others)

    # Reads

    def _read_rows(
        self, sources: Sequence[Any], read: Callable[[fx.Node], fx.Node], dim: int
    ) -> tuple[fx.Node, int]:
        """Read the rows of all pairs, from a shared tensor or from one tensor per expert."""
        if any(source in self._index for source in sources):
            raise NoTemplateError("this loop selects from the rows of an expert")
        if self._is_same_for_all_experts(sources):
            return read(sources[0]), dim
        if dim != 0 or len({node_shape(each) for each in sources}) > 1:
            raise NoTemplateError(
                "this loop reads tensors of different shapes for different experts"
            )
        return self._select_rows_by_expert([read(each) for each in sources]), 0

    def _select_rows_by_expert(self, rows: Sequence[fx.Node]) -> fx.Node:
        """Insert the row of each pair, gathered from the rows that its expert reads."""
        sizes, before = node_shape(rows[0]), self._before
        stacked = insert(before, aten.stack.default, (list(rows), 1))
        index = insert_reshape(self._clamp_ids(), (sizes[0], *(1,) * len(sizes)), before)
        if len(sizes) > 1:
            index = insert(before, aten.expand.default, (index, [sizes[0], 1, *sizes[1:]]))
        return insert_reshape(
            insert(before, aten.gather.default, (stacked, 1, index)), sizes, before
        )

    def _clamp_ids(self) -> fx.Node:
        """Return the expert index of each pair, clamped to the experts of the loop."""
        if self._is_complete:
            return self._ids
        last = len(self._regions) - 1
        return insert(self._before, aten.clamp.default, (self._ids, 0, last))

    def _reorder_to_pairs(self, x: fx.Node, dim: int) -> fx.Node:
        """Insert a tensor with its rows permuted or repeated to the order of the pairs."""
        sizes, top_k, before = node_shape(x), self._layout.top_k, self._before
        lead, trailing = sizes[:dim], sizes[dim + 1 :]
        if top_k == 1:
            return x
        if self._layout.repeats:
            return self._repeat_rows(x, dim, top_k)
        blocks = insert_reshape(x, (*lead, top_k, sizes[dim] // top_k, *trailing), before)
        dims = list(range(len(sizes) + 1))
        dims[dim : dim + 2] = dim + 1, dim
        return insert_reshape(insert_permute(blocks, tuple(dims), before), sizes, before)

    def _repeat_rows(self, x: fx.Node, dim: int, repeats: int) -> fx.Node:
        sizes, before = node_shape(x), self._before
        if repeats == 1:
            return x
        blocks = [*sizes[: dim + 1], repeats, *sizes[dim + 1 :]]
        new = insert(before, aten.unsqueeze.default, (x, dim + 1))
        new = insert(before, aten.expand.default, (new, blocks))
        sizes = (*sizes[:dim], sizes[dim] * repeats, *sizes[dim + 1 :])
        return insert(before, aten.reshape.default, (new, list(sizes)))

    def _read_at_indices(self, node: fx.Node) -> tuple[fx.Node, int]:
        """Insert `x[indices]` for all pairs; `indices` are positions of an expert's rows."""
        indices: Any = node.args[1]
        lead = len(list(takewhile(lambda index: index is None, indices)))
        numbers_of, before = indices[lead:], self._before

        def read(x: fx.Node) -> fx.Node:
            sizes = node_shape(x)
            numbers = self._ravel_indices(numbers_of, sizes[lead:])
            count = prod(sizes[lead : lead + len(numbers_of)])
            repeats = repeats_of_rows(numbers, count)
            if repeats is None:
                raise NoTemplateError("this loop reads rows of other tokens than those of the mask")
            flat = (*sizes[:lead], count, *sizes[lead + len(numbers_of) :])
            return self._repeat_rows(insert_reshape(x, flat, before), lead, repeats)

        return self._read_rows(self._list_arguments_of_experts(node, 0), read, lead)

    def _ravel_indices(self, indices: Sequence[Any], sizes: Sequence[int]) -> Tensor:
        """Convert indices of leading dimensions to flat row numbers of all pairs, `[pairs]`.

        Args:
            indices: one index for each leading dimension, positions of an expert's rows.
            sizes: sizes of the indexed tensor.
        """
        raveled = torch.zeros(self._pairs, dtype=torch.int64)
        for index, size in zip(indices, sizes, strict=False):
            numbers = self._compute_row_numbers(index)
            if numbers is None or numbers.shape != (self._layout.num_rows,):
                raise NoTemplateError(
                    "this loop reads or adds rows at indices not from `torch.where`"
                )
            raveled = raveled * size + numbers[self._layout.positions]
        return raveled

    def _compute_row_numbers(self, index: Any) -> Tensor | None:
        """Return the values of an index of selected rows, computed for all rows; None for an index
        that is not constant."""
        if index not in self._index:
            return None
        source: Any = index.args[0]
        if index.target is select_rows:
            return compute_constant(source)
        numbers = self._compute_row_numbers(source)
        if numbers is not None and index.target is aten.reshape.default:
            return numbers.reshape(node_shape(index))
        if numbers is not None and index.target is aten.select.int:
            return numbers.select(*index.args[1:])
        return None

    # Computation

    def _multiply_rows(self, node: fx.Node, matrices: Sequence[Any]) -> tuple[fx.Node, int]:
        rows, dim = self._compute_rows(node.args[0])
        sizes, before = node_shape(rows), self._before
        if prod(sizes) != sizes[dim] * sizes[-1] or dim == len(sizes) - 1:
            raise NoTemplateError(
                "this loop multiplies a tensor other than rows `[rows, size]` by a matrix"
            )
        stacked = self._stack_tensors(matrices)
        if len(node_shape(stacked)) != 3:
            raise NoTemplateError("this loop multiplies rows by parameters that are not matrices")
        if node.target is aten.linear.default:
            stacked = insert_permute(stacked, (0, 2, 1), before)
        flat = insert_reshape(rows, (sizes[dim], sizes[-1]), before)
        product = insert(before, routed_product, (flat, self._ids, stacked))
        self.products.append(product)
        return insert_reshape(product, (*sizes[:-1], node_shape(product)[1]), before), dim

    def _add_bias(self, node: fx.Node) -> bool:
        """Add the experts' biases to the last product; return False if `node` adds no bias."""
        product, bias = node.args
        if product not in self._index or len(product.users) > 1:  # type: ignore[union-attr]
            return False
        biases = self._list_arguments_of_experts(node, 1)
        rows, _ = self._compute_rows(product)
        if (
            rows not in self.products[-1:]
            or bias in self._index
            or self._is_same_for_all_experts(biases)
        ):
            return False
        table = self._stack_tensors(biases)
        if node_shape(table)[1:] != node_shape(rows)[1:]:
            return False
        new = insert(self._before, routed_product, (*rows.args, table))
        self.products[-1] = new
        return True

    def _stack_tensors(self, tensors: Sequence[Any]) -> fx.Node:
        """Insert the stack of all experts' tensors, in dimension 0.

        If the tensors are the slices of one tensor, or views of slices, no stack is inserted.
        """
        if not all(is_tensor(each) for each in tensors) or any(
            each in self._index for each in tensors
        ):
            raise NoTemplateError("this loop reads different Python numbers for different experts")
        first, before = tensors[0], self._before
        targets, shapes = {each.target for each in tensors}, {node_shape(each) for each in tensors}
        if len(shapes) > 1:
            raise NoTemplateError(
                "this loop has parameters of different shapes for different experts"
            )
        if targets == {aten.select.int}:
            source, dim, _ = first.args
            if (
                dim == 0
                and node_shape(source)[0] == len(tensors)
                and all(each.args == (source, 0, index) for index, each in enumerate(tensors))
            ):
                return source  # type: ignore[no-any-return]
        dims = permutation(first)
        if dims is not None and all(permutation(each) == dims for each in tensors):
            stacked = self._stack_tensors([each.args[0] for each in tensors])
            return insert_permute(stacked, (0, *(dim + 1 for dim in dims)), before)
        if targets == {aten.to.dtype} and len({each.args[1] for each in tensors}) == 1:
            stacked = self._stack_tensors([each.args[0] for each in tensors])
            return insert(before, aten.to.dtype, (stacked, first.args[1]))
        return insert(before, aten.stack.default, (list(tensors), 0))

    def _compute_each_row(self, node: fx.Node) -> tuple[fx.Node, int]:
        """Insert an operator that computes each row independently, for the rows of all pairs."""
        others = self.counterparts(node)
        if any(
            set(each.kwargs) != set(node.kwargs) for each in others
        ) or not self._is_same_for_all_experts([tuple(each.kwargs.values()) for each in others]):
            raise NoTemplateError(
                "this loop passes different options to operators of different experts"
            )
        inputs = [each for each in node.all_input_nodes if each in self._index]
        computed = {each: self._compute_rows(each) for each in inputs}
        args = list(node.args)
        for position in range(len(args)):
            arguments = self._list_arguments_of_experts(node, position)
            if not self._is_same_for_all_experts(arguments):
                args[position] = self._select_row_parameters(node, arguments)
        dims = self._find_input_row_dims(node)
        row_factor = find_row_factor(node, dims, self._layout.num_rows)
        outputs = (
            find_row_dims(row_factor[1].outputs, row_factor[0]) if row_factor is not None else None
        )
        if outputs is None or not is_tensor(node):
            raise NoTemplateError("this loop combines the rows of several tokens")
        if node.target in _SIZED:
            sizes = list(node_shape(node))
            sizes[outputs[0]] *= self._pairs // self._layout.num_rows
            args[1] = sizes

        def rows(each: fx.Node) -> fx.Node:
            return computed[each][0] if each in computed else each

        new_args, kwargs = fx.map_arg((tuple(args), node.kwargs), rows)
        return insert(self._before, node.target, new_args, kwargs), outputs[0]  # type: ignore[arg-type]

    def _find_input_row_dims(self, node: fx.Node) -> dict[fx.Node, int]:
        """Return the row dimension of each input that is computed from an expert's rows."""
        return {each: self._rows[each][1] for each in node.all_input_nodes if each in self._rows}

    def _select_row_parameters(self, node: fx.Node, parameters: Sequence[Any]) -> fx.Node:
        """Insert a parameter, such as a bias, of the expert of each row."""
        is_pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
        table = self._stack_tensors(parameters)
        sizes, rank = node_shape(table)[1:], len(node_shape(node))
        dims = set(self._find_input_row_dims(node).values())
        if not is_pointwise or dims != {0} or len(sizes) >= rank:
            raise NoTemplateError("this loop reads different tensors for different experts")
        chosen = insert(self._before, aten.index_select.default, (table, 0, self._clamp_ids()))
        blocks = (self._pairs, *(1,) * (rank - 1 - len(sizes)), *sizes)
        return insert_reshape(chosen, blocks, self._before)
