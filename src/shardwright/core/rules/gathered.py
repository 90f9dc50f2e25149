"""Operators that combine elements along sharded dimensions: each device computes local statistics,
all-gathers them, and computes its output.

A sum over a sharded dimension is a partial sum, which a layout can express. A maximum, a norm or a
softmax is not linear, but other devices need only a few numbers per row of a shard, its
*statistics*: the maximum, norm or log-sum-exp of the row in the shard. The kernel all-gathers the
statistics of all shards and combines them. The backward pass needs no communication if every device
computes the same output, and one reduce-scatter if the output is sharded like the input.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwright.core.graph.graph import Op
from shardwright.core.rules.loss import accumulation_dtype
from shardwright.core.rules.notation import NAMES, argument_binder, call_arguments, sharding_rule
from shardwright.core.rules.rule import GATHER, Dims, LocalSharding, Reduction, ShardingRule


@dataclass(frozen=True)
class InputShard:
    """The local shard of an operator's input, and its position among all shards.

    Args:
        x: the local tensor, in the dtype in which PyTorch accumulates.
        dims: dimensions along which the operator combines elements.
        shape: global shape of the input.
        offsets: global index of the first local element, for each of `dims`.
        shard_index: index of this shard among all shards.
        num_shards: number of shards.
        arguments: arguments of the call by name.
    """

    x: Tensor
    dims: tuple[int, ...]
    shape: tuple[int, ...]
    offsets: tuple[Any, ...]
    shard_index: Any
    num_shards: int
    arguments: Mapping[str, Any]


Statistics = Sequence[Tensor]
"""Tensors with one value per row, or several *candidates*: the shape of the local shard, with size
1 or the number of candidates in the combined dimensions.

