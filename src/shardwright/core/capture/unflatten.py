"""Rewrite that moves reshapes that flatten leading dimensions behind row-wise operators.

`linear(x.reshape(b * s, k))` becomes `linear(x).reshape(b * s, j)`, and so on, until the reshape
meets its inverse, or a loss that accepts the unflattened tensor. Then each leading dimension can be
sharded separately.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import fx

from shardwright.core.capture.canonicalize import (
    insert_permute,
    insert_reshape,
    is_pinned_view,
    permutation,
)
from shardwright.core.capture.fx_nodes import (
    insert,
    is_tensor,
    node_arguments,
    node_shape,
    replace,
    tensor,
)
from shardwright.core.graph import custom_ops

aten = torch.ops.aten


def move_flattening_down(graph: fx.Graph) -> None:
    """Move flattening reshapes towards the results of a graph, in place.

    Reshapes without readers remain for dead code removal.
    """
    moved: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        new = _rewrite_node(node)
        if new is None:
            continue
        # A bias is named after its product, which has been replaced if it was moved.
        if (product := node.meta.get("bias_of")) is not None:
            new.meta["bias_of"] = moved.get(product, product)
        moved[node] = new
        replace(node, insert_reshape(new, node_shape(node), node))


def _rewrite_node(node: fx.Node) -> fx.Node | None:
    """Insert and return a node that computes `node` from unflattened tensors; None if the operator
    cannot be rewritten."""
    if node.target is aten.reshape.default:
        source = insert_reshape(node.args[0], node_shape(node), node)  # type: ignore[arg-type]
        # Equal arguments: there was no earlier reshape to merge with.
        return source if source.args != node.args else None
    if permutation(node) is not None and (new := _rewrite_permutation(node)) is not None:
        return new
    handler = _HANDLERS.get(node.target)
    if handler is None and torch.Tag.pointwise in getattr(node.target, "tags", ()):
        handler = _rewrite_pointwise
    flats = {
        arg: flat for arg in node.all_input_nodes if (flat := match_flattening(arg)) is not None
    }
    new = handler(node, flats) if handler and flats else None
    if new is not None:
        lead = len(next(iter(flats.values())).lead)
        new.meta["flattened"] = lead - 1 + node.meta.get("flattened", 1)
    return new


@dataclass(frozen=True)
class Flat:
    """A reshape that flattens the leading dimensions of a tensor.

    Args:
        joined: the reshaped tensor, `[prod(lead), *inner]`.
        source: the tensor before the reshape.
        lead: sizes of the flattened dimensions.
        inner: sizes of the remaining dimensions.
    """

    joined: fx.Node
    source: fx.Node
    lead: tuple[int, ...]
    inner: tuple[int, ...]

    def unflattened(self, before: fx.Node) -> fx.Node:
        """Return the unflattened tensor, `[*lead, *inner]`; all calls return the same node."""
        meta = self.joined.meta
        # Made by the first reader in graph order, so that it precedes the others.
        if "apart" not in meta:
            meta["apart"] = insert_reshape(self.source, self.lead + self.inner, before)
        apart: fx.Node = meta["apart"]
        return apart


Handler = Callable[[fx.Node, dict[fx.Node, Flat]], fx.Node | None]


def common_factors(source: Sequence[int], target: Sequence[int]) -> list[list[int]] | None:
    """Split both shapes of a reshape into common factors, in order.

    Returns:
        Factors greater than 1 of each dimension of `target`; None without common factors.
    """
    factors: list[list[int]] = []
    # Dimensions of size 1 belong to no factor.
    remaining = [first for first in source if first != 1]
    for size in target:
        factors.append([])
        while size > 1:
            if not remaining:
                return None
            first = remaining.pop(0)
            factor = min(first, size)
            # `(6, 4)` and `(4, 6)` have none, because 4 does not divide 6.
            if first % factor or size % factor:
                return None
            factors[-1].append(factor)
            size //= factor
            if first > factor:
                remaining.insert(0, first // factor)
    return factors


def match_flattening(node: fx.Node) -> Flat | None:
    """Match a reshape that flattens leading dimensions; None for other nodes."""
    if node.target is not aten.reshape.default or is_pinned_view(node):
        return None
    source = node.args[0]
    assert isinstance(source, fx.Node)
    sizes, target = node_shape(source), node_shape(node)
    # Without elements, sizes do not tell which dimensions were merged.
    if not target or 0 in target:
        return None
    if sizes[len(sizes) - len(target) + 1 :] == target[1:] and len(sizes) > len(target):
        return Flat(node, source, sizes[: len(sizes) - len(target) + 1], target[1:])
    factors = common_factors(sizes, target)
    if factors is None or len(factors[0]) < 2:
        return None
    return Flat(node, source, tuple(factors[0]), target[1:])


def _find_flattening_reshape(
    node: fx.Node, flats: dict[fx.Node, Flat], index: int = 0
) -> Flat | None:
    argument = node.args[index]
    return flats.get(argument) if isinstance(argument, fx.Node) else None


def _rewrite_row_wise(node: fx.Node, flats: dict[fx.Node, Flat]) -> fx.Node | None:
    """Rewrite an operator on the last dimension of one activation, such as `linear`."""
    flat = _find_flattening_reshape(node, flats)
    others = [n for n in node.all_input_nodes if n is not node.args[0]]
    if flat is None or not flat.inner or any(n in flats for n in others):
        return None
    args = (flat.unflattened(node), *node.args[1:])
    return insert(node, node.target, args, dict(node.kwargs))  # type: ignore[arg-type]


def _rewrite_matmul(node: fx.Node, flats: dict[fx.Node, Flat]) -> fx.Node | None:
    a, b = node.args
    assert isinstance(a, fx.Node) and isinstance(b, fx.Node)
    flat = flats.get(a)
    if flat is None or not flat.inner:
        return None
    # A weight; otherwise both operands are batches of matrices, as of attention heads.
    if len(node_shape(b)) == 2:
        return insert(node, aten.matmul.default, (flat.unflattened(node), b))
    other_flat = flats.get(b)
    if (
        other_flat is None
        or other_flat.lead != flat.lead
        or len(flat.inner) != 2
        or len(other_flat.inner) != 2
    ):
        return None
    return insert(node, aten.matmul.default, (flat.unflattened(node), other_flat.unflattened(node)))


def _rewrite_norm(node: fx.Node, flats: dict[fx.Node, Flat]) -> fx.Node | None:
    flat = _find_flattening_reshape(node, flats)
    # A norm over the flattened dimension combines rows.
    if flat is None or len(node.args[1]) > len(flat.inner):  # type: ignore[arg-type]
        return None
    return _rewrite_row_wise(node, flats)


def _rewrite_along_dims(node: fx.Node, flats: dict[fx.Node, Flat]) -> fx.Node | None:
    """Rewrite an operator along the dimensions in its second argument, if none is flattened."""
    flat = _find_flattening_reshape(node, flats)
    dims: Any = node.args[1] if len(node.args) > 1 else None
    # No dimensions mean all of them.
    if flat is None or dims is None or dims == []:
        return None
    rank = len(flat.inner) + 1
    # Counted from the end, where unflattening changes no index.
    listed = [d % rank - rank for d in ([dims] if isinstance(dims, int) else dims)]
    if -rank in listed:
        return None
    counted = listed[0] if isinstance(dims, int) else listed
    args = (flat.unflattened(node), counted, *node.args[2:])
    return insert(node, node.target, args, dict(node.kwargs))  # type: ignore[arg-type]


def _rewrite_embedding(node: fx.Node, flats: dict[fx.Node, Flat]) -> fx.Node | None:
    flat = _find_flattening_reshape(node, flats, 1)
    if flat is None:
        return None
    args = (node.args[0], flat.unflattened(node), *node.args[2:])
    return insert(node, aten.embedding.default, args, dict(node.kwargs))


def _rewrite_pointwise(node: fx.Node, flats: dict[fx.Node, Flat]) -> fx.Node | None:
    """Rewrite a pointwise operator whose arguments are flattened equally or broadcast."""
    if not is_tensor(node):
        return None
    rank = len(node_shape(node))
    lead = next(iter(flats.values())).lead
    apart: dict[fx.Node, fx.Node] = {}
    for argument in node.all_input_nodes:
        sizes = node_shape(argument)
        # Broadcast along the flattened dimension.
        if len(sizes) < rank or sizes[0] == 1 != node_shape(node)[0]:
            continue
        flat = flats.get(argument)
        if flat is None or flat.lead != lead:
            return None
        apart[argument] = flat.unflattened(node)
    return _insert_copy(node, apart) if apart else None


def _rewrite_full_reduction(node: fx.Node, flats: dict[fx.Node, Flat]) -> fx.Node | None:
    """Rewrite a reduction over all elements of tensors of equal shapes."""
    flat = next(iter(flats.values()))
    tensors = node.all_input_nodes
    if any(node_shape(n) != (prod(flat.lead), *flat.inner) for n in tensors):
        return None
    return _insert_copy(node, {n: insert_reshape(n, flat.lead + flat.inner, node) for n in tensors})


def _rewrite_cross_entropy(node: fx.Node, flats: dict[fx.Node, Flat]) -> fx.Node | None:
    _, target, *options = node.args
    flat = _find_flattening_reshape(node, flats)
    if flat is None or not flat.inner:
        return None
    assert isinstance(target, fx.Node)
    # Probabilities of classes, in place of class indices.
    classes = flat.inner if tensor(target).is_floating_point() else ()
    args = (flat.unflattened(node), insert_reshape(target, flat.lead + classes, node), *options)
    return insert(node, custom_ops.cross_entropy, args)


def _rewrite_nll_loss(node: fx.Node, flats: dict[fx.Node, Flat]) -> fx.Node | None:
    """Rewrite `nll_loss` of each row: a sum or mean reads the flattened rows."""
    arguments = node_arguments(node)
    flat = _find_flattening_reshape(node, flats)
    if arguments["reduction"] or flat is None or len(flat.inner) != 1:
        return None
    rank = len(flat.lead) + 1
    # The classes are dimension 1 of the operator.
    scores = insert_permute(flat.unflattened(node), (0, rank - 1, *range(1, rank - 1)), node)
    target = insert_reshape(arguments["target"], flat.lead, node)
    options = (arguments["weight"], arguments["reduction"], arguments["ignore_index"])
    return insert(node, aten.nll_loss_nd.default, (scores, target, *options))


def _rewrite_experts(node: fx.Node, flats: dict[fx.Node, Flat]) -> fx.Node:
    """Rewrite a mixture-of-experts operator to read unflattened tokens, expert indices and
    weights."""
    return _insert_unflattened(node, node.all_input_nodes[:3], flats)


def _insert_unflattened(
    node: fx.Node, tensors: Sequence[fx.Node], flats: dict[fx.Node, Flat]
) -> fx.Node:
    """Insert the operator on `tensors` with their first dimension unflattened."""
    lead = next(iter(flats.values())).lead
    return _insert_copy(
        node, {n: insert_reshape(n, lead + node_shape(n)[1:], node) for n in tensors}
    )


def _rewrite_gather(node: fx.Node, flats: dict[fx.Node, Flat]) -> fx.Node | None:
    """Rewrite `gather` or `scatter` along a dimension that is not flattened."""
    tensors, rank = node.all_input_nodes, len(node_shape(node))
    dim: Any = node.args[1]
    # An index may have fewer rows than the tensor that it reads.
    if dim % rank == 0 or len({node_shape(n)[0] for n in tensors}) > 1:
        return None
    new = _insert_unflattened(node, tensors, flats)
    new.args = (new.args[0], dim % rank - rank, *new.args[2:])
    return new


def _rewrite_expand(node: fx.Node, flats: dict[fx.Node, Flat]) -> fx.Node | None:
    (flat,), sizes = flats.values(), node_shape(node)
    if len(sizes) != len(flat.inner) + 1 or sizes[0] != prod(flat.lead):
        return None
    return insert(node, aten.expand.default, (flat.unflattened(node), [*flat.lead, *sizes[1:]]))


def _rewrite_topk(node: fx.Node, flats: dict[fx.Node, Flat]) -> None:
    """Rewrite `topk` in place, and flatten both results again."""
    ((joined, flat),), arguments = flats.items(), node_arguments(node)
    rank = len(node_shape(joined))
    if arguments["dim"] % rank == 0:
        return
    options = (arguments["dim"] % rank - rank, arguments["largest"], arguments["sorted"])
    new = insert(node, aten.topk.default, (flat.unflattened(node), arguments["k"], *options))
    for item in list(node.users):
        result = insert(item, operator.getitem, (new, item.args[1]))
        replace(item, insert_reshape(result, node_shape(item), item))


def _insert_copy(node: fx.Node, new: dict[fx.Node, fx.Node]) -> fx.Node:
    """Insert a copy of an operator with other arguments: `new` maps each replaced argument to its
    replacement."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: new.get(n, n))
    return insert(node, node.target, args, dict(kwargs))  # type: ignore[arg-type]


