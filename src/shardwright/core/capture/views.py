"""Views: operators that create views, replay of a view, and writes through a view."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from shardwright.core.capture.fx_nodes import (
    call,
    insert,
    is_tensor,
    node_arguments,
    node_shape,
    tensor,
)
from shardwright.core.capture.naming import line_of
from shardwright.core.torch_internals.tensors import storage_id
from shardwright.errors import CaptureError

aten = torch.ops.aten

IN_PLACE: dict[Any, Any] = {
    aten.unsqueeze_.default: aten.unsqueeze.default,
    aten.squeeze_.default: aten.squeeze.default,
    aten.squeeze_.dim: aten.squeeze.dim,
    aten.squeeze_.dims: aten.squeeze.dims,
    aten.transpose_.default: aten.transpose.int,
    aten.t_.default: aten.t.default,
    aten.detach_.default: aten.detach.default,
}
"""In-place view operators, such as `squeeze_`, with the operators that return the view."""

SAME_ELEMENTS = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.view_as.default,
        aten.reshape_as.default,
        aten.flatten.using_ints,
        aten.unflatten.int,
        aten.ravel.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
    }
)
"""Operators that change the shape of a tensor, but not the order of its elements."""

LIST_VIEWS = frozenset(
    {
        aten.split.Tensor,
        aten.split.sizes,
        aten.split_with_sizes.default,
        aten.chunk.default,
        aten.tensor_split.sections,
        aten.tensor_split.indices,
        aten.unbind.int,
    }
)
"""Operators that return a list of views."""

# With equal arguments, these operators undo themselves.
_SELF_INVERSE = frozenset(
    {
        aten.transpose.int,
        aten.swapaxes.default,
        aten.swapdims.default,
        aten.t.default,
        aten.mT.default,
        aten.numpy_T.default,
    }
)


_BY_STRIDES = frozenset(
    {
        aten.as_strided.default,
        aten.as_strided_copy.default,
        aten.as_strided_.default,
        aten.as_strided_scatter.default,
    }
)
"""Operators that address memory by strides, such as `as_strided`."""


def read_strides_of_elements(graph: fx.Graph) -> None:
    """Rewrite `as_strided` to read a contiguous tensor, in place.

    The elements of the input are first put into the order that they have in memory during capture,
    because tensors of the captured program, such as shards, may have other strides.

    Raises:
        CaptureError: if an operator reads memory besides the elements of its input, or writes
            through strides.
    """
    for node in [node for node in graph.nodes if node.target in _BY_STRIDES]:
        source, arguments = node.args[0], node_arguments(node)
        x = tensor(source)
        size, stride, start = arguments["size"], arguments["stride"], arguments["storage_offset"]
        # `storage_offset` counts from the start of the storage, not of the tensor.
        first = 0 if start is None else start - x.storage_offset()
        last = first + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        # By descending stride: the order of the dimensions in memory.
        order = sorted(range(x.ndim), key=lambda dim: (x.stride(dim), x.shape[dim]), reverse=True)
        # Memory between or beyond the elements belongs to other tensors.
        dense = x.permute(order).is_contiguous() and first >= 0 and last < max(x.numel(), 1)
        if not dense or node.target not in (aten.as_strided.default, aten.as_strided_copy.default):
            raise CaptureError(
                f"{line_of(node)}: `{node.target}` reads memory outside its input, or writes "
                "through strides\nuse `unfold`, slices or an index"
            )
        moved = insert(node, aten.permute.default, (source, order))
        flat = insert(node, aten.reshape.default, (moved, [-1]))
        flat = insert(node, aten.slice.Tensor, (flat, 0, first, x.numel()))
        node.target, node.args, node.kwargs = aten.as_strided.default, (flat, size, stride), {}


def view_base(node: fx.Node) -> fx.Node | None:
    """Return the tensor of which a node is a view; None if it is not a view."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or not is_tensor(node):
        return None
    if node.target is operator.getitem:
        base = source.args[0] if source.args else None
        return base if source.target in LIST_VIEWS and isinstance(base, fx.Node) else None
    if not is_tensor(source):
        return None
    # `reshape`, `contiguous` and others return a view or a copy; their fake tensors tell which.
    return source if storage_id(tensor(node)) == storage_id(tensor(source)) else None


