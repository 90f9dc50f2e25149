"""The loss of connectionist temporal classification, captured with static shapes."""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch.nn import functional

from shardwright.core.capture.fx_nodes import insert, is_tensor, node_shape
from shardwright.core.graph.ctc import CTC_LOSSES, ctc_losses

aten = torch.ops.aten


def static_ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """`torch.nn.functional.ctc_loss`, by an operator whose shapes do not depend on lengths."""
    lengths = input_lengths, target_lengths
    if log_probs.ndim != 3 or not all(isinstance(each, Tensor) for each in lengths):
        return functional.ctc_loss(log_probs, targets, *lengths, blank, reduction, zero_infinity)
    losses: Tensor = ctc_losses(log_probs, targets, *lengths, blank, zero_infinity)
    if reduction == "mean":
        return (losses / target_lengths.clamp(min=1)).mean()
    return losses.sum() if reduction == "sum" else losses


def keep_rows_of_targets(graph: fx.Graph) -> None:
    """Targets that are selected by a mask, with as many of each row as are counted as its length,
    stay in rows: the selected ones come first."""
    for node in list(graph.nodes):
        if node.target is not CTC_LOSSES:
            continue
        _, selected, _, lengths, *_ = node.args
        if not is_tensor(selected) or not is_tensor(lengths):
            continue
        if selected.target is not aten.masked_select.default:
            continue
        labels, mask = selected.all_input_nodes
        counts = lengths.target is aten.sum.dim_IntList and lengths.args[0] is mask
        if len(node_shape(labels)) != 2 or node_shape(labels) != node_shape(mask) or not counts:
            continue
        order = insert(node, aten.argsort.stable, (mask,), {"stable": True, "descending": True})
        node.update_arg(1, insert(node, aten.gather.default, (labels, 1, order)))
        _erase(selected)


def _erase(node: fx.Node) -> None:
    """A node, and what depends on it."""
    for user in list(node.users):
        _erase(user)
    node.graph.erase_node(node)
