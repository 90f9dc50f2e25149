"""Cross entropy of a slice of tokens, such as of all but the last, as that of all tokens.

`cross_entropy(logits[:, :-1], labels[:, 1:])` reads an odd number of tokens, which no number of
devices divides. With targets that are ignored for the other tokens, the loss reads all of them.
"""

from __future__ import annotations

import inspect
from itertools import pairwise

import torch
from torch import fx

from shardwright.core.capture.annotations import tags_of
from shardwright.core.capture.fx_nodes import (
    insert,
    is_tensor,
    node_shape,
    replace,
    tensor,
)
from shardwright.core.capture.row_factors import find_row_factor
from shardwright.core.graph import custom_ops

aten = torch.ops.aten

_FEWEST_TOKENS = 8
"""Number of tokens of which a slice may leave out one, since all of them are computed."""


def read_all_tokens_in_losses(graph: fx.Graph) -> None:
    """Make cross entropies of slices read the sliced tensor; in place."""
    for node in list(graph.nodes):
        if node.target is custom_ops.cross_entropy:
            _rewrite(node)


def _rewrite(node: fx.Node) -> None:
    bound = inspect.signature(custom_ops.cross_entropy).bind(*node.args, **node.kwargs)
    bound.apply_defaults()
    arguments = bound.arguments
    target = arguments["target"]
    # Probabilities have no value that is ignored, and each token has a loss without a reduction.
    if not arguments["reduction"] or not is_tensor(target) or tensor(target).is_floating_point():
        return
    path = _find_slice(arguments["logits"])
    if path is None:
        return
    sliced, dim, start = path[0], *_position_of(path[0])
    source = sliced.args[0]
    assert isinstance(source, fx.Node)
    size, count = node_shape(source)[dim], node_shape(sliced)[dim]
    if dim >= len(node_shape(target)) or not _is_worthwhile(size, count):
        return
    new = {sliced: source}
    for each in path[1:]:
        first, *others = each.args
        assert isinstance(first, fx.Node)
        new[each] = insert(each, each.target, (new[first], *others), dict(each.kwargs))  # type: ignore[arg-type]
        if (product := each.meta.get("bias_of")) is not None:
            new[each].meta["bias_of"] = new.get(product, product)
    # Pairs (before, after) of the dimensions, the last one first.
    pad = [0, 0] * (len(node_shape(target)) - 1 - dim) + [start, size - count - start]
    padded = insert(node, aten.constant_pad_nd.default, (target, pad, arguments["ignore_index"]))
    arguments.update(logits=new[path[-1]], target=padded)
    replace(node, insert(node, custom_ops.cross_entropy, bound.args))


def _find_slice(logits: fx.Node) -> list[fx.Node] | None:
    """Return the slice from which `logits` are computed token by token, and the operators between,
    in order; None without such a slice."""
    path = [logits]
    while path[0].target is not aten.slice.Tensor:
        source = path[0].args[0] if path[0].args else None
        if not is_tensor(source):
            return None
        path.insert(0, source)
    dim, _ = _position_of(path[0])
    # Other readers of the rows would make them be computed twice.
    if any(len(node.users) > 1 or tags_of(node) for node in path[1:]) or tags_of(path[0]):
        return None
    for source, node in pairwise(path):
        count = node_shape(source)[dim]
        random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        aligned = len(node_shape(node)) > dim and node_shape(node)[dim] == count
        if random or not aligned or find_row_factor(node, {source: dim}, count) is None:
            return None
    return path if path[0].args[4] == 1 else None


def _position_of(sliced: fx.Node) -> tuple[int, int]:
    """Return (dimension, first row) of a slice in canonical form."""
    _, dim, start, *_ = sliced.args
    assert isinstance(dim, int) and isinstance(start, int)
    return dim, start


def _is_worthwhile(size: int, count: int) -> bool:
    """Whether more numbers of devices divide all tokens than the sliced ones, of which few are left
    out."""
    divides_more = size & -size > count & -count
    return divides_more and _FEWEST_TOKENS * (size - count) <= size
