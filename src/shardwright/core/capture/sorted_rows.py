"""Mixtures of experts that sort their rows by expert, captured as `custom_ops.experts`.

The model sorts the (token, expert) pairs by expert (`argsort`), gathers a row for each pair,
multiplies the rows of each expert by its matrices (`grouped_mm`), and adds the results to the
tokens (`scatter_add`) or restores the order of the tokens. Sorted rows cannot be sharded, because
any row can have any position. But the order does not affect the result: an operator whose sharding
rule has a factor for the rows in all tensors computes each row independently, and a sum over rows
is equal in any order. This module therefore computes all tensors of sorted rows in the order before
the sort, where the expert of a row is its sort key. `routed_products.py` then merges each mixture
of experts into one operator.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from shardwright.core.capture.constant_rows import ExpertEnds, repeats_of_rows, row_numbers
from shardwright.core.capture.fx_nodes import (
    ORIGIN,
    insert,
    is_tensor,
    node_arguments,
    node_shape,
    remove_dead,
    tensor,
)
from shardwright.core.capture.routed_products import fold_routed_products, routed_product
from shardwright.core.capture.row_factors import find_row_dims, find_row_factor
from shardwright.core.torch_internals.operators import is_erased

aten = torch.ops.aten

GROUPED_PRODUCTS = (aten._grouped_mm.default, torch.ops.shardwright.segment_matmul.default)

_SORTS = (aten.sort.default, aten.sort.stable)
_ARGSORTS = (aten.argsort.default, aten.argsort.stable)
_INDEXED_SUMS = (aten.scatter_add.default, aten.index_add.default, aten.index_put.default)


def fold_sorted_experts(graph: fx.Graph) -> None:
    """Replace the operators of each mixture of experts that sorts its tokens by expert with one
    operator `experts`, in place.

    Mixtures of experts that do not sort their tokens are left unchanged.
    """
    remove_dead(graph)
    if not any(node.target in GROUPED_PRODUCTS for node in graph.nodes):
        return
    # One for all layers: equal formulas are tried once.
    expert_ends = ExpertEnds()
    for node in list(graph.nodes):
        if is_erased(node):
            continue
        order = _find_sort_order(node, expert_ends)
        if order is not None:
            _fold_experts_sorted_by(order)
            # Also removes what was inserted for a sort that is not folded.
            remove_dead(graph)


@dataclass
class RowOrder:
    """A permutation of rows by a sort, and unsorted equivalents of the tensors with sorted rows.

    Args:
        positions: position before the sort of each sorted row, `[rows]`.
        keys: sort keys in the order before the sort, `[rows]`.
        expert_ends: detector of tensors with the end position of each expert's rows.
        unsorted: for each tensor of sorted rows, (tensor of unsorted rows, row dimension).
        items: for each operator with several results of sorted rows, (operator with results of
            unsorted rows, row dimension of each result).
        restored: for each tensor that does not depend on the order, an equal tensor computed
            without the sort.
        inverses: inverses of the permutation, `[rows]`.
        products: for each grouped product of sorted rows, the routed product of unsorted rows.
    """

    positions: fx.Node
    keys: fx.Node
    expert_ends: ExpertEnds
    unsorted: dict[fx.Node, tuple[fx.Node, int]] = field(default_factory=dict)
    items: dict[fx.Node, tuple[fx.Node, tuple[int, ...]]] = field(default_factory=dict)
    restored: dict[fx.Node, fx.Node] = field(default_factory=dict)
    inverses: set[fx.Node] = field(default_factory=set)
    products: dict[fx.Node, fx.Node] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return node_shape(self.keys)[0]

    def argument(self, value: Any) -> Any:
        """Return an argument of an operator with sorted tensors replaced by unsorted ones."""

        def unsorted(node: fx.Node) -> fx.Node:
            return self.unsorted[node][0] if node in self.unsorted else node

        return fx.map_arg(value, unsorted)


def _find_sort_order(node: fx.Node, expert_ends: ExpertEnds) -> RowOrder | None:
    """Return the `RowOrder` of a sort of a vector of integers; None for any other operator."""
    if node.target not in (*_SORTS, *_ARGSORTS):
        return None
    keys = node_arguments(node)["self"]
    # Floating-point keys are no experts.
    if len(node_shape(keys)) != 1 or tensor(keys).is_floating_point():
        return None
    items = {user.args[1]: user for user in node.users if user.target is operator.getitem}
    positions = node if node.target in _ARGSORTS else items.get(1)
    if positions is None:
        return None
    order = RowOrder(positions, keys, expert_ends)
    # The permutation itself, before the sort, is the identity.
    order.unsorted[positions] = (_insert_row_numbers(positions, order.num_rows), 0)
    if node.target in _SORTS and 0 in items:
        order.unsorted[items[0]] = (keys, 0)
    return order


def _insert_row_numbers(before: fx.Node, count: int) -> fx.Node:
    with before.graph.inserting_before(before), before.meta["val"].fake_mode:
        node = before.graph.call_function(aten.arange.default, (count,))
        node.meta.update({key: before.meta[key] for key in ORIGIN if key in before.meta})
        node.meta["val"] = torch.arange(count)
    return node


def _fold_experts_sorted_by(order: RowOrder) -> None:
    # A copy, because operators are inserted on the way.
    following = list(order.positions.graph.nodes)
    for node in following[following.index(order.positions) + 1 :]:
        inputs = node.all_input_nodes
        if node.op == "call_function" and any(
            each in order.unsorted or each in order.items or each in order.inverses
            for each in inputs
        ):
            _insert_unsorted(order, node)
    if order.products and _is_order_unobservable(order):
        fold_routed_products(order.restored, list(order.products.values()))


def _is_order_unobservable(order: RowOrder) -> bool:
    """Whether all tensors computed from the experts' products have unsorted equivalents."""
    reached = set(order.products)
    for node in order.positions.graph.nodes:
        # Restored tensors do not depend on the order, nor does what reads them.
        if reached.intersection(node.all_input_nodes) and node not in order.restored:
            reached.add(node)
    return all(node in order.unsorted or node in order.items for node in reached)