def _rewrite_permutation(node: fx.Node) -> fx.Node | None:
    """Replace a permutation of merged dimensions by one of their factors.

    This applies if the next reshape does not merge or split factors, or if the merged dimension
    becomes the leading one: `[s, (b h), d] → [(b h), s, d] → [b, h, s, d]` is one permutation of
    `[s, b, h, d]`.
    """
    flat, dims = node.args[0], permutation(node)
    assert isinstance(flat, fx.Node) and dims is not None
    if flat.target is not aten.reshape.default or 0 in node_shape(flat):
        return None
    if is_pinned_view(flat) or is_pinned_view(node):
        return None
    source = flat.args[0]
    assert isinstance(source, fx.Node)
    factors = common_factors(node_shape(source), node_shape(flat))
    if factors is None or all(len(p) < 2 for p in factors):
        return None
    if not all(_keeps_factors(user, factors, dims) for user in node.users):
        # Only the factors of the new leading dimension stay apart, for `match_flattening` to find.
        if len(factors[dims[0]]) < 2:
            return None
        factors = [factors[d] if d == dims[0] else [n] for d, n in enumerate(node_shape(flat))]
    apart = [size for factors_of_dim in factors for size in factors_of_dim]
    starts = [sum(len(p) for p in factors[:dim]) for dim in range(len(factors))]
    order = [starts[dim] + i for dim in dims for i in range(len(factors[dim]))]
    # The factors keep their order: what looks like a permutation is a reshape.
    if order == list(range(len(order))):
        return insert_reshape(source, tuple(apart), node)
    return insert(node, aten.permute.default, (insert_reshape(source, tuple(apart), node), order))


