"""Operators on all rows that compute what the model computes from the rows that a mask selects.

After `pad_selected_rows` a tensor of selected rows has all rows. Two facts hold for it:

- Rows that are selected have the model's values. Operators keep this true if their sharding rule
  has a factor for the rows in every tensor, so that no row depends on another. A sum over rows, or
  over elements of rows, reads 0 in the others (`masked_reductions.py`).
- Rows that are not selected have finite values and gradients of exactly 0, so that gradients of
  parameters do not depend on them. Operators such as `log`, which may have an infinite
  value or derivative, therefore read and return constants in these rows.

Anything else, such as a product of rows with rows, is refused.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from dataclasses import replace as replace_field
from math import prod
from typing import Any

import torch
from torch import fx

from shardwright.core.capture.build_graph import to_builtin_containers
from shardwright.core.capture.equal_nodes import EqualNodes
from shardwright.core.capture.fx_nodes import (
    insert,
    is_tensor,
    node_shape,
    replace,
    tensor,
)
from shardwright.core.capture.naming import line_of
from shardwright.core.capture.padded_reads import restore_rows, select_rows
from shardwright.core.graph.graph import Op, Value
from shardwright.core.graph.local_map import LocalCall
from shardwright.core.rules import rule_of
from shardwright.core.rules.rule import ShardingRule, depends_on_position
from shardwright.core.torch_internals.operators import OpOverload, operator_name
from shardwright.errors import CaptureError

aten = torch.ops.aten

_BOUNDED = frozenset(
    {
        *("add", "sub", "rsub", "mul", "neg", "abs", "to", "detach", "clone"),
        *("linear", "matmul", "mm", "bmm", "relu", "gelu", "silu", "tanh", "sigmoid", "elu"),
        *("leaky_relu", "softplus", "log_sigmoid", "softmax", "log_softmax", "layer_norm"),
        *("view", "reshape", "permute", "transpose", "expand", "squeeze", "unsqueeze", "t"),
        *("slice", "select", "split", "split_with_sizes", "chunk", "unbind", "cat", "stack"),
        *("sum", "mean", "dropout", "native_dropout", "sin", "cos", "clamp", "maximum", "minimum"),
        *("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not"),
        *("bitwise_and", "bitwise_or", "bitwise_not", "getitem", "mse_loss", "smooth_l1_loss"),
        *("l1_loss", "huber_loss", "binary_cross_entropy_with_logits"),
        *("cross_entropy", "nll_loss", "nll_loss_nd", "nll_loss2d"),
    }
)
"""Names of operators with finite values and derivatives for finite inputs, and without indices.

