"""Parts of a model that run as they are: the names that their users declare can be cut.

Parameters and buffers are read in full, so their gradients are partial sums. A result that is the
mean over shards is divided by their number on each device, and summed; so are buffers that change,
such as running statistics.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardwright.core.graph.graph import Op
from shardwright.core.graph.local_declaration import Declaration, DimNames
from shardwright.core.graph.local_gradients import connect_unread_inputs
from shardwright.core.graph.local_map import LocalCall
from shardwright.core.rules.notation import sharding_rule
from shardwright.core.rules.rule import Local, Main, ShardingRule, rule_for


@rule_for(LocalCall)
def local_map_rule(op: Op) -> ShardingRule:
    """The dimension names that the user has declared; parameters and buffers are replicated."""
    call: LocalCall = op.target  # type: ignore[assignment]
    declared = call.declaration
    state = [(None,) * len(value.shape) for value in op.inputs[len(declared.inputs) :]]
    factors = _factors(declared)
    buffers = [(None,) * len(value.shape) for value in op.outputs[len(declared.outputs) :]]
    return sharding_rule(
        op,
        (*declared.input_dims, *state),
        (*declared.output_dims, *buffers),
        reduced=factors,
        kernel=_kernel,
        main=Main(dict.fromkeys(factors, "I"), weight=len(declared.inputs) if state else None),
        random=call.random,
    )


def _factors(declared: Declaration) -> list[str]:
    """The names that every result carries or is a partial result without, those of the first input
    first."""
    names = dict.fromkeys(name for dims in declared.input_dims for name in dims if name is not None)
    pairs = list(zip(declared.output_dims, declared.partial, strict=True))
    return [n for n in names if all(n in dims or partial for dims, partial in pairs)]


def _kernel(op: Op, local: Local) -> Callable[..., Any]:
    call: LocalCall = op.target  # type: ignore[assignment]
    declared, counts = call.declaration, local.shard_counts

    def shards(dims: DimNames) -> int:
        """Over how many devices a result is a partial sum."""
        return prod(count for name, count in counts.items() if name not in dims)

    pairs = zip(declared.output_dims, declared.partial, strict=True)
    divisors = [shards(dims) if partial == "mean" else 1 for dims, partial in pairs]
    divisors += [shards(())] * len(call.changed)
    # Of whole numbers, such as a count of batches, those of the first shard are taken.
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
        results = connect_unread_inputs(call.run(tensors), tensors)
        terms = tuple(map(term, results, divisors))
        return terms[0] if len(terms) == 1 else terms

    return local_map
