"""Rewrites of matrix products, convolutions, losses, norms and embeddings to canonical operators.

`canonicalize` applies them with the rewrites of views, casts and creations.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from shardwright.core.capture.canonicalize import insert_permute, insert_reshape, rewrites
from shardwright.core.capture.fx_nodes import insert, node_arguments, node_shape, replace, tensor
from shardwright.core.graph import custom_ops

aten = torch.ops.aten


@rewrites(aten.mm.default, aten.bmm.default)
def _rewrite_matmul(node: fx.Node) -> fx.Node:
    return insert(node, aten.matmul.default, node.args)


@rewrites(aten.linear.default)
def _separate_linear_bias(node: fx.Node) -> fx.Node | None:
    x, weight, *bias = node.args
    # With its bias apart, the product may be a partial sum, to which the bias is added once.
    if not bias or bias[0] is None:
        return None
    return _add_bias(insert(node, aten.linear.default, (x, weight)), bias[0], node)


@rewrites(aten.addmm.default)
def _rewrite_addmm(node: fx.Node) -> fx.Node:
    arguments = node_arguments(node)
    product = insert(node, aten.matmul.default, (arguments["mat1"], arguments["mat2"]))
    if arguments["alpha"] != 1:
        product = insert(node, aten.mul.Scalar, (product, arguments["alpha"]))
    bias = arguments["self"]
    if arguments["beta"] != 1:
        bias = insert(node, aten.mul.Scalar, (bias, arguments["beta"]))
    return _add_bias(product, bias, node)


@rewrites(
    aten.conv1d.default,
    aten.conv2d.default,
    aten.conv3d.default,
    aten.conv1d.padding,
    aten.conv2d.padding,
    aten.conv3d.padding,
    aten.conv_transpose1d.default,
    aten.conv_transpose2d.input,
    aten.conv_transpose3d.input,
)
def _separate_convolution_bias(node: fx.Node) -> fx.Node | None:
    x, weight, *options = node.args
    if not options or options[0] is None:
        return None
    product = insert(node, node.target, (x, weight, None, *options[1:]), dict(node.kwargs))  # type: ignore[arg-type]
    # The weight has two dimensions of channels, one of outputs and one of inputs.
    spatial = len(node_shape(weight)) - 2  # type: ignore[arg-type]
    sizes = node_shape(options[0]) + (1,) * spatial  # type: ignore[arg-type]
    return _add_bias(product, insert_reshape(options[0], sizes, node), node)  # type: ignore[arg-type]


def _add_bias(product: fx.Node, bias: Any, node: fx.Node) -> fx.Node:
    """Insert `product + bias` before `node`, and mark the sum as the bias addition of `product`."""
    new = insert(node, aten.add.Tensor, (product, bias))
    # For `name_operators`, and for lowering, which merges the bias into a linear layer again.
    new.meta["bias_of"] = product
    return new


@rewrites(aten.cross_entropy_loss.default)
def _rewrite_cross_entropy(node: fx.Node) -> fx.Node:
    arguments = node_arguments(node)
    logits, target = arguments["self"], arguments["target"]
    rank = len(node_shape(logits))
    # PyTorch's classes are dimension 1, those of the operator the last; for rank 2 both agree.
    class_last = (0, *range(2, rank), 1) if rank > 2 else tuple(range(rank))
    # Class probabilities have the shape of the logits; class indices lack the dimension.
    if tensor(target).is_floating_point():
        target = insert_permute(target, class_last, node)
    options = (
        arguments["weight"],
        arguments["reduction"],
        arguments["ignore_index"],
        arguments["label_smoothing"],
    )
    args = (insert_permute(logits, class_last, node), target, *options)
    return insert(node, custom_ops.cross_entropy, args)


@rewrites(aten.batch_norm.default)
def _rewrite_batch_norm(node: fx.Node) -> fx.Node | None:
    arguments = node_arguments(node)
    # `functionalize` has replaced training with running statistics, which updates them.
    if not arguments["training"] or arguments["running_mean"] is not None:
        return None
    args = (arguments["input"], arguments["weight"], arguments["bias"], None, None)
    return insert(
        node, custom_ops.batch_norm_train, (*args, arguments["momentum"], arguments["eps"])
    )


@rewrites(aten.embedding_bag.default, aten.embedding_bag.padding_idx)
def _rewrite_embedding_bag(node: fx.Node) -> None:
    """Replace `embedding_bag` by an operator without the results saved for its backward pass."""
    arguments = node_arguments(node)
    users = [user for user in node.users if user.users]
    # Results 1 to 3 of `embedding_bag` are saved for its backward pass.
    if any(user.args[1] != 0 for user in users) or arguments["sparse"]:
        return
    indices, offsets = arguments["indices"], arguments["offsets"]
    weights, count = arguments["per_sample_weights"], node_shape(indices)[0]
    bags = node_shape(offsets)[0]
    # `F.embedding_bag` flattens indices [bags, size] to offsets 0, size, 2 size, …; undone, bags
    # can be sharded. The last bag of other steps is smaller, and a last offset is no bag.
    if (
        offsets.target is aten.arange.start_step
        and offsets.args[:2] == (0, count)
        and node_arguments(offsets)["step"] * bags == count
        and not arguments["include_last_offset"]
    ):
        offsets, size = None, (bags, count // bags)
        indices = insert_reshape(indices, size, node)
        weights = weights and insert_reshape(weights, size, node)
    options = ("mode", "padding_idx", "include_last_offset", "scale_grad_by_freq")
    args = (arguments["weight"], indices, offsets, weights)
    new = insert(
        node, custom_ops.embedding_bag, (*args, *(arguments.get(name) for name in options))
    )
    for user in users:
        replace(user, new)
