"""`masked_scatter`, by which models of images and texts replace tokens by features of images.

The elements of the source go to the selected places in their order. Shards of the batch therefore
need the numbers of places in earlier shards, and any part of the source.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shardwright.core.graph.graph import Op
from shardwright.core.rules.notation import sharding_rule
from shardwright.core.rules.rule import GATHER, LocalSharding, Reduction, ShardingRule, rule_for

aten = torch.ops.aten


@rule_for(aten.masked_scatter.default)
def masked_scatter(op: Op) -> ShardingRule | None:
    """Write of consecutive elements to selected places, `b _, b _, _ _ -> b _`: the first dimension
    can be sharded, the source cannot; None if the mask or the input is broadcast along it."""
    x, mask, source = op.inputs
    same_rank = len(mask.shape) == len(x.shape) == len(op.output.shape) > 0
    if not same_rank or not mask.shape[0] == x.shape[0] == op.output.shape[0]:
        return None
    dims = tuple(("b", *(None,) * (len(value.shape) - 1)) for value in (x, mask, op.output))
    return sharding_rule(
        op,
        (*dims[:2], (None,) * len(source.shape)),
        dims[2:],
        kernel=_build_kernel,
        reductions=_make_count_gather,
    )


def _make_count_gather(op: Op, shard_counts: Mapping[str, int]) -> tuple[Reduction, ...]:
    num_shards = shard_counts["b"]
    if num_shards == 1:
        return ()
    return (Reduction(("b",), GATHER, (num_shards,), torch.int64, differentiable=False),)


def _build_kernel(op: Op, local: LocalSharding) -> Callable[..., Tensor]:
    num_shards = local.shard_counts["b"]
    if num_shards == 1:
        target: Callable[..., Tensor] = op.target
        return target
    shard_index: Any = local.index("b")

    def run(x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
        count = mask.expand(local.output_shapes[0]).sum()
        counts = local.reduce[0](count.reshape(1))
        is_earlier = torch.arange(num_shards, device=mask.device) < shard_index
        elements = source.reshape(-1)
        numbers = torch.arange(elements.numel(), device=mask.device)
        # A number beyond the source is no error if this shard has no place for it.
        numbers = (numbers + counts.where(is_earlier, 0).sum()).where(numbers < count, 0)
        # With more places than elements, all shards raise the error of an index out of range.
        numbers = numbers.where(counts.sum() <= len(elements), len(elements))
        result: Tensor = op.target(x, mask, elements.index_select(0, numbers))
        return result

    return run
