"""Rewriting of equivalent operators to one canonical form, which needs fewer sharding rules.

Each rewrite replaces a single operator. Rewrites run in graph order over a functional graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from shardwright.core.capture.annotations import BoundaryTag, SoleOperator, tags_of
from shardwright.core.capture.fx_nodes import (
    insert,
    is_tensor,
    node_arguments,
    node_shape,
    replace,
    tensor,
)
from shardwright.core.capture.signature import is_floating_point
from shardwright.core.capture.views import SAME_ELEMENTS, narrow_as_slice
from shardwright.core.torch_internals.operators import (
    OpOverload,
    is_erased,
    operator_name,
    overload_name,
    schema_of,
)

aten = torch.ops.aten

Rewrite = Callable[[fx.Node], fx.Node | None]
"""Function that returns the replacement of a node, or None to keep the node."""

_REWRITES: dict[Any, Rewrite] = {}

_ASSERTIONS = (
    "_assert_tensor_metadata",
    "_assert_async",
    "_assert_scalar",
    "sym_constrain_range",
    "sym_constrain_range_for_size",
)
_CREATION_KWARGS = ("device", "pin_memory", "layout")


def canonicalize(graph: fx.Graph) -> None:
    """Canonicalize the graph in place."""
    for node in list(graph.nodes):
        # A rewrite may have erased a later node, as the elements of `broadcast_tensors`.
        if node.op != "call_function" or is_erased(node):
            continue
        if isinstance(node.target, OpOverload):
            # The trace has checked shapes and dtypes; a captured model checks no values.
            if schema_of(node.target).name.removeprefix("aten::") in _ASSERTIONS:
                graph.erase_node(node)
                continue
            # A program creates tensors on the device of its rank, whatever device the trace names.
            node.kwargs = {k: v for k, v in node.kwargs.items() if k not in _CREATION_KWARGS}
            if torch.Tag.view_copy in node.target.tags:
                node.target = _get_view_operator(node.target)
        rewrite = _REWRITES.get(node.target)
        new = rewrite(node) if rewrite else None
        if new is not None:
            if _is_pinned(node) and not _is_pinned(new):
                # The operator returns its input; the pin constrains that tensor.
                new = insert(node, aten.alias.default, (new,))
            replace(node, new)


def _is_pinned(node: fx.Node) -> bool:
    return any(isinstance(tag, SoleOperator) for tag in tags_of(node))


def is_pinned_view(node: fx.Node) -> bool:
    """Whether a view is the only operator of a pinned call, and so must remain in the graph."""
    return any(isinstance(tag, SoleOperator) and tag.is_view for tag in tags_of(node))


def _get_view_operator(copy: OpOverload) -> OpOverload:
    """Return the view operator of an operator that copies, such as `permute` for `permute_copy`.

    The two operators are equivalent in a functional graph, in which no tensor is modified in place.
    """
    packet = getattr(aten, operator_name(copy).removesuffix("_copy"))
    view: OpOverload = getattr(packet, overload_name(copy))
    return view


def rewrites(*targets: Any) -> Callable[[Rewrite], Rewrite]:
    """Return a decorator that registers a `Rewrite` of the operators `targets`."""

    def register(rewrite: Rewrite) -> Rewrite:
        _REWRITES.update(dict.fromkeys(targets, rewrite))
        return rewrite

    return register


def has_rewrite(target: Any) -> bool:
    """Whether a `Rewrite` of the operator `target` is registered."""
    return target in _REWRITES


def insert_reshape(node: fx.Node, sizes: tuple[int, ...], before: fx.Node) -> fx.Node:
    """Insert a reshape of `node` before `before`, merged with reshapes that produced `node`.

    Returns `node`, or the tensor that it reshapes, if the shape is already `sizes`.
    """
    while (
        node.target is aten.reshape.default
        and isinstance(node.args[0], fx.Node)
        and not is_pinned_view(node)
        and not is_pinned_view(before)
    ):
        node = node.args[0]
    if node_shape(node) == sizes:
        return node
    return insert(before, aten.reshape.default, (node, list(sizes)))


def insert_permute(node: fx.Node, dims: tuple[int, ...], before: fx.Node) -> fx.Node:
    """Insert a permute of `node` before `before`, merged with permutes that produced `node`."""
    # Dimension i of the result is dimension dims[i] of `node` and inner[dims[i]] of its input.
    while (inner := permutation(node)) is not None and not (
        is_pinned_view(node) or is_pinned_view(before)
    ):
        node = node.args[0]  # type: ignore[assignment]
        dims = tuple(inner[d] for d in dims)
    if dims == tuple(range(len(dims))):
        return node
    return insert(before, aten.permute.default, (node, list(dims)))


def permutation(node: fx.Node) -> tuple[int, ...] | None:
    """Return the permutation p of a `permute` or `transpose`, or None for another operator.

    Output dimension i is input dimension p[i].
    """
    if node.target is aten.permute.default:
        rank = len(node_shape(node))
        return tuple(int(d) % rank for d in node.args[1])  # type: ignore[union-attr, arg-type]
    if node.target is aten.transpose.int:
        dims = list(range(len(node_shape(node))))
        a, b = node.args[1:3]
        if dims:  # A tensor without dimensions has dimensions 0 and -1 for PyTorch.
            dims[a], dims[b] = dims[b], dims[a]  # type: ignore[index]
        return tuple(dims)
    return None


def _get_first_input(node: fx.Node) -> fx.Node:
    first = node.args[0]
    assert isinstance(first, fx.Node)
    return first


@rewrites(*SAME_ELEMENTS)
def _rewrite_reshape(node: fx.Node) -> fx.Node:
    return insert_reshape(_get_first_input(node), node_shape(node), node)


@rewrites(aten.alias.default)
def _remove_alias(node: fx.Node) -> fx.Node | None:
    return (
        None
        if any(isinstance(tag, BoundaryTag) for tag in tags_of(node))
        else _get_first_input(node)
    )


@rewrites(
    aten.contiguous.default,
    aten.clone.default,
    aten.lift_fresh.default,
    aten.lift_fresh_copy.default,
    aten.resolve_neg.default,
    aten.positive.default,
)
def _remove_copy(node: fx.Node) -> fx.Node:
    # No operator of a functional graph writes into memory, so a copy equals its source.
    return _get_first_input(node)


@rewrites(
    aten.view_as_real.default,
    aten.view_as_complex.default,
    aten.view.dtype,
    aten.as_strided.default,
)
def _copy_for_memory_access(node: fx.Node) -> fx.Node:
    """Insert copies before operators that address memory, which need contiguous tensors without
    lazy conjugation.

    `_remove_copy` has removed the copies of the user's code. Kernels may return a conjugated view
    where the fake tensor is not conjugated.
    """
    source, *others = node.args
    assert isinstance(source, fx.Node)
    if tensor(source).is_complex() and source.target is not aten.resolve_conj.default:
        source = insert(node, aten.resolve_conj.default, (source,))
    if node.target is not aten.view_as_real.default:
        source = insert(node, aten.contiguous.default, (source,))
    return insert(node, node.target, (source, *others))  # type: ignore[arg-type]


@rewrites(
    aten.to.dtype,
    aten.to.device,
    aten.to.dtype_layout,
    aten.to.other,
    aten._to_copy.default,
    aten.type_as.default,
)
def _rewrite_cast(node: fx.Node) -> fx.Node | None:
    if not isinstance(node.args[0], fx.Node):
        # `torch.vmap` casts Python numbers.
        node.target, node.args = aten.full.default, ([], node.args[0])
        node.kwargs = {"dtype": tensor(node).dtype}
        return None
    source, dtype = _get_first_input(node), tensor(node).dtype
    if tensor(source).dtype == dtype:
        return source
    # Already canonical; `copy`, `non_blocking` and `memory_format` change no value.
    if node.target is aten.to.dtype and len(node.args) == 2 and not node.kwargs:
        return None
    return insert(node, aten.to.dtype, (source, dtype))


@rewrites(aten.expand.default, aten.expand_as.default, aten.broadcast_to.default)
def _rewrite_expand(node: fx.Node) -> fx.Node:
    source = _get_first_input(node)
    if node_shape(source) == node_shape(node):
        return source
    return insert(node, aten.expand.default, (source, list(node_shape(node))))


@rewrites(
    aten.transpose.int,
    aten.permute.default,
    aten.t.default,
    aten.mT.default,
    aten.numpy_T.default,
    aten.swapaxes.default,
    aten.swapdims.default,
    aten.movedim.int,
    aten.movedim.intlist,
)
def _rewrite_permute(node: fx.Node) -> fx.Node | None:
    source = _get_first_input(node)
    if (dims := permutation(node)) is None:
        rank = len(node_shape(node))
        # The sizes 2, 3, 4, … of a meta tensor show which dimension moves where.
        order = torch.empty(tuple(range(2, 2 + rank)), device="meta")
        moved = node.target(order, *node.args[1:])  # type: ignore[operator]
        dims = tuple(size - 2 for size in moved.shape)
        if node.target in (aten.t.default, aten.mT.default) and rank >= 2:
            return insert(node, aten.transpose.int, (source, rank - 2, rank - 1))
    # Already canonical: nothing to merge, and not the identity.
    elif permutation(source) is None and dims != tuple(range(len(dims))):
        return None
    return insert_permute(source, dims, node)


@rewrites(aten.slice.Tensor)
def _rewrite_slice(node: fx.Node) -> fx.Node:
    source, arguments = _get_first_input(node), node_arguments(node)
    dim = arguments["dim"] % len(node_shape(source))
    # Python resolves defaults and negative or too large bounds as PyTorch does.
    start, end, step = slice(arguments["start"], arguments["end"], arguments["step"]).indices(
        node_shape(source)[dim]
    )
    if node_shape(source) == node_shape(node) and step == 1:
        return source
    # PyTorch requires end >= start, also for an empty slice.
    return insert(node, aten.slice.Tensor, (source, dim, start, max(start, end), step))


@rewrites(aten.narrow.default)
def _rewrite_narrow(node: fx.Node) -> fx.Node:
    return insert(node, aten.slice.Tensor, (node.args[0], *narrow_as_slice(node), 1))


@rewrites(
    aten.dropout.default,
    aten.feature_dropout.default,
    aten.alpha_dropout.default,
    aten.feature_alpha_dropout.default,
)
def _remove_inactive_dropout(node: fx.Node) -> fx.Node | None:
    source, p, train = node.args
    return source if p == 0 or not train else None  # type: ignore[return-value]


_CREATIONS = {
    aten.new_empty.default: aten.empty.memory_format,
    aten.new_zeros.default: aten.zeros.default,
    aten.new_ones.default: aten.ones.default,
    aten.new_full.default: aten.full.default,
}


@rewrites(*_CREATIONS)
def _rewrite_creation(node: fx.Node) -> None:
    """Replace `x.new_*` by creation with the dtype of `x`, so that `x` is not read."""
    node.kwargs = {"dtype": tensor(node).dtype}
    node.target, node.args = _CREATIONS[node.target], node.args[1:]  # type: ignore[index]


_PYTHON_OPERATORS = {
    aten.__and__.Tensor: aten.bitwise_and.Tensor,
    aten.__and__.Scalar: aten.bitwise_and.Scalar,
    aten.__or__.Tensor: aten.bitwise_or.Tensor,
    aten.__or__.Scalar: aten.bitwise_or.Scalar,
    aten.__xor__.Tensor: aten.bitwise_xor.Tensor,
    aten.__xor__.Scalar: aten.bitwise_xor.Scalar,
}


@rewrites(*_PYTHON_OPERATORS)
def _rewrite_bitwise(node: fx.Node) -> fx.Node:
    return insert(node, _PYTHON_OPERATORS[node.target], node.args)  # type: ignore[index]


@rewrites(aten.index_put.default)
def _rewrite_masked_write(node: fx.Node) -> fx.Node | None:
    """Rewrite `x[mask] = value`, with equal values at all masked positions, as `torch.where`."""
    arguments = node_arguments(node)
    source, values = arguments["self"], arguments["values"]
    masks = [index for index in arguments["indices"] if index is not None]
    position = arguments["indices"].index(masks[0])
    if len(masks) > 1 or tensor(masks[0]).dtype != torch.bool or arguments["accumulate"]:
        return None
    num_inner_dims = len(node_shape(source)) - position - len(node_shape(masks[0]))
    # The values differ between selected positions, whose number is unknown.
    if len(node_shape(values)) > num_inner_dims:
        return None
    sizes = node_shape(masks[0]) + (1,) * num_inner_dims
    mask = insert_reshape(masks[0], sizes, node)
    return insert(node, aten.where.self, (mask, values, source))


_NEUTRAL = {
    aten.add.Tensor: 0,
    aten.sub.Tensor: 0,
    aten.mul.Tensor: 1,
    aten.div.Tensor: 1,
}


@rewrites(*_NEUTRAL)
def _remove_neutral_operation(node: fx.Node) -> fx.Node | None:
    """Remove additions of 0 and multiplications by 1 that do not change the dtype."""
    source, number = node.args[:2]
    does_nothing = (
        is_tensor(source)
        and isinstance(number, (int, float))
        and number == _NEUTRAL[node.target]  # type: ignore[index]
        and tensor(source).dtype == tensor(node).dtype
    )
    return source if does_nothing else None  # type: ignore[return-value]


@rewrites(aten.broadcast_tensors.default)
def _rewrite_broadcast(node: fx.Node) -> None:
    """Replace `broadcast_tensors` by one `expand` per tensor of the list."""
    sources: Any = node.args[0]
    for getitem in list(node.users):
        source = sources[getitem.args[1]]
        if node_shape(source) != node_shape(getitem):
            source = insert(getitem, aten.expand.default, (source, list(node_shape(getitem))))
        replace(getitem, source)


@rewrites(aten.detach.default)
def _remove_needless_detach(node: fx.Node) -> fx.Node | None:
    source = _get_first_input(node)
    # Integers have no gradient, and one `detach` is enough.
    needless = not is_tensor(source) or not is_floating_point(source)
    return source if needless or source.target is aten.detach.default else None
