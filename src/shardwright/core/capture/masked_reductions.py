"""Replace reductions over the rows that a mask selects by reductions over all rows."""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

from shardwright.core.capture.fx_nodes import (
    evaluate,
    insert,
    node_arguments,
    node_shape,
    remove_dead,
    replace,
    tensor,
)
from shardwright.core.capture.naming import line_of
from shardwright.core.capture.padded_reads import restore_rows, select_rows
from shardwright.core.capture.selected_rows import SelectedRows, refusal
from shardwright.core.graph import custom_ops
from shardwright.core.rules.notation import schema_parameters
from shardwright.core.torch_internals.operators import OpOverload, operator_name
from shardwright.errors import CaptureError

aten = torch.ops.aten

_NEUTRAL: dict[str, float | bool] = {
    "sum": 0,
    "nansum": 0,
    "count_nonzero": 0,
    "prod": 1,
    "logsumexp": -math.inf,
    "any": False,
    "all": True,
}
"""Value of rows that are not selected, by name of the reduction."""

_NORMS = frozenset({"norm", "linalg_vector_norm"})
_LARGEST = frozenset({"max", "amax"})
_SMALLEST = frozenset({"min", "amin"})
_MOMENTS = frozenset({"mean", "var", "std"})
_SOFTMAXES = frozenset({"softmax", "log_softmax"})

_SUMS_OVER_ROWS = frozenset(
    {"matmul", "linear", "dot", "mv", "index_add", "scatter_add", "index_put", "scatter_reduce"}
)
"""Names of operators whose result a row of zeros does not change."""

_NLL = frozenset({"nll_loss", "nll_loss_nd", "nll_loss2d"})
_LOSSES = frozenset(
    {
        *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "binary_cross_entropy"),
        *("binary_cross_entropy_with_logits", "soft_margin_loss", "poisson_nll_loss"),
        *("hinge_embedding_loss", "margin_ranking_loss"),
        *("multi_margin_loss", "multilabel_margin_loss"),
    }
)
"""Names of losses whose mean is the mean of the unreduced loss."""


def keep_selected_rows(graph: fx.Graph) -> None:
    """Make operators on all rows compute the results of the selected rows, in place.

    Args:
        graph: a canonical graph without unused operators.

    Raises:
        CaptureError: if an operator needs the selected rows without the others.
    """
    if not any(node.target is select_rows for node in graph.nodes):
        return
    # An unused operator must not lead to a refusal.
    remove_dead(graph)
    selected = SelectedRows(graph)
    for node in list(graph.nodes):
        inputs = node.all_input_nodes
        if node.op == "output":
            for each in inputs:
                if each in selected.rows or each in selected.items:
                    raise CaptureError(
                        f"{line_of(each)}: the shape of the result depends on the values of a "
                        "tensor, which are unknown during capture\nuse `torch.where`, or multiply "
                        "by the mask; both keep the shape."
                    )
            continue
        reads_rows = any(each in selected.rows or each in selected.items for each in inputs)
        # Reductions first: `run` handles operators that compute each row by itself, and refuses
        # others.
        if (node.target is select_rows or reads_rows) and not _rewrite_reduction(selected, node):
            selected.run(node)
    for node in [node for node in graph.nodes if node.target in (select_rows, restore_rows)]:
        replace(node, node.args[0])


def _rewrite_reduction(selected: SelectedRows, node: fx.Node) -> bool:
    """Rewrite a reduction over selected rows as one over all rows; return False for other
    operators."""
    name = getattr(node.target, "__name__", "")
    if isinstance(node.target, OpOverload):
        name = operator_name(node.target)
    if node.target is custom_ops.cross_entropy or name in _NLL or name in _LOSSES:
        return _rewrite_loss(selected, node, name)
    if name in _NEUTRAL.keys() | _NORMS | _MOMENTS | _LARGEST | _SMALLEST:
        return _rewrite_row_reduction(selected, node, name)
    if name in _SOFTMAXES:
        return _mask_softmax(selected, node)
    return name in _SUMS_OVER_ROWS and _zero_unselected_rows(selected, node)


