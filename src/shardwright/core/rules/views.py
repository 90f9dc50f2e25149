"""Operators that only move elements: reshapes, permutations, expansions.

A reshape maps segments of consecutive dimensions onto each other. Only the leading dimension of a
segment can be sharded, and the number of shards must divide its size in input and output: then
shard i of the input is, in memory order, shard i of the output.
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd, prod
from typing import Any

import torch

from shardwright.core.graph.graph import Op
from shardwright.core.rules.notation import (
    NAMES,
    aligned,
    argument,
    names,
    overloads,
    sharding_rule,
    without,
)
from shardwright.core.rules.rule import Dims, Local, ShardingRule, rule_for

aten = torch.ops.aten


@rule_for(aten.view.default, aten.reshape.default, aten._unsafe_view.default)
def reshape_rule(op: Op) -> ShardingRule:
    """`b s _ -> b s` for a merged pair of dimensions, `b s -> b s _` for a split one."""
    return _build_reshape_rule(op, sizes=1)


@rule_for(*overloads("flatten", "unflatten", "squeeze", "unsqueeze", "ravel"))
def reshape_to_local_shape(op: Op) -> ShardingRule:
    """As `reshape_rule`, for arguments that may not fit a shard: `squeeze` would drop a local size
    of 1."""
    return _build_reshape_rule(op, kernel=_local_reshape)


def _build_reshape_rule(op: Op, **options: Any) -> ShardingRule:
    source, target, capacity = reshape_segments(op.inputs[0].shape, op.output.shape)
    like = [target for _ in op.inputs[1:]]
    return sharding_rule(op, (source, *like), (target,), capacity=capacity, **options)


def _local_reshape(op: Op, local: Local) -> Callable[..., Any]:
    shape = local.output_shapes[0]
    return lambda x, *args, **kwargs: x.reshape(shape)


def reshape_segments(
    source: tuple[int, ...], target: tuple[int, ...]
) -> tuple[Dims, Dims, dict[str, int]]:
    """Find the dimensions that can be sharded if a tensor is reshaped from `source` to `target`.

    Returns:
        The factors of the dimensions of both, and the capacity of each factor.
    """
    left: list[str | None] = [None] * len(source)
    right: list[str | None] = [None] * len(target)
    capacity: dict[str, int] = {}
    # Without elements there is nothing to shard, and sizes of 0 would never agree below.
    if prod(source) == 0:
        return tuple(left), tuple(right), capacity
    # Dimensions of size 1 belong to no segment.
    ahead = [[i for i, size in enumerate(shape) if size > 1] for shape in (source, target)]
    while ahead[0]:
        i, j = ahead[0].pop(0), ahead[1].pop(0)
        # Shard boundaries must fall between rows on both sides, so that only common divisors of the
        # leading sizes are valid.
        common = gcd(source[i], target[j])
        if common > 1:
            left[i] = right[j] = name = NAMES[len(capacity)]
            capacity[name] = common
        sizes = [source[i], target[j]]
        # A segment ends where both sides have taken equally many elements.
        while sizes[0] != sizes[1]:
            if sizes[0] < sizes[1]:
                sizes[0] *= source[ahead[0].pop(0)]
            else:
                sizes[1] *= target[ahead[1].pop(0)]
    return tuple(left), tuple(right), capacity


@rule_for(*overloads("permute", "transpose", "t", "numpy_T", "mT", "movedim", "moveaxis"))
@rule_for(*overloads("swapaxes", "swapdims", "adjoint", "matrix_H", "mH"))
def permute_rule(op: Op) -> ShardingRule:
    """`b s t -> t b s`: every dimension can be sharded."""
    dims = names(op.inputs[0])
    # One code for all these operators: run one on a tensor in which every dimension has its own
    # size, and read the permutation off the result.
    distinct_sizes = torch.empty([2 + i for i in range(len(dims))], device="meta")
    permuted = op.target(distinct_sizes, *op.args[1:], **op.kwargs)
    return sharding_rule(op, (dims,), (tuple(dims[size - 2] for size in permuted.shape),))


@rule_for(*overloads("expand", "broadcast_to"))
def expand(op: Op) -> ShardingRule:
    """`_ s -> b s`: expanded dimensions can be sharded, as every device expands to its shard."""
    dims = names(op.output)
    return sharding_rule(op, aligned(op, dims), (dims,), sizes=1)


@rule_for(*overloads("expand_as"))
def expand_as(op: Op) -> ShardingRule:
    """`_ s, b s -> b s`: every device expands to its shard of the second tensor."""
    dims = names(op.output)
    return sharding_rule(op, aligned(op, dims), (dims,))


@rule_for(*overloads("broadcast_tensors"))
def broadcast_tensors(op: Op) -> ShardingRule:
    """`_ s, b _ -> b s, b s`: every device expands the tensors to its shard of the result."""
    dims = names(op.output)
    outputs = (dims,) * len(op.outputs)
    return sharding_rule(op, aligned(op, dims), outputs, kernel=_expand_all)


def _expand_all(op: Op, local: Local) -> Callable[..., Any]:
    shape = local.output_shapes[0]
    return lambda tensors: [tensor.expand(shape) for tensor in tensors]


@rule_for(*overloads("repeat", "tile"))
def repeat_rule(op: Op) -> ShardingRule:
    """`b s -> _ b _`: new and repeated dimensions cannot be sharded."""
    dims = names(op.output)
    (x,) = aligned(op, dims)
    num_new = len(dims) - len(x)
    repeated = [
        i
        for i, n in enumerate(op.output.shape)
        if i < num_new or n != op.inputs[0].shape[i - num_new]
    ]
    dims = without(dims, *repeated)
    return sharding_rule(op, aligned(op, dims), (dims,))


@rule_for(aten.repeat_interleave.self_int)
def repeat_interleave(op: Op) -> ShardingRule:
    """`b s -> b s`: shard i of the repeated dimension becomes shard i of the result.

    Without `dim` the tensor is flattened, and nothing can be sharded.
    """
    dims, dim = names(op.output), argument(op, "dim")
    if dim is None:
        return sharding_rule(op, ((None,) * len(op.inputs[0].shape),), ((None,),))
    repeated = dims[dim]
    capacity = {repeated: op.inputs[0].shape[dim]} if repeated is not None else {}
    return sharding_rule(op, (dims,), (dims,), capacity=capacity, kernel=_without_output_size)


def _without_output_size(op: Op, local: Local) -> Callable[..., Any]:
    # PyTorch checks `output_size` against the result, and it is that of the full tensor.
    def repeated(*args: Any, output_size: int | None = None, **kwargs: Any) -> Any:
        return op.target(*args, **kwargs)

    return repeated


@rule_for(*overloads("view_as", "reshape_as"))
def reshape_as(op: Op) -> ShardingRule:
    """As `reshape_rule`; the second tensor only supplies the shape; its layout is the result's."""
    return _build_reshape_rule(op)


