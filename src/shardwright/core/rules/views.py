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
    WithArguments,
    aligned_to_output,
    argument,
    factor_names,
    overloads,
    sharding_rule,
    unsharded_at,
)
from shardwright.core.rules.rule import Dims, LocalSharding, ShardingRule, rule_for

aten = torch.ops.aten


@rule_for(aten.view.default, aten.reshape.default, aten._unsafe_view.default)
def reshape_rule(op: Op) -> ShardingRule:
    """Reshape, `b s _ -> b s` if two dimensions are merged, `b s -> b s _` if one is split."""
    return _build_reshape_rule(op, sizes=1)


@rule_for(*overloads("flatten", "unflatten", "squeeze", "unsqueeze", "ravel"))
def reshape_to_local_shape(op: Op) -> ShardingRule:
    """Flatten, unflatten, squeeze or unsqueeze, `b s _ -> b s` or `b s -> b s _`, computed by a
    reshape to the local shape.

    The operator itself may be wrong on a shard: `squeeze` would drop a dimension of local size 1.
    """
    return _build_reshape_rule(op, kernel=_build_reshape_kernel)


def _build_reshape_rule(op: Op, **options: Any) -> ShardingRule:
    """Build the rule of a reshape; `options` are fields of `ShardingRule`."""
    source, target, capacity = reshape_segments(op.inputs[0].shape, op.output.shape)
    # The second tensor of `view_as` and `reshape_as` has the new shape.
    shape_inputs = [target for _ in op.inputs[1:]]
    return sharding_rule(op, (source, *shape_inputs), (target,), capacity=capacity, **options)


def _build_reshape_kernel(op: Op, local: LocalSharding) -> Callable[..., Any]:
    shape = local.output_shapes[0]
    return lambda x, *args, **kwargs: x.reshape(shape)


def reshape_segments(
    source: tuple[int, ...], target: tuple[int, ...]
) -> tuple[Dims, Dims, dict[str, int]]:
    """Return the factors of the dimensions that can be sharded in a reshape.

    Args:
        source, target: shapes before and after the reshape.

    Returns:
        The factors of `source`, the factors of `target`, and the capacity of each factor.
    """
    # Dimensions without a factor are not shardable: those of size 1, and the later ones of a
    # segment.
    source_factors: list[str | None] = [None] * len(source)
    target_factors: list[str | None] = [None] * len(target)
    capacity: dict[str, int] = {}
    # Without elements there is nothing to shard, and sizes of 0 would never agree below.
    if prod(source) == 0:
        return tuple(source_factors), tuple(target_factors), capacity
    # Dimensions of size 1 belong to no segment.
    ahead = [[i for i, size in enumerate(shape) if size > 1] for shape in (source, target)]
    while ahead[0]:
        i, j = ahead[0].pop(0), ahead[1].pop(0)
        # Shard boundaries must fall between rows of both shapes, so that only common divisors of
        # the leading sizes are valid.
        common = gcd(source[i], target[j])
        if common > 1:
            source_factors[i] = target_factors[j] = name = NAMES[len(capacity)]
            capacity[name] = common
        sizes = [source[i], target[j]]
        # A segment ends where both shapes have covered equally many elements.
        while sizes[0] != sizes[1]:
            if sizes[0] < sizes[1]:
                sizes[0] *= source[ahead[0].pop(0)]
            else:
                sizes[1] *= target[ahead[1].pop(0)]
    return tuple(source_factors), tuple(target_factors), capacity


@rule_for(*overloads("permute", "transpose", "t", "numpy_T", "mT", "movedim", "moveaxis"))
@rule_for(*overloads("swapaxes", "swapdims", "adjoint", "matrix_H", "mH"))
def permute_rule(op: Op) -> ShardingRule:
    """Permutation of dimensions, `b s t -> t b s`: every dimension can be sharded."""
    dims = factor_names(op.inputs[0])
    # One way for all these operators: run `op` on a tensor in which every dimension has another
    # size, and read the permutation off the shape of the result.
    distinct_sizes = torch.empty([2 + i for i in range(len(dims))], device="meta")
    permuted = op.target(distinct_sizes, *op.args[1:], **op.kwargs)
    return sharding_rule(op, (dims,), (tuple(dims[size - 2] for size in permuted.shape),))