def _keeps_factors(user: fx.Node, factors_of_dims: list[list[int]], dims: Sequence[int]) -> bool:
    """Whether a node reshapes the permuted tensor without splitting or merging its factors."""
    if user.target is not aten.reshape.default:
        return False
    apart = [size for dim in dims for size in factors_of_dims[dim]]
    factors = common_factors(apart, node_shape(user))
    return factors is not None and [size for sizes in factors for size in sizes] == apart


_HANDLERS: dict[Any, Handler] = {
    aten.linear.default: _rewrite_row_wise,
    aten.matmul.default: _rewrite_matmul,
    aten.layer_norm.default: _rewrite_norm,
    aten.rms_norm.default: _rewrite_norm,
    aten.embedding.default: _rewrite_embedding,
    custom_ops.cross_entropy: _rewrite_cross_entropy,
    aten.nll_loss_nd.default: _rewrite_nll_loss,
    custom_ops.experts: _rewrite_experts,
    aten.expand.default: _rewrite_expand,
    aten.topk.default: _rewrite_topk,
    **dict.fromkeys(
        (aten.gather.default, aten.scatter.value, aten.scatter.src, aten.scatter_add.default),
        _rewrite_gather,
    ),
    **dict.fromkeys(
        (
            # Elementwise without the tag `pointwise`.
            *(aten.to.dtype, aten.dropout.default, aten.detach.default, aten.type_as.default),
            aten.zeros_like.default,
        ),
        _rewrite_pointwise,
    ),
    **dict.fromkeys(
        (
            aten.softmax.int,
            aten.log_softmax.int,
            aten.sum.dim_IntList,
            aten.mean.dim,
            aten.amax.default,
            aten.amin.default,
            aten.argmax.default,
            aten.logsumexp.default,
            aten.slice.Tensor,
            aten.select.int,
        ),
        _rewrite_along_dims,
    ),
    **dict.fromkeys(
        (
            aten.sum.default,
            aten.mean.default,
            aten.mse_loss.default,
            aten.l1_loss.default,
            aten.smooth_l1_loss.default,
            aten.huber_loss.default,
            aten.binary_cross_entropy.default,
            aten.binary_cross_entropy_with_logits.default,
        ),
        _rewrite_full_reduction,
    ),
}