Not `where` and `masked_fill`, which may write infinities: a mask of each row's elements may be
False in all of a row that is not selected.
"""

_FACTORIZATIONS = ("cholesky", "inv", "solve", "eig", "lu_factor", "ldl")
"""Parts of names of operators that raise an error for singular matrices."""

_CONSTANTS = (aten.full.default, aten.zeros.default, aten.ones.default)

_DIVISIONS = frozenset({"div", "floor_divide", "remainder", "fmod"})

SAFE = 0.5
"""Value written to unselected rows; in the domain of most functions, such as `log` and `acos`."""


@dataclass(frozen=True)
class Rows:
    """Selection of rows of a tensor.

    Args:
        mask: whether each row is selected, `[rows]`.
        dim: the row dimension of the tensor.
        repeats: number of consecutive elements of each row in this dimension.
    """

    mask: fx.Node
    dim: int
    repeats: int = 1


def refusal(node: fx.Node) -> CaptureError:
    """Return the error for an operator that needs selected rows without the others."""
    name = operator_name(node.target) if isinstance(node.target, OpOverload) else node.name
    return CaptureError(
        f"{line_of(node)}: `{name}` combines rows that a mask selects, but which rows these are is "
        "unknown during capture\nkeep all rows, and use `torch.where`, or multiply by the mask"
    )


class SelectedRows:
    """Propagation of selected rows through the operators of a canonical graph.

    Args:
        graph: the graph; modified in place.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.rows: dict[fx.Node, Rows] = {}
        self.items: dict[fx.Node, tuple[Rows, ...]] = {}
        """The selected rows of each result, by operator with several results."""
        # All operators that overwrite the same rows share a mask.
        self._others: dict[tuple[Rows, int], fx.Node] = {}
        self._equal = EqualNodes(graph)

    # Values of rows that are not selected

    def overwrite(self, x: fx.Node, rows: Rows, fill: float, before: fx.Node) -> fx.Node:
        """Insert a copy of `x` with the value `fill` in rows that are not selected."""
        others = self._insert_unselected_mask(rows, len(node_shape(x)), before)
        new = insert(before, aten.masked_fill.Scalar, (x, others, fill))
        self.rows[new] = rows
        return new

    def _insert_unselected_mask(self, rows: Rows, rank: int, before: fx.Node) -> fx.Node:
        """Insert the mask of unselected rows, in a shape that broadcasts to `rank` dimensions."""
        if (rows, rank) in self._others:
            return self._others[rows, rank]
        mask, shape = rows.mask, [1] * rank
        shape[rows.dim] = node_shape(mask)[0] * rows.repeats
        if rows.repeats > 1:
            mask = insert(before, aten.reshape.default, (mask, [-1, 1]))
            mask = insert(before, aten.expand.default, (mask, [-1, rows.repeats]))
        if node_shape(mask) != tuple(shape):
            mask = insert(before, aten.reshape.default, (mask, shape))
        others = insert(before, aten.logical_not.default, (mask,))
        self._others[rows, rank] = others
        return others

    def make_safe(self, x: fx.Node, rows: Rows, name: str, before: fx.Node) -> fx.Node:
        """Insert a copy of `x`, an input of the operator `name`, that has a valid argument of the
        operator in unselected rows."""
        dtype, fill = tensor(x).dtype, SAFE
        if not (dtype.is_floating_point or dtype.is_complex):
            # Indices of 0 are valid everywhere, divisors are not.
            fill = int(name in _DIVISIONS)
        return self.overwrite(x, rows, fill, before)

    # Propagation

    def run(self, node: fx.Node) -> None:
        """Propagate selected rows from the inputs to the results of an operator.

        Unselected rows of inputs and results are overwritten if they could become infinite.

        Raises:
            CaptureError: if the operator needs the selected rows without the others.
        """
        if node.target is select_rows:
            self._follow_selection(node)
        elif node.target is restore_rows:
            self._check_write_mask(node)
        elif node.target is operator.getitem and node.args[0] in self.items:
            self.rows[node] = self.items[node.args[0]][node.args[1]]  # type: ignore[index]
        elif node.target is aten.reshape.default:
            self._follow_reshape(node)
        else:
            self.keep_rows(node)

    def _follow_selection(self, node: fx.Node) -> None:
        x, mask, dim, fill = node.args
        assert isinstance(x, fx.Node) and isinstance(mask, fx.Node) and isinstance(dim, int)
        earlier = self.rows.get(x)
        rows = Rows(mask, dim)
        if earlier is not None or mask in self.rows:
            # A selection from selected rows.
            of_mask = self.rows.get(mask)
            if earlier is None or of_mask is None or earlier.dim != dim:
                raise refusal(node)
            if not self.same_rows(earlier, of_mask) or earlier.repeats > 1:
                raise refusal(node)
            # The inner mask has arbitrary values in rows that the outer one does not select.
            rows = Rows(insert(node, aten.logical_and.default, (earlier.mask, mask)), dim)
        if fill:
            replace(node, self.make_safe(x, rows, "", node))
        else:
            self.rows[node] = rows

    def _check_write_mask(self, node: fx.Node) -> None:
        """Check that a write has the mask by which its rows were selected."""
        x, mask, dim = node.args
        assert isinstance(x, fx.Node) and isinstance(mask, fx.Node) and isinstance(dim, int)
        rows = Rows(mask, dim)
        # The mask of the write must itself have all rows.
        if mask in self.rows:
            raise refusal(node)
        if not self.same_rows(self.rows[x], rows):
            raise _make_different_masks_error(node)
        if self.rows[x].dim != dim:
            raise refusal(node)

    def _follow_reshape(self, node: fx.Node) -> None:
        """Propagate selected rows through a reshape that `pad_selected_rows` has checked."""
        source = node.args[0]
        assert isinstance(source, fx.Node)
        rows, before, after = self.rows[source], node_shape(source), node_shape(node)
        count, lead = before[rows.dim] // rows.repeats, prod(before[: rows.dim])
        for dim, size in enumerate(after):
            # Equally many elements precede the rows, whose own elements may join the dimension.
            if prod(after[:dim]) == lead and size % count == 0:
                self.rows[node] = Rows(rows.mask, dim, size // count)
                return
        raise refusal(node)

    def same_rows(self, rows: Rows, other: Rows) -> bool:
        """Whether equal masks select two sets of rows."""
        return self._equal.first(rows.mask) is self._equal.first(other.mask) and (
            rows.repeats == other.repeats
        )

    def keep_rows(self, node: fx.Node) -> None:
        """Propagate selected rows through an operator that computes each row independently."""
        factor, rule, op = self.factor_of_rows(node)
        first = self.first_rows(node)
        size = node_shape(first.mask)[0] * first.repeats
        dims = [dims.index(factor) if dims.count(factor) == 1 else None for dims in rule.outputs]
        # Each result has all rows, and no row depends on another row or on its own number. The code
        # of a local map may mix the rows of a shard.
        aligned = all(
            dim is not None and value.shape[dim] == size
            for dim, value in zip(dims, op.outputs, strict=True)
        )
        if (
            not aligned
            or rule.capacity[factor] != size
            or rule.reductions(op, {factor: 2})
            or isinstance(op.target, LocalCall)
            or depends_on_position(op, rule, factor)
        ):
            raise refusal(node)
        if any(word in op.short_name for word in _FACTORIZATIONS):
            raise CaptureError(
                f"{line_of(node)}: `{op.short_name}` would fail for a singular matrix in a row "
                "that the mask does not select, because capture computes all rows\n"
                "select the rows of its result instead"
            )
        results = [replace_field(first, dim=dim) for dim in dims if dim is not None]
        # Infinite values or derivatives become NaN where they meet the gradient 0 of such a row.
        bounded = op.short_name in _BOUNDED
        if not bounded:
            self._overwrite_unselected_inputs(node, op.short_name)
        if not is_tensor(node):
            self.items[node] = tuple(results)
            return
        self.rows[node] = results[0]
        # Other dtypes are finite and have no gradient.
        if not bounded and tensor(node).is_floating_point():
            self._overwrite_unselected_results(node)

    def _overwrite_unselected_inputs(self, node: fx.Node, name: str) -> None:
        def safe(each: fx.Node) -> fx.Node:
            rows = self.rows.get(each)
            return each if rows is None else self.make_safe(each, rows, name, node)

        node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), safe)

    def _overwrite_unselected_results(self, node: fx.Node) -> None:
        # Taken before the copy, which reads the node itself.
        users = set(node.users)
        safe = self.make_safe(node, self.rows[node], "", node.next)
        node.replace_all_uses_with(safe, delete_user_cb=lambda user: user in users)

    def first_rows(self, node: fx.Node) -> Rows:
        """Return the selected rows of the first input that has any."""
        return next(self.rows[each] for each in node.all_input_nodes if each in self.rows)

    def factor_of_rows(self, node: fx.Node) -> tuple[str, ShardingRule, Op]:
        """Return (sharding factor of the rows, sharding rule, operator) of a node.

        Raises:
            CaptureError: if inputs have different selected rows, or the operator has no sharding
                rule.
        """
        op = operator_of(node)
        rule, first = rule_of(op), self.first_rows(node)
        inputs = self._list_input_tensors(node)
        if rule is None:
            raise refusal(node)
        pairs = list(zip(inputs, rule.inputs, strict=True))
        factors = {dims[self.rows[each].dim] for each, dims in pairs if each in self.rows}
        (factor,) = factors if len(factors) == 1 else (None,)
        for each, dims in pairs:
            rows = self.rows.get(each)
            if rows is None:
                # A tensor with all rows is not aligned with selected ones.
                aligned = factor in dims and _is_equal_along(each, dims.index(factor))
                if factor in rule.factors_of(dims) and not aligned:
                    raise refusal(node)
            elif not self.same_rows(rows, first):
                raise _make_different_masks_error(node)
            elif dims.count(factor) != 1:
                raise refusal(node)
        if factor is None:
            raise refusal(node)
        return factor, rule, op

    def _list_input_tensors(self, node: fx.Node) -> list[fx.Node]:
        """Return the tensor arguments of a node, in the order of `Op.inputs`."""
        input_nodes: list[fx.Node] = []
        fx.map_arg((node.args, node.kwargs), lambda each: input_nodes.append(each) or each)  # type: ignore[func-returns-value]
        return [each for each in input_nodes if is_tensor(each)]