def replay_view(graph: fx.Graph, view: fx.Node, source: fx.Node) -> fx.Node:
    """Apply the view operator of `view` to `source`, and return the new node."""
    if view.target is operator.getitem:
        target, args = _convert_to_slice(view)
        return call(graph, target, (source, *args), like=view)
    target = IN_PLACE.get(view.target, view.target)
    # `view` would fail for a source that is not contiguous, as a functional write may leave it.
    if target in SAME_ELEMENTS:
        return call(graph, aten.reshape.default, (source, list(node_shape(view))), like=view)
    # No change, as in `x[:]`; `detach` changes the gradient.
    if target is not aten.detach.default and _keeps_shape_and_strides(view):
        return source
    return call(graph, target, (source, *view.args[1:]), dict(view.kwargs), like=view)


def write_through(graph: fx.Graph, view: fx.Node, source: fx.Node, new: fx.Node) -> fx.Node:
    """Return the new value of `source` after `view` of it was overwritten with `new`.

    Raises:
        CaptureError: if writing through this view has no functional form.
    """
    target: Any = IN_PLACE.get(view.target, view.target)
    args: tuple[Any, ...] = ()
    if target is operator.getitem:
        target, args = _convert_to_slice(view)
    if target in SAME_ELEMENTS:
        return call(graph, aten.reshape.default, (new, list(node_shape(source))), like=view)
    if target in _SELF_INVERSE:
        return call(graph, target, (new, *view.args[1:]), like=view)
    if target is aten.permute.default:
        dims = [int(d) % len(node_shape(new)) for d in view.args[1]]  # type: ignore[union-attr, arg-type]
        inverse = [dims.index(d) for d in range(len(dims))]
        return call(graph, target, (new, inverse), like=view)
    if target in (aten.movedim.int, aten.movedim.intlist):
        return call(graph, target, (new, view.args[2], view.args[1]), like=view)
    if target is aten.slice.Tensor:
        if not args:
            arguments = node_arguments(view)
            args = (arguments["dim"], arguments["start"], arguments["end"], arguments["step"])
        return _insert_scatter(graph, aten.slice_scatter.default, source, new, args, view)
    if target is aten.narrow.default:
        args = narrow_as_slice(view)
        return _insert_scatter(graph, aten.slice_scatter.default, source, new, args, view)
    if target is aten.select.int:
        args = args or view.args[1:]
        return _insert_scatter(graph, aten.select_scatter.default, source, new, args, view)
    if target is aten.diagonal.default:
        return call(graph, aten.diagonal_scatter.default, (source, new, *view.args[1:]), like=view)
    # A view of all elements, such as `x.detach()` or `x.expand_as(x)`.
    if _keeps_shape_and_strides(view):
        return new
    raise CaptureError(
        f"{line_of(view)}: cannot capture an in-place change of the result of `{target}`, whose "
        f"elements may share memory\nuse an operator that returns a new tensor"
    )


def narrow_as_slice(narrow: fx.Node) -> tuple[int, int, int]:
    """Return the arguments of a `narrow` as dimension, start and end of a slice."""
    source, dim, start, length = narrow.args
    assert isinstance(dim, int) and isinstance(start, int) and isinstance(length, int)
    # A start from the end, such as -2, would give a slice of 2 elements the end 0.
    first = start % node_shape(source)[dim] if start < 0 else start  # type: ignore[arg-type]
    return dim, first, first + length


def _insert_scatter(
    graph: fx.Graph,
    target: Any,
    source: fx.Node,
    new: fx.Node,
    args: Sequence[Any],
    view: fx.Node,
) -> fx.Node:
    """Insert `target(source, new, *args)`.

    Real and imaginary parts are written separately, since autograd has no gradient for complex
    numbers.
    """
    if not tensor(source).is_complex():
        return call(graph, target, (source, new, *args), like=view)
    written = []
    for component in (aten.real.default, aten.imag.default):
        components = [call(graph, component, (each,), like=view) for each in (source, new)]
        written.append(call(graph, target, (*components, *args), like=view))
    return call(graph, aten.complex.default, (written[0], written[1]), like=view)


def _keeps_shape_and_strides(view: fx.Node) -> bool:
    source = view.args[0]
    return isinstance(source, fx.Node) and (
        node_shape(view) == node_shape(source)
        and tensor(view).dtype == tensor(source).dtype
        and tensor(view).stride() == tensor(source).stride()
        and tensor(view).storage_offset() == tensor(source).storage_offset()
    )


def _convert_to_slice(getitem: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """Return an element of `split`, `chunk` or `unbind` as arguments of `slice` or `select`."""
    pieces, index = getitem.args
    assert isinstance(pieces, fx.Node) and isinstance(index, int)
    dim = node_arguments(pieces)["dim"]
    if pieces.target is aten.unbind.int:
        return aten.select.int, (dim, index)
    sizes = [piece.shape[dim] for piece in pieces.meta["val"]]
    start = sum(sizes[:index])
    return aten.slice.Tensor, (dim, start, start + sizes[index], 1)
