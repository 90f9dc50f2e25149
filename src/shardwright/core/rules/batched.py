"""Operators that process each item of a batch separately: linear algebra, Fourier transforms, ...

Linear algebra operates on the last dimensions of its tensors; leading dimensions are broadcast and
can be sharded. The transformed dimensions of a Fourier transform cannot be sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from typing import Any

import torch
from torch import Tensor

from shardwright.core.graph.graph import Op
from shardwright.core.rules.notation import (
    NAMES,
    WithArguments,
    argument,
    factor_names,
    from_notation,
    overloads,
    sharding_rule,
    unsharded_at,
)
from shardwright.core.rules.rule import (
    Dims,
    LocalSharding,
    Reduction,
    RuleMaker,
    ShardingRule,
    rule_for,
)

aten = torch.ops.aten

_DISTANCES = "... i k, ... j k -> ... i j"

LINEAR_ALGEBRA = {
    (2,): (
        *("cholesky", "cholesky_inverse", "linalg_cholesky", "linalg_cholesky_ex", "linalg_det"),
        *("linalg_eig", "linalg_eigh", "linalg_eigvals", "linalg_eigvalsh", "linalg_inv"),
        *("linalg_inv_ex", "linalg_lu", "linalg_lu_factor", "linalg_lu_factor_ex", "logdet"),
        *("linalg_matrix_exp", "linalg_matrix_power", "linalg_qr", "linalg_slogdet", "qr", "svd"),
        *("linalg_svd", "linalg_svdvals", "matrix_exp", "pinverse"),
        # What `torch.func` differentiates instead of those of equal names.
        *("_linalg_det", "_linalg_eigh", "_linalg_eigvals", "_linalg_slogdet", "_linalg_svd"),
    ),
    # The tolerances `atol` and `rtol` are one number per matrix.
    (2, 0, 0): ("linalg_pinv",),
    (2, 1): ("linalg_householder_product", "lu_unpack"),
    # Householder coefficients are one vector per matrix.
    (2, 1, 2): ("ormqr",),
}
"""Names of ATen operators, by the number of trailing non-batch dimensions of each input."""

SOLVERS = {
    "cholesky_solve": "... _ j, ... _ _ -> ... _ j",
    "linalg_lu_solve": "... _ _, ... _, ... _ j -> ... _ j",
    "linalg_solve": "... _ _, ... _ j -> ... _ j",
    "linalg_solve_ex": "... _ _, ... _ j -> ... _ j, ...",
    "_linalg_solve_ex": "... _ _, ... _ j -> ... _ j, ... _ _, ... _, ...",
    "linalg_solve_triangular": "... _ _, ... _ j -> ... _ j",
    "lu_solve": "... _ j, ... _ _, ... _ -> ... _ j",
    "triangular_solve": "... _ j, ... _ _ -> ... _ j, ... _ _",
}
"""Notation of the solvers of A X = B, in which B is a matrix, by operator name."""


def _make_batched_rule_builder(*item_ranks: int) -> RuleMaker:
    """Make a builder of rules `b s _ _, b s _ -> b s _`: batch dimensions can be sharded.

    Args:
        item_ranks: for each input, the number of trailing dimensions that belong to an item.
    """

    def rule(op: Op) -> ShardingRule | None:
        # Optional inputs may be missing.
        counts = item_ranks[: len(op.inputs)]
        ranks = [len(v.shape) - n for v, n in zip(op.inputs, counts, strict=True)]
        batch: Dims = tuple(NAMES[: max(ranks)])
        # Calls of other shapes, such as a vector where the table has a matrix, have no rule.
        if min(ranks) < 0 or any(len(v.shape) < len(batch) for v in op.outputs):
            return None
        inputs = [
            # Aligned on the right, as batch dimensions are broadcast.
            (*batch[len(batch) - rank :], *(None,) * n)
            for rank, n in zip(ranks, counts, strict=True)
        ]
        outputs = [(*batch, *(None,) * (len(v.shape) - len(batch))) for v in op.outputs]
        return sharding_rule(op, inputs, outputs)

    return rule


for _item_ranks, _operators in LINEAR_ALGEBRA.items():
    rule_for(*overloads(*_operators))(_make_batched_rule_builder(*_item_ranks))
for _spatial_dims in (2, 3):
    # The second input is one random vector per channel, which places the windows.
    rule_for(*overloads(f"fractional_max_pool{_spatial_dims}d"))(
        _make_batched_rule_builder(_spatial_dims, 1)
    )
    # Indices are positions in the image of their channel, so that a channel stays whole.
    rule_for(*overloads(f"max_unpool{_spatial_dims}d"))(
        _make_batched_rule_builder(_spatial_dims, _spatial_dims)
    )


@rule_for(*overloads(*SOLVERS))
def solve(op: Op) -> ShardingRule:
    """Linear systems A X = B, `b _ _, b _ j -> b _ j`: the batch and the columns of B can be
    sharded.

    For X A = B (`left=False`) these are the rows of B, `b _ _, b j _ -> b j _`. The right-hand side
    of `torch.linalg.solve` is a batch of vectors, `b _ _, b _ -> b _`, if its shape is
    `left.shape[:-1]`.
    """
    notation = SOLVERS[op.short_name]
    if "linalg_solve" in op.short_name and op.short_name != "linalg_solve_triangular":
        matrix, rhs = (value.shape for value in op.inputs)
        # `torch.linalg.solve` prefers vectors where both readings of the shape are possible.
        if len(rhs) == 1 or rhs == matrix[:-1]:
            return from_notation(notation.replace("_ j", "_"), op)
    return from_notation(
        notation if argument(op, "left", True) else notation.replace("_ j", "j _"), op
    )


@rule_for(*overloads("cdist"))
def distances(op: Op) -> ShardingRule:
    """Pairwise distances, `... i k, ... j k -> ... i j`: vectors of both sets can be sharded, and
    features in norms of finite order from 1 on, whose powers are sums over features."""
    if not 1 <= argument(op, "p") < inf:
        return from_notation("... i _, ... j _ -> ... i j", op)
    return from_notation(
        *(_DISTANCES, op),
        complete=frozenset("k"),
        kernel=_build_distance_kernel,
        reductions=_make_distance_reductions,
    )


def _build_distance_kernel(op: Op, local: LocalSharding) -> Callable[..., Any]:
    if local.shard_counts.get("k", 1) == 1:
        return op.target
    order = argument(op, "p")

    def run(*args: Any, **kwargs: Any) -> Tensor:
        total = local.reduce[0](op.target(*args, **kwargs).pow(order))
        # The gradient of a distance of 0 is 0, that of a root is infinite.
        is_zero = total == 0
        return total.masked_fill(is_zero, 1).pow(1 / order).masked_fill(is_zero, 0)

    return run


def _make_distance_reductions(op: Op, shard_counts: Mapping[str, int]) -> tuple[Reduction, ...]:
    if shard_counts.get("k", 1) == 1:
        return ()
    (shape,) = from_notation(_DISTANCES, op).local_output_shapes(op, shard_counts)
    return (Reduction(("k",), "sum", shape, op.output.dtype),)


@rule_for(*overloads("grid_sampler", "grid_sampler_2d", "grid_sampler_3d"))
def sample_grid(op: Op) -> ShardingRule:
    """Grid sampling, `b c _ _, b s t _ -> b c s t`: a sampling point may read any pixel, so pixels
    cannot be sharded."""
    space = ("s", "t", "u")[: len(op.output.shape) - 2]
    # The last dimension of the grid holds the coordinates of a sampling point.
    image, grid = ("b", "c", *(None,) * len(space)), ("b", *space, None)
    return sharding_rule(op, (image, grid), (("b", "c", *space),))


@rule_for(*overloads("affine_grid_generator"))
def affine_grid(op: Op) -> ShardingRule:
    """Affine grids, `b _ _ -> b _ _ _`: the batch of affine matrices can be sharded; each yields
    one grid."""

    def kernel(op: Op, local: LocalSharding) -> Callable[..., Any]:
        # `size` starts with the number of matrices of the full batch.
        return WithArguments(op, size=[local.output_shapes[0][0], *argument(op, "size")[1:]])

    outputs = (("b", *(None,) * (len(op.output.shape) - 1)),)
    return sharding_rule(op, (("b", None, None),), outputs, kernel=kernel)


_TRANSFORM_TYPES = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
_TRANSFORMS = [f"fft_{name}{dims}" for name in _TRANSFORM_TYPES for dims in ("", "2", "n")]


@rule_for(*overloads(*_TRANSFORMS))
def fourier(op: Op) -> ShardingRule:
    """Fourier transform, `b s _ -> b s _`: all but the transformed dimensions can be sharded."""
    dims, count = argument(op, "dim"), len(op.output.shape)
    if dims is None:
        # As in torch: `s` gives the sizes of the last dimensions; without it all are transformed.
        sizes = argument(op, "s")
        dims = range(-(count if sizes is None else len(sizes)), 0)
    free = unsharded_at(factor_names(op.output), *([dims] if isinstance(dims, int) else dims))
    return sharding_rule(op, (free,), (free,))


@rule_for(*overloads("stft", "istft"))
def short_fourier(op: Op) -> ShardingRule:
    """Short-time Fourier transform, `b _ -> b _ _` (`stft`), `b _ _ -> b _` (`istft`): the batch
    can be sharded; the window is replicated."""
    inverse = op.target is aten.istft.default
    # A single signal has no batch dimension.
    batch: Dims = ("b",)[: len(op.inputs[0].shape) - (2 if inverse else 1)]
    values = [(v, batch if v is op.inputs[0] else ()) for v in op.inputs]
    signal, *windows = [(*lead, *(None,) * (len(v.shape) - len(lead))) for v, lead in values]
    result = (*batch, *(None,) * (len(op.output.shape) - len(batch)))
    return sharding_rule(op, (signal, *windows), (result,))
