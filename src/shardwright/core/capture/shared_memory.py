"""Reject tensors of a model that share memory, because their shards would not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from itertools import chain, combinations

import torch
from torch import Tensor, nn

from shardwright.core.deferred import copies_of_attributes
from shardwright.core.graph.graph import Graph
from shardwright.core.torch_internals.tensors import storage_id
from shardwright.errors import CaptureError


def check_memory(module: nn.Module, graph: Graph) -> None:
    """Check that no parameter or buffer shares memory with a tensor that a training step updates.

    Raises:
        CaptureError: if two tensors overlap, as by `nn.Parameter(other.data.t())`.
    """
    trained = {value.name for value in graph.parameters if value.requires_grad}
    written = trained | {buffer.name for buffer, _ in graph.updates}
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    sharing: dict[int, list[str]] = defaultdict(list)
    for value in (*graph.parameters, *graph.buffers):
        if value.name in named:
            sharing[storage_id(named[value.name])].append(value.name)
    for first, other in chain.from_iterable(combinations(names, 2) for names in sharing.values()):
        # What no step writes may share memory: equal copies stay equal.
        if written & {first, other} and _share_elements(named[first], named[other]):
            raise CaptureError(
                f"{first!r} and {other!r} are two tensors in the same memory: in the module an "
                "update of one changes both, in sharded parameters it would not\nuse one parameter"
                " with both names, compute one from the other in `forward`, or `clone()` it"
            )


def check_constants(module: nn.Module, constants: Collection[Tensor]) -> None:
    """Check that no constant of the graph and no plain attribute shares memory with a parameter.

    Raises:
        CaptureError: if a constant overlaps a trainable parameter, because a function reads the
            parameter through the original model instead of its traced copy, or an attribute is a
            view of the parameter.
    """
    if not constants:
        return
    held: dict[int, list[Tensor]] = defaultdict(list)
    for tensor in (*constants, *copies_of_attributes(module).values()):
        held[storage_id(tensor)].append(tensor)
    for name, parameter in module.named_parameters():
        # A frozen parameter keeps the values that a constant has.
        sharing = held.get(storage_id(parameter), ()) if parameter.requires_grad else ()
        if any(_share_elements(parameter, tensor) for tensor in sharing):
            raise CaptureError(
                f"parameter {name!r} is also read through another reference: the original model in"
                " a lambda or hook, or a view in an attribute; a captured model would read its"
                " initial values there, without a gradient\nread the parameter as"
                " `self.weight` in a method, or as `module.weight` of the first argument of a hook"
            )


def _share_elements(tensor_a: Tensor, tensor_b: Tensor) -> bool:
    """Whether two tensors of one storage share an element."""
    (start_a, end_a), (start_b, end_b) = _get_byte_range(tensor_a), _get_byte_range(tensor_b)
    # Views of other dtypes have no common elements to compare: their bytes must not overlap.
    if end_a <= start_b or end_b <= start_a or tensor_a.itemsize != tensor_b.itemsize:
        return end_a > start_b and end_b > start_a
    # Columns of one matrix overlap in their range of bytes, but have no element in common.
    indices = torch.arange(max(end_a, end_b) // tensor_a.itemsize)
    elements = [
        indices.as_strided(t.shape, t.stride(), t.storage_offset()).flatten()
        for t in (tensor_a, tensor_b)
    ]
    return bool(torch.isin(*elements).any())


def _get_byte_range(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor in its storage, and the byte after its last."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    first = int(tensor.storage_offset())
    count = 1 + sum((size - 1) * stride for size, stride in steps) if tensor.numel() else 0
    return first * tensor.itemsize, (first + count) * tensor.itemsize