@rule_for(*overloads("expand", "broadcast_to"))
def expand(op: Op) -> ShardingRule:
    """Expansion, `_ s -> b s`: every device expands to the shape of its shard of the output."""
    dims = factor_names(op.output)
    return sharding_rule(op, aligned_to_output(op, dims), (dims,), sizes=1)


@rule_for(*overloads("expand_as"))
def expand_as(op: Op) -> ShardingRule:
    """Expansion to the shape of a tensor, `_ s, b s -> b s`: every device expands to the shape of
    its shard of the second tensor."""
    dims = factor_names(op.output)
    return sharding_rule(op, aligned_to_output(op, dims), (dims,))


@rule_for(*overloads("broadcast_tensors"))
def broadcast_tensors(op: Op) -> ShardingRule:
    """Broadcast of several tensors, `_ s, b _ -> b s, b s`: every device expands to the shape of
    its shards of the outputs."""
    dims = factor_names(op.output)
    outputs = (dims,) * len(op.outputs)
    return sharding_rule(
        op, aligned_to_output(op, dims), outputs, kernel=_build_broadcast_tensors_kernel
    )


def _build_broadcast_tensors_kernel(op: Op, local: LocalSharding) -> Callable[..., Any]:
    shape = local.output_shapes[0]
    return lambda tensors: [tensor.expand(shape) for tensor in tensors]


@rule_for(*overloads("repeat", "tile"))
def repeat_rule(op: Op) -> ShardingRule:
    """Repetition of a tensor, `b _ -> b s`: a repeated dimension is sharded by repetitions, so the
    input is replicated in it."""
    dims = factor_names(op.output)
    (x,) = aligned_to_output(op, dims)
    # Dimensions that the repetition adds in front have size 1 before it.
    sizes = (*(1,) * (len(dims) - len(x)), *op.inputs[0].shape)
    repetitions = {
        name: new // old
        for name, new, old in zip(dims, op.output.shape, sizes, strict=True)
        if name is not None and new != old
    }
    unrepeated = tuple(None if name in repetitions else name for name in x)
    return sharding_rule(
        op, (unrepeated,), (dims,), capacity=repetitions, kernel=_build_repeat_kernel
    )


def _build_repeat_kernel(op: Op, local: LocalSharding) -> Callable[..., Any]:
    name = "repeats" if op.short_name == "repeat" else "dims"
    repeats = argument(op, name)
    # Both operators align their arguments on the right.
    repeats = [*(1,) * (len(op.output.shape) - len(repeats)), *repeats]
    for i, factor in enumerate(factor_names(op.output)):
        # The dimensions of the tensor that are not repeated are sharded themselves.
        if repeats[i] > 1:
            repeats[i] //= local.shard_counts.get(str(factor), 1)
    return WithArguments(op, **{name: repeats})


@rule_for(aten.repeat_interleave.self_int)
def repeat_interleave(op: Op) -> ShardingRule:
    """Repetition of elements, `b s -> b s`: every device repeats the elements of its shard.

    Without `dim` the tensor is flattened, and nothing can be sharded.
    """
    dims, dim = factor_names(op.output), argument(op, "dim")
    if dim is None:
        return sharding_rule(op, ((None,) * len(op.inputs[0].shape),), ((None,),))
    repeated = dims[dim]
    capacity = {repeated: op.inputs[0].shape[dim]} if repeated is not None else {}
    return sharding_rule(
        op, (dims,), (dims,), capacity=capacity, kernel=_build_repeat_interleave_kernel
    )