All-gathered statistics have one more dimension, the first: the index of the shard.
"""


@dataclass(frozen=True)
class ShardCombination:
    """An operator along sharded dimensions, computed from all-gathered statistics of the shards.

    Args:
        local_statistics: returns the statistics of the local shard.
        combine: returns the outputs, given the local shard and the statistics of all shards.
        num_values: number of statistics of dtype `statistic_dtype`.
        num_indices: number of further statistics that are indices (int64).
        keeps_dims: whether the outputs are sharded along `dims` like the input.
        statistic_dtype: dtype of these statistics; None for the dtype in which PyTorch accumulates.
        num_candidates: returns the size of a statistic along the combined dimension, given the
            arguments of the call and the size of the full dimension; at most the size of a shard.
    """

    local_statistics: Callable[[InputShard], Statistics]
    combine: Callable[[InputShard, Statistics], Tensor | Sequence[Tensor]]
    num_values: int = 1
    num_indices: int = 0
    keeps_dims: bool = False
    statistic_dtype: torch.dtype | None = None
    num_candidates: Callable[[Mapping[str, Any], int], int] = lambda arguments, size: 1

    def rule(
        self,
        op: Op,
        inputs: Sequence[Dims],
        outputs: Sequence[Dims],
        dims: tuple[int, ...],
    ) -> ShardingRule:
        """Return the rule of an operator that combines elements along the dimensions `dims` of its
        input.

        Args:
            inputs, outputs: the factor of each dimension of each tensor; None if it cannot be
                sharded.
        """
        combined_factors = (inputs[0][dim] for dim in dims)
        return sharding_rule(
            op,
            inputs,
            outputs,
            # All devices combine the same statistics, so outputs without the combined dimensions
            # are equal.
            complete=frozenset() if self.keeps_dims else frozenset(filter(None, combined_factors)),
            kernel=lambda op, local: self._build_gathering_kernel(op, local, dims),
            reductions=lambda op, shard_counts: self._make_statistics_all_gathers(
                op, shard_counts, dims
            ),
        )

    def _make_statistics_all_gathers(
        self, op: Op, shard_counts: Mapping[str, int], dims: tuple[int, ...]
    ) -> tuple[Reduction, ...]:
        x, factors = op.inputs[0], _find_sharded_factors(dims, shard_counts)
        if not factors:
            return ()
        # Builders name the input by `factor_names` without exclusions, so dimension i has the
        # factor `NAMES[i]`.
        arguments = call_arguments(op)
        rows = [size // shard_counts.get(NAMES[dim], 1) for dim, size in enumerate(x.shape)]
        for dim in dims:
            rows[dim] = min(rows[dim], self.num_candidates(arguments, x.shape[dim]))
        count = prod(shard_counts[factor] for factor in factors)
        values = Reduction(
            *(factors, GATHER, (count, self.num_values, *rows), self._choose_statistics_dtype(op)),
            # From a sharded output each device has one term of the gradient of the statistics; from
            # equal outputs each has all of it.
            varying=self.keeps_dims,
            # Indices and truth values have no gradient.
            differentiable=x.differentiable and op.outputs[0].dtype.is_floating_point,
        )
        if not self.num_indices:
            return (values,)
        indices = (count, self.num_indices, *rows)
        return values, Reduction(factors, GATHER, indices, torch.int64, differentiable=False)

    def _choose_statistics_dtype(self, op: Op) -> torch.dtype:
        if self.statistic_dtype is not None:
            return self.statistic_dtype
        dtype = call_arguments(op).get("dtype") or op.inputs[0].dtype
        is_integer = not (dtype.is_floating_point or dtype.is_complex)
        # PyTorch accumulates integers in the dtype of the result: int64 in a product of int8.
        return op.outputs[0].dtype if is_integer else accumulation_dtype(dtype)

    def _build_gathering_kernel(
        self, op: Op, local: LocalSharding, dims: tuple[int, ...]
    ) -> Callable[..., Any]:
        factors = _find_sharded_factors(dims, local.shard_counts)
        if not factors:
            return op.target
        shape, bind, dtype = (
            op.inputs[0].shape,
            argument_binder(op),
            self._choose_statistics_dtype(op),
        )
        counts = [local.shard_counts.get(NAMES[dim], 1) for dim in dims]
        numbers = [
            local.index(NAMES[dim]) if n > 1 else 0 for dim, n in zip(dims, counts, strict=True)
        ]
        offsets = tuple(
            number * (shape[dim] // n) for dim, n, number in zip(dims, counts, numbers, strict=True)
        )
        # Row-major over the sharded dimensions, the order in which an all-gather concatenates
        # shards.
        position: Any = 0
        for number, n in zip(numbers, counts, strict=True):
            position = position * n + number

        def run(*args: Any, **kwargs: Any) -> Any:
            arguments = bind(args, kwargs)
            x = next(iter(arguments.values()))
            # A statistic with a dtype of its own, as of `any`, is computed from the input as it is.
            x = x if self.statistic_dtype is not None else x.to(dtype)
            shard = InputShard(x, dims, shape, offsets, position, prod(counts), arguments)
            gathered = self._all_gather_statistics(local, self.local_statistics(shard))
            outputs = self.combine(shard, gathered)
            outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
            results = tuple(
                # Statistics have size 1 in the dimensions that an operator removes.
                out.reshape(size).to(value.dtype)
                for out, size, value in zip(outputs, local.output_shapes, op.outputs, strict=True)
            )
            return results if len(results) > 1 else results[0]

        return run

    def _all_gather_statistics(self, local: LocalSharding, statistics: Statistics) -> Statistics:
        # One all-gather carries all statistics; the first dimension counts the shards.
        values = local.reduce[0](torch.stack(tuple(statistics[: self.num_values])).unsqueeze(0))
        gathered = list(values.unbind(1))
        if self.num_indices:
            # In a collective of their own: a floating dtype would round large indices.
            indices = local.reduce[1](
                torch.stack(tuple(statistics[self.num_values :])).unsqueeze(0)
            )
            gathered.extend(indices.unbind(1))
        return gathered


def _find_sharded_factors(
    dims: tuple[int, ...], shard_counts: Mapping[str, int]
) -> tuple[str, ...]:
    return tuple(NAMES[dim] for dim in dims if shard_counts.get(NAMES[dim], 1) > 1)