def _rewrite_row_reduction(selected: SelectedRows, node: fx.Node, name: str) -> bool:
    arguments = node_arguments(node)
    if "other" in arguments:
        # `torch.max(x, y)` compares element by element.
        return False
    x = arguments["self"]
    dims = _list_reduced_dims(arguments, len(node_shape(x)))
    # Over other dimensions, each row is reduced by itself.
    if selected.rows[x].dim not in dims:
        return False
    if name in _MOMENTS:
        moment = (
            _insert_mean
            if name == "mean"
            else _insert_variance
            if name == "var"
            else _insert_standard_deviation
        )
        replace(node, moment(selected, x, dims, bool(arguments.get("keepdim")), node))
        return True
    if name in _NORMS:
        order = arguments.get("p", arguments.get("ord"))
        # Only roots of sums of powers, to which a row of zeros adds nothing.
        if order is not None and not 0 < order < math.inf:
            raise refusal(node)
    if name in _LARGEST | _SMALLEST:
        if any(user.args[1] == 1 for user in node.users if user.target is operator.getitem):
            # Indices among all rows are not those among the selected rows.
            raise refusal(node)
        fill = (
            _get_lowest_value(tensor(x).dtype)
            if name in _LARGEST
            else _get_highest_value(tensor(x).dtype)
        )
    else:
        fill = _NEUTRAL.get(name, 0)
    node.replace_input_with(x, selected.overwrite(x, selected.rows[x], fill, node))
    return True


def _get_lowest_value(dtype: torch.dtype) -> float:
    if dtype.is_floating_point:
        return -math.inf
    return 0 if dtype == torch.bool else torch.iinfo(dtype).min


def _get_highest_value(dtype: torch.dtype) -> float:
    if dtype.is_floating_point:
        return math.inf
    return 1 if dtype == torch.bool else torch.iinfo(dtype).max


def _mask_softmax(selected: SelectedRows, node: fx.Node) -> bool:
    """Exclude unselected rows from a softmax over rows; return False for a softmax within rows."""
    arguments = node_arguments(node)
    x = arguments["self"]
    rows = selected.rows[x]
    if arguments["dim"] % len(node_shape(x)) != rows.dim or not tensor(x).is_floating_point():
        return False
    node.replace_input_with(x, selected.overwrite(x, rows, -math.inf, node))
    users = set(node.users)
    # If no row is selected, the softmax is NaN, which must not reach gradients of later operators.
    safe = selected.make_safe(node, rows, "", node.next)
    node.replace_all_uses_with(safe, delete_user_cb=lambda user: user in users)
    return True


def _list_reduced_dims(arguments: dict[str, Any], rank: int) -> tuple[int, ...]:
    dims = arguments.get("dim")
    # PyTorch reduces all dimensions for None and for an empty list.
    if dims is None or dims == []:
        return tuple(range(rank))
    dims = [dims] if isinstance(dims, int) else dims
    return tuple(dim % rank for dim in dims)


def _insert_mean(
    selected: SelectedRows, x: fx.Node, dims: tuple[int, ...], keepdim: bool, node: fx.Node
) -> fx.Node:
    """Insert the mean of the selected rows: their sum divided by their number of elements."""
    wide = _get_sum_dtype(node)
    options = {} if wide == tensor(x).dtype else {"dtype": wide}
    zeros = selected.overwrite(x, selected.rows[x], 0, node)
    total = insert(node, aten.sum.dim_IntList, (zeros, list(dims), keepdim), options)
    mean = insert(node, aten.div.Tensor, (total, _insert_element_count(selected, x, dims, node)))
    return _cast_to_dtype_of(mean, node)


def _insert_variance(
    selected: SelectedRows, x: fx.Node, dims: tuple[int, ...], keepdim: bool, node: fx.Node
) -> fx.Node:
    """Insert the variance of the selected rows: sum((x - mean)²) / max(0, count - correction)."""
    return _cast_to_dtype_of(_insert_wide_variance(selected, x, dims, keepdim, node), node)


def _insert_standard_deviation(
    selected: SelectedRows, x: fx.Node, dims: tuple[int, ...], keepdim: bool, node: fx.Node
) -> fx.Node:
    """Insert the standard deviation of the selected rows."""
    variance = _insert_wide_variance(selected, x, dims, keepdim, node)
    # PyTorch's gradient of a standard deviation of 0 is 0, but that of a square root is not finite.
    is_zero = insert(node, aten.eq.Scalar, (variance, 0))
    root = insert(node, aten.sqrt.default, (_insert_masked_fill(variance, is_zero, 1, node),))
    return _cast_to_dtype_of(_insert_masked_fill(root, is_zero, 0, node), node)