@rule_for(aten.repeat_interleave.self_Tensor)
def repeat_interleave_unequally(op: Op) -> ShardingRule:
    """Repetition of elements by a tensor of counts, `b _, _ -> b _`: all but the repeated dimension
    can be sharded."""
    x, repeats = op.inputs
    dim = argument(op, "dim")
    # Without `dim` the tensor is flattened.
    dims = (None,) * len(x.shape) if dim is None else unsharded_at(factor_names(x), dim)
    output = (None,) if dim is None else dims
    return sharding_rule(op, (dims, (None,) * len(repeats.shape)), (output,))


def _build_repeat_interleave_kernel(op: Op, local: LocalSharding) -> Callable[..., Any]:
    # PyTorch checks the local result against `output_size`, which is that of the full tensor.
    def repeated(*args: Any, output_size: int | None = None, **kwargs: Any) -> Any:
        return op.target(*args, **kwargs)

    return repeated


@rule_for(*overloads("view_as", "reshape_as"))
def reshape_as(op: Op) -> ShardingRule:
    """Reshape to the shape of a tensor, `b s _, b s -> b s`: the second tensor, which only supplies
    the shape, is sharded like the output."""
    return _build_reshape_rule(op)


def _assign_matrix_and_diagonal_factors(op: Op, dims: Dims) -> tuple[Dims, Dims]:
    """Return the factors of the tensor of matrices and of the tensor of diagonals.

    The two dimensions of a matrix and the dimension of its diagonal have no factor.

    Args:
        dims: factors of the tensor of matrices.
    """
    plane = [argument(op, name) % len(dims) for name in ("dim1", "dim2")]
    remaining = tuple(name for i, name in enumerate(dims) if i not in plane)
    return unsharded_at(dims, *plane), (*remaining, None)


@rule_for(*overloads("diagonal"))
def diagonal(op: Op) -> ShardingRule:
    """Diagonals of matrices, `b _ _ -> b _`: only batch dimensions can be sharded."""
    plane, line = _assign_matrix_and_diagonal_factors(op, factor_names(op.inputs[0]))
    return sharding_rule(op, (plane,), (line,))


@rule_for(*overloads("diagonal_scatter"))
def diagonal_scatter(op: Op) -> ShardingRule:
    """Write of diagonals into matrices, `b _ _, b _ -> b _ _`: only batch dimensions can be
    sharded."""
    plane, line = _assign_matrix_and_diagonal_factors(op, factor_names(op.output))
    return sharding_rule(op, (plane, line), (plane,))


@rule_for(*overloads("diag_embed"))
def diag_embed(op: Op) -> ShardingRule:
    """Matrices from diagonals, `b _ -> b _ _`: only batch dimensions can be sharded."""
    plane, line = _assign_matrix_and_diagonal_factors(op, factor_names(op.output))
    return sharding_rule(op, (line,), (plane,))


@rule_for(*overloads("tril", "triu"))
def triangle_rule(op: Op) -> ShardingRule:
    """Triangles of matrices (`tril`, `triu`), `b s t -> b s t`: every device shifts the diagonal by
    the position of its block."""
    dims = factor_names(op.output)
    return sharding_rule(op, (dims,), (dims,), kernel=_build_triangle_kernel)


def _build_triangle_kernel(op: Op, local: LocalSharding) -> Callable[..., Any]:
    row, column = (
        local.index(factor) * size if local.shard_counts.get(factor, 1) > 1 else 0
        for factor, size in zip(
            factor_names(op.output)[-2:], local.output_shapes[0][-2:], strict=True
        )
        if factor is not None
    )
    return WithArguments(op, diagonal=argument(op, "diagonal") + row - column)


@rule_for(*overloads("view_as_complex"))
def view_as_complex_rule(op: Op) -> ShardingRule:
    """Complex view, `b s _ -> b s`: the last dimension, real and imaginary part, cannot be
    sharded."""
    dims = factor_names(op.output)
    return sharding_rule(op, ((*dims, None),), (dims,))


@rule_for(*overloads("view_as_real"))
def view_as_real_rule(op: Op) -> ShardingRule:
    """Real view, `b s -> b s _`: all dimensions but the new one, real and imaginary part, can be
    sharded."""
    dims = factor_names(op.inputs[0])
    return sharding_rule(op, (dims,), ((*dims, None),))