def _insert_unsorted(order: RowOrder, node: fx.Node) -> None:
    """Insert the unsorted equivalent of an operator on sorted rows, if it has one."""
    source = node.args[0] if node.args else None
    if node.target is operator.getitem and source in order.items:
        results, dims = order.items[source]  # type: ignore[index]
        index: Any = node.args[1]
        order.unsorted[node] = (insert(node, operator.getitem, (results, index)), dims[index])
    # Sorting a permutation inverts it.
    elif node.target in _ARGSORTS and source is order.positions:
        order.inverses.add(node)
    elif node.target in GROUPED_PRODUCTS:
        _insert_unsorted_product(order, node)
    elif (reads := _match_row_read(node)) is not None:
        _insert_unsorted_read(order, node, *reads)
    elif node.target in _INDEXED_SUMS or node.target in (aten.scatter.src,):
        _insert_unsorted_write(order, node)
    else:
        _insert_row_wise_operator(order, node)


def _insert_unsorted_product(order: RowOrder, node: fx.Node) -> None:
    rows, matrices, ends = node.args[:3]
    assert isinstance(matrices, fx.Node) and isinstance(ends, fx.Node)
    others = [each for each in node.all_input_nodes if each is not rows]
    if (
        isinstance(rows, fx.Node)
        and rows in order.unsorted
        # Matrices and ends; a product with a bias is left as it is.
        and len(others) == 2
        and not any(each in order.unsorted for each in others)
        and len(node_shape(matrices)) == 3
        and order.expert_ends.match(ends, order.positions, order.keys, node_shape(matrices)[0])
    ):
        arguments = (order.unsorted[rows][0], order.keys, matrices)
        product = insert(node, routed_product, arguments)
        order.unsorted[node], order.products[node] = (product, 0), product