@rule_for(*overloads("unfold"))
def unfold(op: Op) -> ShardingRule:
    """`b _ -> b _ _`: windows overlap, so the unfolded dimension cannot be sharded."""
    dims = without(names(op.inputs[0]), argument(op, "dimension"))
    return sharding_rule(op, (dims,), ((*dims, None),))


@rule_for(*overloads("im2col", "col2im"))
def im2col_rule(op: Op) -> ShardingRule:
    """`b c _ _ -> b c _` and back; the windows of one channel are adjacent in `c`."""
    images, windows = op.inputs[0].shape, op.output.shape
    batch: Dims = ("b",) if max(len(images), len(windows)) == 4 else ()
    inputs, output = (
        (*batch, "c", *(None,) * (len(s) - len(batch) - 1)) for s in (images, windows)
    )
    channels = min(images[len(batch)], windows[len(batch)])
    return sharding_rule(op, (inputs,), (output,), capacity={"c": channels})


def _plane_and_diagonal(op: Op, dims: Dims) -> tuple[Dims, Dims]:
    """The dimensions of the matrices, unsharded in their plane, and of the diagonals, put last."""
    plane = [argument(op, name) % len(dims) for name in ("dim1", "dim2")]
    remaining = tuple(name for i, name in enumerate(dims) if i not in plane)
    return without(dims, *plane), (*remaining, None)


@rule_for(*overloads("diagonal"))
def diagonal(op: Op) -> ShardingRule:
    """`b _ _ -> b _`: all but the two dimensions of the plane can be sharded."""
    plane, line = _plane_and_diagonal(op, names(op.inputs[0]))
    return sharding_rule(op, (plane,), (line,))


@rule_for(*overloads("diagonal_scatter"))
def diagonal_scatter(op: Op) -> ShardingRule:
    """`b _ _, b _ -> b _ _`: a diagonal, the last dimension of the second input, is written."""
    plane, line = _plane_and_diagonal(op, names(op.output))
    return sharding_rule(op, (plane, line), (plane,))


@rule_for(*overloads("diag_embed"))
def diag_embed(op: Op) -> ShardingRule:
    """`b _ -> b _ _`: the last dimension becomes the diagonal of two new ones."""
    plane, line = _plane_and_diagonal(op, names(op.output))
    return sharding_rule(op, (line,), (plane,))


@rule_for(*overloads("tril", "triu"))
def triangle_rule(op: Op) -> ShardingRule:
    """`b _ _ -> b _ _`: a block of a triangle has another diagonal, so matrices are not sharded."""
    dims = without(names(op.output), -2, -1)
    return sharding_rule(op, (dims,), (dims,))


@rule_for(*overloads("view_as_complex"))
def view_as_complex_rule(op: Op) -> ShardingRule:
    """`b s _ -> b s`: the last dimension has the real and the imaginary part."""
    dims = names(op.output)
    return sharding_rule(op, ((*dims, None),), (dims,))


@rule_for(*overloads("view_as_real"))
def view_as_real_rule(op: Op) -> ShardingRule:
    """`b s -> b s _`: the new dimension has the real and the imaginary part."""
    dims = names(op.inputs[0])
    return sharding_rule(op, (dims,), ((*dims, None),))