def operator_of(node: fx.Node) -> Op:
    """Convert a node to an `Op` of the captured graph, for which sharding rules are defined."""

    def value(name: str, x: torch.Tensor) -> Value:
        return Value(name, tuple(x.shape), x.dtype)

    def argument(each: fx.Node) -> Any:
        return value(each.name, tensor(each)) if is_tensor(each) else each

    args, kwargs = fx.map_arg((node.args, node.kwargs), argument)
    args, kwargs = to_builtin_containers(args), to_builtin_containers(kwargs)
    results = [node.meta["val"]] if is_tensor(node) else node.meta["val"]
    outputs = tuple(value(node.name, each) for each in results if isinstance(each, torch.Tensor))
    target: Any = node.target
    return Op(node.name, target, args, kwargs, outputs)


def _is_equal_along(node: fx.Node, dim: int) -> bool:
    """Whether a tensor is a constant fill, or expanded, along a dimension."""
    if node.target in _CONSTANTS:
        return True
    source = node.args[0] if node.target is aten.expand.default else None
    if not isinstance(source, fx.Node):
        return False
    sizes = node_shape(source)
    # `expand` aligns dimensions at the end.
    dim -= len(node_shape(node)) - len(sizes)
    return dim < 0 or sizes[dim] == 1


def _make_different_masks_error(node: fx.Node) -> CaptureError:
    return CaptureError(
        f"{line_of(node)}: this combines rows that different masks select\n"
        "select by one mask, or keep all rows and use `torch.where`"
    )