def _match_row_read(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Match a read of rows, `x[index]`; return `x` and the index vector, or None."""
    if node.target is aten.index.Tensor:
        x, indices = node.args[:2]
        assert isinstance(indices, (list, tuple))
        index, *others = indices
        index = None if any(each is not None for each in others) else index
    elif node.target in (aten.index_select.default, aten.gather.default):
        x, dim, index = node.args[:3]
        assert isinstance(x, fx.Node)
        index = index_vector(index) if dim == 0 else None
        if node_shape(node)[1:] != node_shape(x)[1:]:
            # `gather` reads as many columns as its index has.
            return None
    else:
        return None
    assert isinstance(x, fx.Node)
    if not is_tensor(index) or len(node_shape(index)) != 1:
        return None
    return None if tensor(index).dtype == torch.bool else (x, index)


def index_vector(index: Any) -> fx.Node | None:
    """Return the vector that `index`, `[rows, ...]`, repeats in each column, or None."""
    while is_tensor(index) and len(node_shape(index)) > 1:
        sizes = node_shape(index)
        source = index.args[0]
        if not is_tensor(source) or node_shape(source)[:1] != sizes[:1]:
            return None
        if index.target in (aten.expand.default, aten.repeat.default):
            # With more dimensions than its input, the result repeats it in each row.
            keeps_rows = len(node_shape(source)) == len(sizes)
        elif index.target is aten.unsqueeze.default:
            keeps_rows = index.args[1] not in (0, -len(sizes))
        else:
            keeps_rows = index.target is aten.reshape.default
        if not keeps_rows:
            return None
        index = source
    return index if is_tensor(index) else None


def _insert_unsorted_read(order: RowOrder, node: fx.Node, x: fx.Node, index: fx.Node) -> None:
    if x in order.unsorted and index in order.inverses and order.unsorted[x][1] == 0:
        # `x[inverse]` brings the rows back into the order before the sort.
        order.restored[node] = order.unsorted[x][0]
    elif index in order.unsorted and x not in order.unsorted:
        # `tokens[order // top_k]`: before the sort, row i is of token i // top_k.
        rows = order.unsorted[index][0]
        numbers, sizes = row_numbers(rows), node_shape(x)
        repeats = repeats_of_rows(numbers, sizes[0])
        if repeats is None:
            # Not numbers of rows, but for example experts whose biases are read.
            _insert_row_wise_operator(order, node)
            return
        new = x
        # The rows of a token are next to each other, so an `expand` replaces the gather.
        if repeats > 1:
            new = insert(node, aten.unsqueeze.default, (x, 1))
            expanded = [sizes[0], repeats, *sizes[1:]]
            new = insert(node, aten.expand.default, (new, expanded))
            new = insert(node, aten.reshape.default, (new, [order.num_rows, *sizes[1:]]))
        order.unsorted[node] = (new, 0)


def _insert_unsorted_write(order: RowOrder, node: fx.Node) -> None:
    """Insert the unsorted equivalent of a write or addition of sorted rows at given positions."""
    arguments = node_arguments(node)
    index = arguments.get("index")
    if node.target is aten.index_put.default:
        index, *others = arguments["indices"]
        index = None if others else index
    base, adds = arguments["self"], arguments.get("accumulate", node.target is not aten.scatter.src)
    source = arguments.get("src", arguments.get("source", arguments.get("values")))
    vector = index_vector(index)
    if (
        vector is None
        or arguments.get("dim", 0) != 0
        or arguments.get("alpha", 1) != 1
        or vector not in order.unsorted
        or not is_tensor(base)
        # Sorted rows as the base would have to be restored, too, unless all are overwritten.
        or (base in order.unsorted and adds and not _is_zero(base))
        or not is_tensor(source)
    ):
        return
    assert isinstance(index, fx.Node)
    is_scatter = node.target in (aten.scatter_add.default, aten.scatter.src)
    if node_shape(index)[1:] != (node_shape(source)[1:] if is_scatter else ()):
        # `scatter` writes as many columns as its index has; other indices are vectors.
        return
    numbers, sizes = row_numbers(order.unsorted[vector][0]), node_shape(base)
    repeats = repeats_of_rows(numbers, sizes[0])
    if source not in order.unsorted:
        # `inverse[order] = arange(rows)`.
        written = row_numbers(source) if repeats == 1 else None
        if written is not None and repeats_of_rows(written, order.num_rows) == 1:
            order.inverses.add(node)
        return
    # Where several rows are written to one place, the last in sorted order stays.
    if repeats is None or (not adds and repeats > 1):
        return
    rows, dim = order.unsorted[source]
    if dim != 0 or node_shape(rows)[1:] != sizes[1:]:
        return
    order.restored[node] = insert_sum_of_rows(node, base if adds else None, rows, repeats)


def insert_sum_of_rows(
    before: fx.Node, base: fx.Node | None, rows: fx.Node, repeats: int
) -> fx.Node:
    """Insert the sums of groups of `repeats` consecutive rows, added to `base`."""
    sizes = node_shape(rows)
    result = rows
    if repeats > 1:
        blocks = [sizes[0] // repeats, repeats, *sizes[1:]]
        result = insert(before, aten.reshape.default, (rows, blocks))
        result = insert(before, aten.sum.dim_IntList, (result, [1]))
    if base is not None and not _is_zero(base):
        result = insert(before, aten.add.Tensor, (base, result))
    if tensor(result).dtype != tensor(before).dtype:
        result = insert(before, aten.to.dtype, (result, tensor(before).dtype))
    return result


def _is_zero(node: fx.Node) -> bool:
    if node.target in (aten.full.default, aten.new_full.default, aten.full_like.default):
        value = node_arguments(node)["fill_value"]
        return isinstance(value, (int, float)) and value == 0
    zeros = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
    return node.target in zeros


def _insert_row_wise_operator(order: RowOrder, node: fx.Node) -> None:
    """Insert the unsorted equivalent of an operator that computes each row independently."""
    dims = {sorted_rows: dim for sorted_rows, (_, dim) in order.unsorted.items()}
    row_factor = find_row_factor(node, dims, order.num_rows)
    if row_factor is None:
        return
    factor, rule = row_factor
    dims_of_rows = find_row_dims(rule.outputs, factor)
    # A result without rows is independent of the order if it is a sum over them.
    if dims_of_rows is None and factor not in rule.reduced:
        return
    new = insert(node, node.target, *order.argument((node.args, node.kwargs)))  # type: ignore[arg-type]
    if dims_of_rows is None:
        order.restored[node] = new
    elif isinstance(node.meta["val"], Tensor):
        order.unsorted[node] = (new, dims_of_rows[0])
    else:
        order.items[node] = (new, dims_of_rows)
