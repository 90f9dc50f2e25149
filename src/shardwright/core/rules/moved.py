"""Operators that join, split or slice a sharded dimension.

Pieces are sharded like the dimension of which they are parts. The rows of a shard of the dimension
are consecutive, so they belong to other shards of the pieces: devices send each other the rows that
change their shard, as many as a shard has at most.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import gcd
from typing import Any

import torch
from torch import Tensor

from shardwright.core.graph.graph import Op, Value
from shardwright.core.layout.collective_spec import MovedRows
from shardwright.core.rules.notation import (
    argument,
    factor_names,
    overloads,
    sharding_rule,
    unsharded_at,
)
from shardwright.core.rules.rule import (
    MOVE,
    Dims,
    LocalSharding,
    Reduction,
    ShardingRule,
    TensorFunction,
    rule_for,
)
from shardwright.core.rules.windowed import shard_shape

aten = torch.ops.aten

_MOST_BLOCKS = 256
"""Number of blocks of a shard above which a dimension is not sharded; each block is copied by
itself."""


@dataclass(frozen=True)
class Pieces:
    """Consecutive pieces of one dimension of a tensor.

    Args:
        tensor: the tensor.
        dim: the dimension.
        sizes: number of rows of each piece.
    """

    tensor: Value
    dim: int
    sizes: tuple[int, ...]

    @property
    def capacity(self) -> int:
        """The number that the shard count must divide; 1 if the dimension cannot be sharded."""
        common = gcd(*self.sizes)
        return common if common and sum(self.sizes) // common <= _MOST_BLOCKS else 1

    def rule(
        self,
        op: Op,
        inputs: Callable[[Dims], Sequence[Dims]],
        outputs: Callable[[Dims], Sequence[Dims]],
        kernel: Callable[[TensorFunction, LocalSharding], Callable[..., Any]],
        *,
        joins: bool = False,
    ) -> ShardingRule:
        """Return the rule of an operator on pieces.

        Args:
            inputs, outputs: return the factors of the tensors, given those of `tensor`.
            kernel: returns the local function, given the move of the rows of `tensor`.
            joins: whether `tensor` is made of the pieces, not divided into them.
        """
        dims = factor_names(self.tensor)
        if self.capacity == 1:
            dims = unsharded_at(dims, self.dim)
            return sharding_rule(op, inputs(dims), outputs(dims))
        factor = dims[self.dim] or ""

        def moves(op: Op, shard_counts: Mapping[str, int]) -> tuple[Reduction, ...]:
            shards = shard_counts.get(factor, 1)
            if shards == 1:
                return ()
            # The tensor of `op`, as operators that differ in what is differentiable share a rule.
            value = op.output if joins else op.inputs[0]
            shape = tuple(shard_shape(value, dims, shard_counts))
            # `varying`: the gradients of moved rows are sent back.
            return (
                Reduction(
                    *((factor,), MOVE, shape, value.dtype, True, value.differentiable),
                    moved=_moved_rows(self.dim, self.sizes, shards, joins),
                ),
            )

        def build(op: Op, local: LocalSharding) -> Callable[..., Any]:
            return kernel(local.reduce[0], local) if local.reduce else op.target

        return sharding_rule(
            op,
            inputs(dims),
            outputs(dims),
            capacity={factor: self.capacity},
            kernel=build,
            reductions=moves,
        )


@lru_cache(maxsize=1 << 10)
def _moved_rows(dim: int, sizes: tuple[int, ...], shards: int, joins: bool) -> MovedRows:
    """Return the rows that change their shard if a dimension is split into pieces of `sizes` or, if
    `joins`, made of them."""
    # The largest blocks of which each piece has equally many in each shard.
    common = gcd(*sizes)
    units = [size // common for size in sizes]
    starts = [start * shards for start in accumulate(units, initial=0)]
    of_whole = tuple(tuple(range(i * sum(units), (i + 1) * sum(units))) for i in range(shards))
    of_pieces = tuple(
        tuple(
            block
            for start, count in zip(starts, units, strict=False)
            for block in range(start + i * count, start + (i + 1) * count)
        )
        for i in range(shards)
    )
    return MovedRows(dim, *((of_pieces, of_whole) if joins else (of_whole, of_pieces)))


@rule_for(*overloads("cat", "concat", "concatenate"))
def cat(op: Op) -> ShardingRule:
    """Concatenation, `b s, b s -> b s`.

    As in torch, some inputs may be empty one-dimensional tensors; the concatenated dimension then
    cannot be sharded.
    """
    rank = len(op.output.shape)
    dim = argument(op, "dim") % rank
    sizes = tuple(v.shape[dim] if len(v.shape) == rank else 1 for v in op.inputs)

    def kernel(move: TensorFunction, local: LocalSharding) -> Callable[..., Tensor]:
        return lambda *args, **kwargs: move(op.target(*args, **kwargs))

    return Pieces(op.output, dim, sizes).rule(
        op,
        lambda dims: [dims if len(v.shape) == rank else (None,) for v in op.inputs],
        lambda dims: (dims,),
        kernel,
        joins=True,
    )


@rule_for(*overloads("split_with_sizes", "chunk", "unsafe_chunk", "unsafe_split"))
@rule_for(*overloads("unsafe_split_with_sizes"))
@rule_for(aten.split.Tensor, aten.split.sizes, aten.split.default, *overloads("tensor_split"))
def split(op: Op) -> ShardingRule:
    """Split, `b s -> b s, b s`."""
    x = op.inputs[0]
    dim = argument(op, "dim") % len(x.shape)
    # `tensor_split` may get its sections as a tensor.
    sections: list[Dims] = [(None,) * len(value.shape) for value in op.inputs[1:]]

    def kernel(move: TensorFunction, local: LocalSharding) -> Callable[..., Any]:
        sizes = [shape[dim] for shape in local.output_shapes]
        return lambda x, *args, **kwargs: torch.split(move(x), sizes, dim)

    return Pieces(x, dim, tuple(value.shape[dim] for value in op.outputs)).rule(
        op, lambda dims: [dims, *sections], lambda dims: (dims,) * len(op.outputs), kernel
    )


def slice_of_consecutive_rows(op: Op, dim: int, start: int) -> ShardingRule:
    """Return the rule of a slice, `b s -> b s`, whose remaining rows move too.

    Args:
        dim: the sliced dimension.
        start: index of the first row.
    """
    x, count = op.inputs[0], op.output.shape[dim]
    sizes = start, count, x.shape[dim] - start - count

    def kernel(move: TensorFunction, local: LocalSharding) -> Callable[..., Tensor]:
        rows = local.output_shapes[0][dim]
        first = start * rows // count
        return lambda x, *args, **kwargs: move(x).narrow(dim, first, rows)

    return Pieces(x, dim, sizes if count else (1,)).rule(
        op, lambda dims: (dims,), lambda dims: (dims,), kernel
    )


@rule_for(*overloads("glu"))
def glu(op: Op) -> ShardingRule:
    """Gated linear unit, `b s -> b s`, the product of two halves."""
    x = op.inputs[0]
    dim = argument(op, "dim") % len(x.shape)

    def kernel(move: TensorFunction, local: LocalSharding) -> Callable[..., Tensor]:
        return lambda x, *args, **kwargs: op.target(move(x), *args, **kwargs)

    return Pieces(x, dim, (op.output.shape[dim],) * 2).rule(
        op, lambda dims: (dims,), lambda dims: (dims,), kernel
    )
