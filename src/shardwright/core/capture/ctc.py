"""Connectionist temporal classification (CTC) loss, captured with static shapes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx
from torch.nn import functional

from shardwright.core.capture.fx_nodes import insert, is_tensor, node_shape, tensor
from shardwright.core.capture.padded_reads import READS
from shardwright.core.graph.ctc import CTC_LOSSES, ctc_losses

aten = torch.ops.aten


def static_ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor | Sequence[int],
    target_lengths: Tensor | Sequence[int],
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Tensor:
    """Compute `torch.nn.functional.ctc_loss` by an operator with shapes independent of the lengths.

    Arguments and result are the same as for `ctc_loss`.
    """
    lengths = (
        _to_length_tensor(input_lengths, targets),
        _to_length_tensor(target_lengths, targets),
    )
    # `[time, classes]` of one sample has no batch that could be sharded.
    if log_probs.ndim != 3:
        return functional.ctc_loss(log_probs, targets, *lengths, blank, reduction, zero_infinity)
    losses: Tensor = ctc_losses(log_probs, targets, *lengths, blank, zero_infinity)
    if reduction == "mean":
        # PyTorch's mean: each loss is divided by the length of its target, which may be 0.
        return (losses / lengths[1].clamp(min=1)).mean()
    return losses.sum() if reduction == "sum" else losses


def _to_length_tensor(lengths: Tensor | Sequence[int], targets: Tensor) -> Tensor:
    if isinstance(lengths, Tensor):
        return lengths
    return torch.tensor(lengths, dtype=torch.long, device=targets.device)


def keep_rows_of_targets(graph: fx.Graph) -> None:
    """Replace packed CTC targets, `labels[mask]`, by padded targets of shape [samples, labels].

    The replacement requires that the target lengths are the row sums of the mask. The selected
    labels of each sample move to the front of its row.
    """
    for node in list(graph.nodes):
        if node.target is not CTC_LOSSES:
            continue
        _, selected, _, lengths, *_ = node.args
        if not is_tensor(selected) or not is_tensor(lengths):
            continue
        if selected.target not in READS or len(selected.all_input_nodes) != 2:
            continue
        labels, mask = selected.all_input_nodes
        if tensor(mask).dtype is not torch.bool:
            continue
        counts = lengths.target is aten.sum.dim_IntList and lengths.args[0] is mask
        if len(node_shape(labels)) != 2 or node_shape(labels) != node_shape(mask) or not counts:
            continue
        # Stable, so that the labels of a sample keep their order.
        order = insert(node, aten.argsort.stable, (mask,), {"stable": True, "descending": True})
        node.update_arg(1, insert(node, aten.gather.default, (labels, 1, order)))
        _erase_with_users(selected)


def _erase_with_users(node: fx.Node) -> None:
    """Erase a node and all nodes that depend on it."""
    for user in list(node.users):
        _erase_with_users(user)
    node.graph.erase_node(node)
