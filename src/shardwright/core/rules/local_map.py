"""`local_map` calls, which run unchanged on local tensors: declared dimension names can be sharded.

Parameters and buffers are replicated, so their gradients are partial sums. Results declared as a
mean over shards, and buffers that the call updates, such as running statistics, are divided by the
number of shards on each device and then summed.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwright.core.graph.graph import Op
from shardwright.core.graph.local_declaration import Declaration, DimNames
from shardwright.core.graph.local_gradients import run_with_connected_inputs
from shardwright.core.graph.local_map import LocalCall
from shardwright.core.rules.notation import sharding_rule
from shardwright.core.rules.rule import LocalSharding, MainFactors, ShardingRule, rule_for


@rule_for(LocalCall)
def local_map_rule(op: Op) -> ShardingRule:
    """Build the rule of a `local_map` call, with the declared dimension names for inputs and
    outputs, and with replicated parameters and buffers."""
    call: LocalCall = op.target  # type: ignore[assignment]
    declared = call.declaration
    state = [(None,) * len(value.shape) for value in op.inputs[len(declared.inputs) :]]
    factors = _list_shardable_dim_names(declared)
    buffers = [(None,) * len(value.shape) for value in op.outputs[len(declared.outputs) :]]
    return sharding_rule(
        op,
        (*declared.input_dims, *state),
        (*declared.output_dims, *buffers),
        reduced=factors,
        kernel=_build_local_map_kernel,
        # Parameters and buffers follow the declared inputs.
        main=MainFactors(
            dict.fromkeys(factors, "I"), weight=len(declared.inputs) if state else None
        ),
        random=call.random,
    )


def _list_shardable_dim_names(declared: Declaration) -> list[str]:
    """Return the dimension names of inputs that can be sharded, in order of first occurrence.

    Every output must have the name, or be declared a partial sum or mean.
    """
    names = dict.fromkeys(name for dims in declared.input_dims for name in dims if name is not None)
    pairs = list(zip(declared.output_dims, declared.partial, strict=True))
    return [n for n in names if all(n in dims or partial for dims, partial in pairs)]


def _build_local_map_kernel(op: Op, local: LocalSharding) -> Callable[..., Any]:
    call: LocalCall = op.target  # type: ignore[assignment]
    declared, counts = call.declaration, local.shard_counts

    def num_terms(dims: DimNames) -> int:
        """Return the number of shards whose results are summed, for a result with dimension names
        `dims`."""
        return prod(count for name, count in counts.items() if name not in dims)

    pairs = zip(declared.output_dims, declared.partial, strict=True)
    divisors = [num_terms(dims) if partial == "mean" else 1 for dims, partial in pairs]
    # Updated buffers have no sharded dimension, so every shard contributes.
    divisors += [num_terms(())] * len(call.changed)
    # Integers, such as a count of batches, cannot be divided: the first shard's are the result.
    first = sum(local.index(factor) for factor, count in counts.items() if count > 1)

    def term(result: Tensor, divisor: int) -> Tensor:
        if divisor == 1:
            return result
        if result.is_floating_point() or result.is_complex():
            return result / divisor
        # As a tensor: on simulated ranks `first` differs between them.
        numbers: Tensor = torch.zeros_like(result) + first  # type: ignore[assignment]
        return torch.where(numbers.eq(0), result, 0)

    def local_map(*tensors: Tensor) -> Any:
        # Ranks reduce gradients together, so all of them must have gradients of the same inputs.
        results = run_with_connected_inputs(call.run, tensors)
        terms = tuple(map(term, results, divisors))
        return terms[0] if len(terms) == 1 else terms

    return local_map
