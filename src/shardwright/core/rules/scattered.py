"""Maxima, minima and products of scattered rows that are sharded, as of messages along edges.

Each device reduces its rows. A product is that of all devices' products, which are all-gathered. A
maximum is all-reduced; its gradient is shared by all rows that equal it, on whatever device, so
their number is all-reduced too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.core.graph.graph import Op
from shardwright.core.rules.loss import accumulation_dtype
from shardwright.core.rules.notation import argument
from shardwright.core.rules.rule import GATHER, Dims, LocalSharding, Reduce, Reduction

EXTREMES = ("amax", "amin")


def neutral_element(reduce: str, dtype: torch.dtype) -> float:
    """Return the number that does not change the result of `scatter_reduce`."""
    if reduce not in EXTREMES:
        return 1 if reduce == "prod" else 0
    if dtype.is_floating_point:
        return -float("inf") if reduce == "amax" else float("inf")
    limits = torch.iinfo(dtype)
    return limits.min if reduce == "amax" else limits.max


@dataclass(frozen=True)
class ScatteredRows:
    """The reduction of `scatter_reduce`, whose rows are sharded.

    Args:
        reduce: `amax`, `amin` or `prod`.
        rows: factor of the rows.
        indexed: factor of the dimension into which rows are scattered.
    """

    reduce: str
    rows: str
    indexed: str

    def reductions(
        self, op: Op, dims: Dims, shard_counts: Mapping[str, int]
    ) -> tuple[Reduction, ...]:
        """Return the collectives of the kernel.

        Args:
            dims: factor of each dimension of the output.
            shard_counts: number of shards by factor.
        """
        shards, x = shard_counts.get(self.rows, 1), op.output
        if shards == 1:
            return ()
        counts = [shard_counts.get(name or "", 1) for name in dims]
        shape = tuple(
            # A kernel adds a row to a sharded dimension, for the indices of other devices.
            size // count + (name == self.indexed and count > 1)
            for size, count, name in zip(x.shape, counts, dims, strict=True)
        )
        if self.reduce == "prod":
            products = (shards, *shape)
            return (
                Reduction((self.rows,), GATHER, products, x.dtype, differentiable=x.differentiable),
            )
        extremes = Reduction((self.rows,), "max", shape, x.dtype, differentiable=False)
        if not x.dtype.is_floating_point:
            return (extremes,)
        count_dtype = accumulation_dtype(x.dtype)
        return extremes, Reduction((self.rows,), "sum", shape, count_dtype, differentiable=False)

    def target(self, op: Op, local: LocalSharding) -> Callable[..., Tensor]:
        """Return the operator that also reduces over devices; on all devices but the first of the
        rows, its first argument holds neutral elements."""
        if not local.reduce:
            return op.target
        if self.reduce == "prod":
            (gather,) = local.reduce
            return lambda **arguments: gather(op.target(**arguments).unsqueeze(0)).prod(0)
        index, extremes, *ties = local.index(self.rows), *local.reduce
        is_max = argument(op, "reduce") == "amax"

        def run(**arguments: Any) -> Tensor:
            x, dim, rows = (arguments[name] for name in ("self", "dim", "index"))
            # Elements of the source beyond the indices are not read.
            source = arguments["src"][tuple(map(slice, rows.shape))]
            with torch.no_grad():
                value = op.target(**arguments)
                has_nan = value.isnan()
                value = extremes(value) if is_max else _negate(extremes(_negate(value)))
            if not ties:
                return value
            is_first = torch.zeros((), dtype=torch.int64, device=x.device).add(index).eq(0)
            return _share_gradient(x, source, dim, rows, value, has_nan, is_first, ties[0])

        return run


def _negate(x: Tensor) -> Tensor:
    # The negative of the least integer is the least integer; `~x` reverses the order of all.
    return -x if x.dtype.is_floating_point else ~x


def _share_gradient(
    x: Tensor,
    source: Tensor,
    dim: int,
    index: Tensor,
    value: Tensor,
    has_nan: Tensor,
    is_first: Tensor,
    reduce_sum: Reduce,
) -> Tensor:
    """Return `value`, whose gradient is shared equally by the elements that equal it.

    Args:
        x, source, dim, index: arguments of `scatter_reduce` on this device.
        value: the extremes over all devices.
        has_nan: where this device has a NaN, which a maximum of devices may miss.
        is_first: whether the elements of `x` take part.
        reduce_sum: sum over all devices.
    """
    with torch.no_grad():
        dtype = accumulation_dtype(x.dtype)
        x_ties = ((x == value) & is_first).to(dtype)
        source_ties = (source == value.gather(dim, index)).to(dtype)
        count = x_ties.scatter_add(dim, index, source_ties).masked_fill(has_nan, float("nan"))
        total = reduce_sum(count)
        value = value.masked_fill(total.isnan(), float("nan"))
        weights = x_ties / total, source_ties / total.gather(dim, index)
    out: Tensor = _ShareGradient.apply(x, source, value, *weights, dim, index)  # type: ignore[no-untyped-call]
    return out


class _ShareGradient(torch.autograd.Function):
    """Return `value`; in the backward pass, multiply its gradient by the weights of `x` and, at
    `index`, of `source`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        source: Tensor,
        value: Tensor,
        x_weight: Tensor,
        source_weight: Tensor,
        dim: int,
        index: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x_weight, source_weight, index)
        ctx.dim = dim
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_weight, source_weight, index = ctx.saved_tensors
        of_rows = (gradients[0].gather(ctx.dim, index) * source_weight).to(gradients[0].dtype)
        of_x = (gradients[0] * x_weight).to(gradients[0].dtype)
        return of_x, of_rows, None, None, None, None, None
