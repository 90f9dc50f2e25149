"""Fusion of routed products into mixtures of experts (MoE).

A `routed_product` multiplies each row by the matrix of its expert. An up projection, the
elementwise operators after it, the down projection and the weighted sum over the experts of each
token become one call of `custom_ops.experts`.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from shardwright.core.capture.canonicalize import insert_permute, insert_reshape
from shardwright.core.capture.fx_nodes import (
    insert,
    is_tensor,
    node_shape,
    remove_dead,
    replace,
    tensor,
)
from shardwright.core.graph import custom_ops

aten = torch.ops.aten

_COLUMN_VIEWS = (
    *(aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default, aten.slice.Tensor),
    *(aten.unbind.int, aten.select.int, aten.reshape.default, operator.getitem),
)
"""Operators that select columns of an up projection."""


def routed_product(
    rows: Tensor, ids: Tensor, matrices: Tensor, biases: Tensor | None = None
) -> Tensor:
    """Placeholder for the product of each row with the matrix of its expert.

    Only traced on fake tensors: its values are uninitialized.

    Args:
        rows: `[rows, inner]`.
        ids: expert of each row, `[rows]`.
        matrices: `[experts, inner, columns]`.
        biases: added to the products, `[experts, columns]`.

    Returns:
        `[rows, columns]`.
    """
    return rows.new_empty(rows.shape[0], matrices.shape[2])


def fold_routed_products(restored: Mapping[fx.Node, fx.Node], products: Sequence[fx.Node]) -> bool:
    """Replace routed products by calls of `custom_ops.experts`.

    Args:
        restored: tensors of the traced graph, and equal tensors computed from routed products.
        products: the routed products, in the order of the graph.

    Returns:
        Whether all products can be replaced; otherwise the graph is unchanged.
    """
    mixtures, unfolded = [], list(products)
    for down in products:
        # An up projection does not match: its rows are no elementwise function of another product.
        gate = _TracedGate()
        if down in unfolded and gate.trace(down.args[0]) and gate.ids == {down.args[1]}:
            mixtures.append((down, gate))
            unfolded = [each for each in unfolded if each not in (down, *gate.ups)]
    if unfolded or not mixtures:
        return False
    # `_find_weighted_sum` needs the only reader of each tensor, so sorted rows must be gone.
    for old, new in restored.items():
        old.replace_all_uses_with(new)
    remove_dead(products[0].graph)
    for down, gate in mixtures:
        _fold_mixture(down, gate)
    return True


@dataclass
class _TracedGate:
    """Traced operators between the up projections and the down projection of experts.

    Args:
        ups: up projections.
        steps: the operators, in the form of `custom_ops.Steps`.
        references: reference of each traced node, such as `"%2"`.
        interleaved: whether the columns of gate and value of a joint projection alternate.
        is_joint: whether one projection computes gate and value.
    """

    ups: list[fx.Node] = field(default_factory=list)
    steps: list[tuple[str, tuple[Any, ...], tuple[tuple[str, Any], ...]]] = field(
        default_factory=list
    )
    references: dict[fx.Node, str] = field(default_factory=dict)
    interleaved: bool = False
    is_joint: bool = False

    @property
    def ids(self) -> set[Any]:
        return {up.args[1] for up in self.ups}

    @property
    def rows(self) -> fx.Node:
        rows = self.ups[0].args[0]
        assert isinstance(rows, fx.Node)
        return rows

    def trace(self, output: Any) -> bool:
        """Trace the operators that compute `output`; return whether all of them are supported."""
        reads = self._list_elementwise_nodes(output)
        # Two up projections are gate and value, as of SwiGLU.
        if reads is None or not self.ups or len(self.ups) > 2:
            return False
        # Gate and value may read equal rows that the model gathers twice.
        if not all(_computes_equal_value(up.args[0], self.rows) for up in self.ups) or (
            self.is_joint and len(self.ups) > 1
        ):
            return False
        if len({len(up.args) for up in self.ups}) > 1:
            # The operator has biases of all projections or of none.
            return False
        # The traversal order is arbitrary; the first in the graph is column 0.
        self.ups.sort(key=_get_graph_position)
        if not self.is_joint:
            for index, up in enumerate(self.ups):
                self._add_column(up, index, len(self.ups))
        # Steps refer to earlier results, and `reads` is a set.
        for node in sorted(reads, key=_get_graph_position):
            if (column := self._find_projection_column(node)) is not None:
                self._add_column(node, column, 2)
            else:
                self._add_step(node, str(node.target), node.args, node.kwargs)
        return True

    def _list_elementwise_nodes(self, output: Any) -> set[fx.Node] | None:
        """Return the nodes after the up projections up to and including `output`; None if a node is
        not elementwise or reads another tensor."""
        nodes: set[fx.Node] = set()
        pending = [output]
        while pending:
            node = pending.pop()
            if not is_tensor(node):
                return None
            if node.target is routed_product:
                if node not in self.ups:
                    self.ups.append(node)
            elif self._find_projection_column(node) is not None:
                nodes.add(node)
                up = _find_projection(node)
                assert up is not None
                self.is_joint = True
                if up not in self.ups:
                    self.ups.append(up)
            elif (
                torch.Tag.pointwise in getattr(node.target, "tags", ())
                # Casts have no pointwise tag.
                or node.target is aten.to.dtype
            ):
                if node not in nodes:
                    nodes.add(node)
                    pending += node.all_input_nodes
            else:
                return None
        return nodes

    def _find_projection_column(self, node: fx.Node) -> int | None:
        """Return 0 for a view of the gate columns of a joint projection, 1 for a view of its value
        columns, and None for other nodes."""
        up = _find_projection(node)
        if up is None or node is up:
            return None
        width = node_shape(up)[1]
        # Whatever views select the columns: run on the numbers of the columns, they say which.
        row = _apply_views_to_row(node, up, torch.arange(width).unsqueeze(0))
        if row is None or row.shape != (1, width // 2):
            return None
        columns = torch.arange(width)
        for interleaved, pair in (
            (False, columns.view(2, -1)),
            (True, columns.view(-1, 2).mT),
        ):
            for index in range(2):
                if torch.equal(row[0], pair[index]):
                    self.interleaved = interleaved
                    return index
        return None

    def _add_column(self, node: fx.Node, index: int, count: int) -> None:
        if count == 1:
            self.references[node] = "%0"
            return
        # A slice keeps the last dimension, which `custom_ops.experts` squeezes after the last step.
        self.steps.append((str(aten.slice.Tensor), ("%0", -1, index, index + 1), ()))
        self.references[node] = f"%{len(self.steps)}"

    def _add_step(self, node: fx.Node, name: str, args: Any, kwargs: Mapping[str, Any]) -> None:
        written = tuple(self.references.get(a, a) if isinstance(a, fx.Node) else a for a in args)
        self.steps.append((name, written, tuple(kwargs.items())))
        self.references[node] = f"%{len(self.steps)}"


def _computes_equal_value(node: Any, other: Any) -> bool:
    """Whether two arguments are equal values, or nodes that compute equal values."""
    if not isinstance(node, fx.Node) or not isinstance(other, fx.Node):
        return type(node) is type(other) and bool(node == other)
    if node is other:
        return True
    arguments, others = ((*each.args, *each.kwargs.items()) for each in (node, other))
    # Two equal calls of `dropout` draw different numbers.
    is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return (
        node.op == "call_function"
        and node.target is other.target
        and not is_random
        and len(arguments) == len(others)
        and all(map(_computes_equal_value, arguments, others))
    )


def _get_graph_position(node: fx.Node) -> int:
    return list(node.graph.nodes).index(node)


def _find_projection(node: fx.Node) -> fx.Node | None:
    """Return the routed product of which `node` is a view of columns; None for other nodes."""
    while node.target in _COLUMN_VIEWS and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node if node.target is routed_product else None


def _apply_views_to_row(node: fx.Node, up: fx.Node, row: Tensor) -> Tensor | None:
    """Apply the chain of views from the product `up` to `node` to one row, `[1, columns]`.

    Returns None if the views mix rows.
    """
    views = [node]
    while views[-1] is not up:
        views.append(views[-1].args[0])  # type: ignore[arg-type]
    value: Any = row
    rows = node_shape(up)[0]
    for view in reversed(views[:-1]):
        args: Any = view.args[1:]
        if view.target is aten.reshape.default:
            sizes = node_shape(view)
            # The reshape must not merge rows, as it is repeated for one.
            if not sizes or sizes[0] != rows:
                return None
            args = ([1, *sizes[1:]],)
        elif view.target is not operator.getitem and _selects_rows(view):
            return None
        target: Any = view.target
        value = target(value, *args, **view.kwargs)
    return value if isinstance(value, Tensor) else None


def _selects_rows(view: fx.Node) -> bool:
    """Whether a view selects along the dimension of the rows."""
    # `slice`, `unbind` and `select` have the dimension next, `split` and `chunk` after the sizes.
    position = 1 if view.target in (aten.slice.Tensor, aten.unbind.int, aten.select.int) else 2
    dim: Any = view.args[position] if len(view.args) > position else view.kwargs.get("dim", 0)
    source = view.args[0]
    assert isinstance(source, fx.Node)
    return bool(dim in (0, -len(node_shape(source))))


def _fold_mixture(down: fx.Node, gate: _TracedGate) -> None:
    """Insert `custom_ops.experts` for a down projection and, if possible, its weighted sum."""
    ids, matrices = down.args[1:3]
    assert isinstance(ids, fx.Node) and isinstance(matrices, fx.Node)
    tokens = _find_tokens(gate.rows)
    sum_of_experts = _find_weighted_sum(down) if tokens is not None else None
    if tokens is not None and sum_of_experts is not None:
        x = _insert_tokens(gate, tokens, sum_of_experts.last)
        top_k = node_shape(ids)[0] // node_shape(x)[0]
        last, weights = sum_of_experts.last, sum_of_experts.weights
        # The sum is over other blocks than a token's experts: leave it behind the operator.
        if top_k != sum_of_experts.top_k:
            last, weights, x, top_k = down, None, gate.rows, 1
    else:
        last, weights, x, top_k = down, None, gate.rows, 1
    sizes = (node_shape(x)[0], top_k)
    id_table = insert_reshape(ids, sizes, last)
    if weights is None:
        # Routing weights are applied outside of the operator, or not at all.
        scale = insert(last, aten.ones_like.default, (id_table,), {"dtype": tensor(x).dtype})
    else:
        scale = insert_reshape(weights, sizes, last)
    arguments = (
        *(x, id_table, scale, _insert_up_projections(gate, last)),
        *(insert_permute(matrices, (0, 2, 1), last), _insert_up_biases(gate, last)),
        *((down.args[3] if len(down.args) > 3 else None),),
        *(tuple(gate.steps), gate.interleaved),
    )
    new = insert(last, custom_ops.experts, arguments, like=down)
    if tensor(new).dtype != tensor(last).dtype:
        new = insert(last, aten.to.dtype, (new, tensor(last).dtype))
    replace(last, insert_reshape(new, node_shape(last), last))


def _insert_up_projections(gate: _TracedGate, before: fx.Node) -> fx.Node:
    """Insert the up projections as one tensor, `[experts, 1 or 2, inner, hidden]`."""
    # `[experts, hidden, columns]` to `[experts, columns, hidden]`.
    weights = [insert_permute(up.args[2], (0, 2, 1), before) for up in gate.ups]  # type: ignore[arg-type]
    if len(weights) > 1:
        return insert(before, aten.stack.default, (weights, 1))
    experts, columns, hidden = node_shape(weights[0])
    if not gate.is_joint:
        return insert(before, aten.unsqueeze.default, (weights[0], 1))
    pair = (columns // 2, 2) if gate.interleaved else (2, columns // 2)
    return insert_reshape(weights[0], (experts, *pair, hidden), before)


def _insert_up_biases(gate: _TracedGate, before: fx.Node) -> fx.Node | None:
    """Insert the biases of the up projections as one tensor, `[experts, 1 or 2, inner]`."""
    if len(gate.ups[0].args) < 4:
        return None
    biases: list[Any] = [up.args[3] for up in gate.ups]
    if len(biases) > 1:
        return insert(before, aten.stack.default, (biases, 1))
    experts, columns = node_shape(biases[0])
    if not gate.is_joint:
        return insert(before, aten.unsqueeze.default, (biases[0], 1))
    pair = (columns // 2, 2) if gate.interleaved else (2, columns // 2)
    return insert_reshape(biases[0], (experts, *pair), before)


def _find_tokens(rows: fx.Node) -> fx.Node | None:
    """Return the tokens `[tokens, hidden]` that `rows` repeats for each expert of a token.

    Returns None if `rows` has another form.
    """
    while rows.target is aten.to.dtype:
        rows = rows.args[0]  # type: ignore[assignment]
    if rows.target is aten.reshape.default:
        expanded: Any = rows.args[0]
        # The form in which `sorted_rows.py` repeats each token for its experts.
        single: Any = expanded.args[0] if expanded.target is aten.expand.default else None
        if isinstance(single, fx.Node) and single.target is aten.unsqueeze.default:
            source = single.args[0]
            if single.args[1] == 1 and is_tensor(source) and len(node_shape(source)) == 2:
                return source
        return None
    return rows


def _insert_tokens(gate: _TracedGate, tokens: fx.Node, last: fx.Node) -> fx.Node:
    """Insert the tokens with the dtype in which `custom_ops.experts` shall sum experts' results.

    The operator casts the tokens to the dtype of the up projection.
    """
    matrices, dtype = gate.ups[0].args[2], tensor(gate.rows).dtype
    assert isinstance(matrices, fx.Node)
    if dtype == tensor(matrices).dtype and tensor(tokens).dtype == tensor(last).dtype:
        return tokens
    return tokens if dtype == tensor(tokens).dtype else insert(last, aten.to.dtype, (tokens, dtype))


@dataclass
class _WeightedSum:
    """Sum over the experts of each token, weighted by routing weights.

    Args:
        last: the sum, `[tokens, hidden]` or `[tokens, 1, hidden]`.
        top_k: experts per token.
        weights: routing weights, one for each (token, expert) row; None if all are 1.
    """

    last: fx.Node
    top_k: int
    weights: fx.Node | None


def _find_weighted_sum(down: fx.Node) -> _WeightedSum | None:
    """Return the weighted sum that alone reads a down projection, or None."""
    rows, hidden = node_shape(down)
    node, weights = down, None
    # Another reader would need the rows before they are weighted and added up.
    while len(node.users) == 1:
        (user,) = node.users
        sizes = node_shape(node)
        others = [each for each in user.all_input_nodes if each is not node]
        if user.target is aten.sum.dim_IntList and len(sizes) == 3:
            # Over the experts of each token, `[tokens, top_k, hidden]`.
            is_sum = list(user.args[1]) in ([1], [-2]) and len(node_shape(user)) == 2  # type: ignore[arg-type]
            return _WeightedSum(user, sizes[1], weights) if is_sum else None
        if user.target is aten.matmul.default and user.args[1] is node and weights is None:
            return _match_weighted_product(user)
        if user.target is aten.mul.Tensor and weights is None and len(others) == 1:
            weights = others[0]
            if node_shape(weights) != (*sizes[:-1], 1):
                return None
        elif user.target is aten.reshape.default:
            blocks = node_shape(user)
            if len(blocks) != 3 or blocks[2] != hidden or blocks[0] * blocks[1] != rows:
                return None
        elif user.target is not aten.to.dtype:
            break
        node = user
    # One expert for each token, without a sum.
    single = len(node_shape(node)) == 2 and weights is not None
    return _WeightedSum(node, 1, weights) if single else None


def _match_weighted_product(product: fx.Node) -> _WeightedSum | None:
    """Match a weighted sum, `[tokens, 1, top_k] @ [tokens, top_k, hidden]`; None for others."""
    weights = product.args[0]
    if not is_tensor(weights) or len(node_shape(weights)) != 3 or node_shape(weights)[1] != 1:
        return None
    return _WeightedSum(product, node_shape(weights)[2], weights)