def _insert_wide_variance(
    selected: SelectedRows, x: fx.Node, dims: tuple[int, ...], keepdim: bool, node: fx.Node
) -> fx.Node:
    """Insert the variance of the selected rows, in the dtype of `_get_sum_dtype`."""
    rows, arguments, wide = selected.rows[x], node_arguments(node), _get_sum_dtype(node)
    correction = arguments.get("correction")
    if correction is None:
        # The older overloads have `unbiased` for a correction of 1.
        correction = int(arguments.get("unbiased", True))
    zeros = selected.overwrite(x, rows, 0, node)
    if tensor(x).dtype != wide:
        zeros = insert(node, aten.to.dtype, (zeros, wide))
    count = _insert_element_count(selected, x, dims, node)
    total = insert(node, aten.sum.dim_IntList, (zeros, list(dims), True))
    mean = insert(node, aten.div.Tensor, (total, count))
    centered = insert(node, aten.sub.Tensor, (zeros, mean))
    # Rows of zeros have become -mean, and must not add to the squares.
    centered = selected.overwrite(centered, rows, 0, node)
    squares = insert(node, aten.mul.Tensor, (centered, centered))
    total = insert(node, aten.sum.dim_IntList, (squares, list(dims), keepdim))
    divisor = insert(node, aten.sub.Scalar, (count, correction))
    # As in PyTorch, max(0, n - correction): the variance of too few elements is not finite.
    divisor = insert(node, aten.clamp.default, (divisor, 0))
    return insert(node, aten.div.Tensor, (total, divisor))


def _insert_element_count(
    selected: SelectedRows, x: fx.Node, dims: tuple[int, ...], node: fx.Node
) -> fx.Node:
    """Insert the number of elements of the selected rows in the reduced dimensions."""
    rows = selected.rows[x]
    count = insert(node, aten.sum.default, (rows.mask,))
    # Each selected row has all elements of the other reduced dimensions.
    others = math.prod(node_shape(x)[dim] for dim in dims if dim != rows.dim) * rows.repeats
    return count if others == 1 else insert(node, aten.mul.Scalar, (count, others))


def _get_sum_dtype(node: fx.Node) -> torch.dtype:
    """Return the dtype in which PyTorch sums the elements of a mean: float32 for 16-bit floats."""
    dtype = tensor(node).dtype
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _insert_masked_fill(x: fx.Node, mask: fx.Node, value: float, before: fx.Node) -> fx.Node:
    return insert(before, aten.masked_fill.Scalar, (x, mask, value))


def _cast_to_dtype_of(x: fx.Node, node: fx.Node) -> fx.Node:
    """Convert `x` to the dtype of `node`."""
    dtype = tensor(node).dtype
    return x if tensor(x).dtype == dtype else insert(node, aten.to.dtype, (x, dtype))


def _rewrite_loss(selected: SelectedRows, node: fx.Node, name: str) -> bool:
    """Rewrite a loss over selected rows as one over all rows; return False if it is unreduced."""
    function: Any = node.target
    defaults = schema_parameters(function)
    names = list(defaults)
    arguments: dict[str, Any] = {
        **defaults,
        **dict(zip(names, node.args, strict=False)),
        **node.kwargs,
    }
    target, reduction = arguments["target"], arguments["reduction"]
    if name not in _LOSSES and not tensor(target).is_floating_point():
        # For its refusals: different masks, or rows that are not samples of the loss.
        selected.factor_of_rows(node)
        # Rows drop out of the loss by `ignore_index` in their targets, which count in no mean.
        if target not in selected.rows:
            raise refusal(node)
        rows = selected.rows[target]
        ignored = selected.overwrite(target, rows, arguments["ignore_index"], node)
        node.replace_input_with(target, ignored)
        # An unreduced loss computes each row by itself, and is left to `run`.
        return bool(reduction)
    if not reduction:
        return False
    unreduced = insert(node, function, node.args, dict(node.kwargs))
    position = names.index("reduction")
    if position < len(node.args):
        unreduced.update_arg(position, 0)
    else:
        unreduced.update_kwarg("reduction", 0)
    # The shape was that of the reduced loss.
    unreduced.meta["val"] = evaluate(function, unreduced.args, unreduced.kwargs)
    following = node.prev
    selected.run(unreduced)
    # `run` may have inserted a copy with constants in rows that are not selected.
    losses = node.prev if node.prev is not following else unreduced
    dims = tuple(range(len(node_shape(losses))))
    if reduction == custom_ops.MEAN:
        new = _insert_mean(selected, losses, dims, False, node)
    else:
        zeros = selected.overwrite(losses, selected.rows[losses], 0, node)
        new = insert(node, aten.sum.default, (zeros,))
    replace(node, new)
    return True


def _zero_unselected_rows(selected: SelectedRows, node: fx.Node) -> bool:
    """Set unselected rows to 0 in the inputs of an operator that sums over rows.

    An example is a matrix product whose inner dimension is the rows. Returns False if the result
    still has rows.
    """
    factor, rule, _ = selected.factor_of_rows(node)
    if any(factor in dims for dims in rule.outputs):
        return False
    # The rule names no such sum, so the rows are combined in another way.
    if factor not in rule.reduced:
        raise refusal(node)
    for each in [each for each in node.all_input_nodes if each in selected.rows]:
        zeros = selected.overwrite(each, selected.rows[each], 0, node)
        node.replace_input_with(each, zeros)
    return True
