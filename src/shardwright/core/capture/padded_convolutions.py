"""Capture of a convolution and the padding of its image as one operator.

The rows of a padded image are seldom divisible by a number of devices, those of the image often
are: of 64 rows and one row of padding, 65 cannot be sharded, 64 can.
"""

from __future__ import annotations

import torch
from torch import fx

from shardwright.core.capture.annotations import SoleOperator, tags_of
from shardwright.core.capture.fx_nodes import insert, node_arguments, node_shape, replace
from shardwright.core.graph.custom_ops import padded_convolution

aten = torch.ops.aten

_ROW_PADDINGS = {
    getattr(aten, f"{name}_pad{n}d").default: mode
    for name, mode in (("reflection", "reflect"), ("replication", "replicate"))
    for n in (1, 2, 3)
}
_PADDINGS = (aten.pad.default, aten.constant_pad_nd.default)
_CONVOLUTIONS = (aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)


def pad_in_convolutions(graph: fx.Graph) -> None:
    """Replace convolutions of images that only they read padded, in place.

    Runs on a canonical graph, whose convolutions have no bias. Padding that stays an operator
    becomes `aten.pad`.
    """
    for node in list(graph.nodes):
        if node.target in _ROW_PADDINGS:
            node.args = (*node.args, _ROW_PADDINGS[node.target])
            node.target = aten.pad.default
        if node.target in _CONVOLUTIONS and (args := _find_arguments(node)) is not None:
            padded, new = node.args[0], insert(node, padded_convolution, args)
            for user in node.users:
                if user.meta.get("bias_of") is node:
                    user.meta["bias_of"] = new
            replace(node, new)
            assert isinstance(padded, fx.Node)
            graph.erase_node(padded)


def _find_arguments(node: fx.Node) -> tuple[object, ...] | None:
    """Return the arguments of `padded_convolution`; None if the padding stays an operator."""
    arguments = node_arguments(node)
    padded, spatial = arguments["input"], len(node_shape(arguments["weight"])) - 2
    if (
        padded.target not in _PADDINGS
        or len(padded.users) > 1
        or any(isinstance(tag, SoleOperator) for tag in tags_of(padded))
        or any(arguments["padding"])
    ):
        return None
    padding = node_arguments(padded)
    pad = list(padding["pad"])
    # Rows that are cut off and padding of channels are operators of their own.
    if min(pad) < 0 or any(pad[2 * spatial :]):
        return None
    sizes = ((list(arguments[name]) * spatial)[:spatial] for name in ("stride", "dilation"))
    rows = (pad[: 2 * spatial], padding.get("mode", "constant"), padding["value"])
    return (padding["self"], arguments["weight"], *sizes, arguments["groups"], *rows)
