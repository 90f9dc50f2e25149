"""Parts of a model that run as they are: the names that their users declare can be cut.

Parameters and buffers are read in full, so their gradients are partial sums. A result that is the
mean over shards is divided by their number on each device, and summed.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from torch import Tensor

from shardwright.core.graph.graph import Op
from shardwright.core.graph.local_map import Declaration, Dims, LocalCall, linked
from shardwright.core.rules.notation import sharding_rule
from shardwright.core.rules.rule import Local, Main, ShardingRule, rule_for


@rule_for(LocalCall)
def local_map_rule(op: Op) -> ShardingRule:
    call: LocalCall = op.target  # type: ignore[assignment]
    declared = call.declaration
    state = [(None,) * len(value.shape) for value in op.inputs[len(declared.inputs) :]]
    factors = _factors(declared)
    return sharding_rule(
        op,
        (*declared.input_dims, *state),
        declared.output_dims,
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

    def shards(dims: Dims) -> int:
        """Over how many devices a result is a partial sum."""
        return prod(count for name, count in counts.items() if name not in dims)

    pairs = zip(declared.output_dims, declared.partial, strict=True)
    divisors = [shards(dims) if partial == "mean" else 1 for dims, partial in pairs]

    def local_map(*tensors: Tensor) -> Any:
        results = linked(call.run(tensors), tensors)
        scaled = [r if n == 1 else r / n for r, n in zip(results, divisors, strict=True)]
        return scaled[0] if len(scaled) == 1 else tuple(scaled)

    return local_map
