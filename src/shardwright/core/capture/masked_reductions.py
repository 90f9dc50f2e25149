"""Reductions over rows that a mask selects, as reductions over all rows."""

from __future__ import annotations

import math
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
from shardwright.core.capture.padded_rows import restore_rows, select_rows
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

_SUMS_OVER_ROWS = frozenset(
    {"matmul", "linear", "dot", "mv", "index_add", "scatter_add", "index_put", "scatter_reduce"}
)
"""Names of operators to which a row of zeros adds nothing."""

_NLL = frozenset({"nll_loss", "nll_loss_nd", "nll_loss2d"})
_LOSSES = frozenset(
    {
        *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "binary_cross_entropy"),
        *("binary_cross_entropy_with_logits", "soft_margin_loss", "poisson_nll_loss"),
        *("hinge_embedding_loss", "margin_ranking_loss", "cosine_embedding_loss"),
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
        if (node.target is select_rows or reads_rows) and not _reduce(selected, node):
            selected.run(node)
    for node in [node for node in graph.nodes if node.target in (select_rows, restore_rows)]:
        replace(node, node.args[0])


def _reduce(selected: SelectedRows, node: fx.Node) -> bool:
    """Replace an operator that reduces selected rows; return False for other operators."""
    name = getattr(node.target, "__name__", "")
    if isinstance(node.target, OpOverload):
        name = operator_name(node.target)
    if node.target is custom_ops.cross_entropy or name in _NLL or name in _LOSSES:
        return _reduce_loss(selected, node, name)
    if name in _NEUTRAL or name in _NORMS or name == "mean":
        return _reduce_rows(selected, node, name)
    return name in _SUMS_OVER_ROWS and _sum_over_rows(selected, node)


def _reduce_rows(selected: SelectedRows, node: fx.Node, name: str) -> bool:
    arguments = node_arguments(node)
    x = arguments["self"]
    dims = _reduced_dims(arguments, len(node_shape(x)))
    if selected.rows[x].dim not in dims:
        return False
    if name == "mean":
        replace(node, _mean(selected, x, dims, bool(arguments.get("keepdim")), node))
        return True
    if name in _NORMS:
        order = arguments.get("p", arguments.get("ord"))
        if order is not None and not 0 < order < math.inf:
            raise refusal(node)
    neutral = selected.overwrite(x, selected.rows[x], _NEUTRAL.get(name, 0), node)
    node.replace_input_with(x, neutral)
    return True


def _reduced_dims(arguments: dict[str, Any], rank: int) -> tuple[int, ...]:
    dims = arguments.get("dim")
    if dims is None or dims == []:
        return tuple(range(rank))
    dims = [dims] if isinstance(dims, int) else dims
    return tuple(dim % rank for dim in dims)


def _mean(
    selected: SelectedRows, x: fx.Node, dims: tuple[int, ...], keepdim: bool, node: fx.Node
) -> fx.Node:
    """Insert the mean of the selected rows: their sum divided by their number of elements."""
    dtype, rows = tensor(node).dtype, selected.rows[x]
    # As in `mean`, sums of numbers of 16 bits have 32 bits.
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    options = {} if wide == tensor(x).dtype else {"dtype": wide}
    zeros = selected.overwrite(x, rows, 0, node)
    total = insert(node, aten.sum.dim_IntList, (zeros, list(dims), keepdim), options)
    count = insert(node, aten.sum.default, (rows.mask,))
    others = math.prod(node_shape(x)[dim] for dim in dims if dim != rows.dim) * rows.repeats
    if others != 1:
        count = insert(node, aten.mul.Scalar, (count, others))
    mean = insert(node, aten.div.Tensor, (total, count))
    return mean if wide == dtype else insert(node, aten.to.dtype, (mean, dtype))


def _reduce_loss(selected: SelectedRows, node: fx.Node, name: str) -> bool:
    """Replace a loss of selected rows; return False for an unreduced loss, one for each row."""
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
        selected.factor_of_rows(node)
        if target not in selected.rows:
            raise refusal(node)
        rows = selected.rows[target]
        ignored = selected.overwrite(target, rows, arguments["ignore_index"], node)
        node.replace_input_with(target, ignored)
        return bool(reduction)
    if not reduction:
        return False
    unreduced = insert(node, function, node.args, dict(node.kwargs))
    position = names.index("reduction")
    if position < len(node.args):
        unreduced.update_arg(position, 0)
    else:
        unreduced.update_kwarg("reduction", 0)
    unreduced.meta["val"] = evaluate(function, unreduced.args, unreduced.kwargs)
    following = node.prev
    selected.run(unreduced)
    losses = node.prev if node.prev is not following else unreduced
    dims = tuple(range(len(node_shape(losses))))
    if reduction == custom_ops.MEAN:
        new = _mean(selected, losses, dims, False, node)
    else:
        zeros = selected.overwrite(losses, selected.rows[losses], 0, node)
        new = insert(node, aten.sum.default, (zeros,))
    replace(node, new)
    return True


def _sum_over_rows(selected: SelectedRows, node: fx.Node) -> bool:
    """Set rows that are not selected to 0 in an operator that adds rows, as a matrix product of
    which they are the inner dimension; return False if the result has the rows."""
    factor, rule, _ = selected.factor_of_rows(node)
    if any(factor in dims for dims in rule.outputs):
        return False
    if factor not in rule.reduced:
        raise refusal(node)
    for each in [each for each in node.all_input_nodes if each in selected.rows]:
        zeros = selected.overwrite(each, selected.rows[each], 0, node)
        node.replace_input_with(each, zeros)
    return True
