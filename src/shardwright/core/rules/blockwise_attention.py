"""Attention without a mask of all pairs.

In a sliding window, `b h s _, b h s _, b h s _ -> b h s _`, a block of positions reads its own keys
and the window before them, which it gets from the device with the block before: not all keys, as
other attention does, and no device has more work than another. Where a window is wider than a
block, what was received is passed on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from shardwright.core.graph.custom_ops import masked_attention, windowed_attention
from shardwright.core.graph.graph import Op
from shardwright.core.rules.attention import exchanged_halves
from shardwright.core.rules.notation import (
    RuleOptions,
    binder,
    call_arguments,
    sharding_rule,
    with_arguments,
)
from shardwright.core.rules.rule import (
    PREVIOUS,
    Dims,
    Local,
    Main,
    Reduction,
    ShardingRule,
    no_reductions,
    rule_for,
)


@rule_for(windowed_attention)
def windowed_attention_rule(op: Op) -> ShardingRule:
    """Batch, heads and positions can be cut."""
    return _rule(op, [_QUERIES] * 3, kernel=_windowed_block, reductions=_passed_on)


@rule_for(masked_attention)
def masked_attention_rule(op: Op) -> ShardingRule:
    """Batch, heads and queries can be cut, with the numbers of queries of which masks are made."""
    keys: Dims = ("b", "h", None, None)
    vectors = [_QUERIES[4 - len(value.shape) :] for value in op.inputs[3:]]
    causal = call_arguments(op)["causal"]
    halves = _halves if causal else no_reductions
    return _rule(op, [_QUERIES, keys, keys, *vectors], kernel=_masked_rows, reductions=halves)


_QUERIES: Dims = ("b", "h", "s", None)


def _rule(op: Op, inputs: Sequence[Dims], **options: Unpack[RuleOptions]) -> ShardingRule:
    """With grouped queries the number of shards must divide the number of heads of keys."""
    heads = op.inputs[1].shape[1]
    capacity = {"h": heads} if heads > 1 else None
    options["main"] = Main({"b": "I", "h": "H", "s": "S"}, weight=None)
    return sharding_rule(op, inputs, (_QUERIES,), capacity=capacity, **options)


def _halves(op: Op, shard_counts: Mapping[str, int]) -> tuple[Reduction, ...]:
    """Causal queries are exchanged for equal work, with their numbers."""
    numbers = [value for value in op.inputs[3:] if value.shape[-2] > 1]
    return exchanged_halves(op, shard_counts, numbers)


def _masked_rows(op: Op, local: Local) -> Callable[..., Any]:
    blocks, rows = local.shard_counts.get("s", 1), local.output_shapes[0][-2]
    if blocks == 1:
        return op.target
    index, late, bind = local.index("s"), rows // 2, binder(op)
    if not local.reduce:
        return with_arguments(op, start=index * rows)
    *swaps, swap_results = local.reduce

    def run(*args: Any, **kwargs: Any) -> Tensor:
        arguments = bind(args, kwargs)
        vectors = arguments["vectors"]
        of_queries = [n for n, each in enumerate(vectors) if each.shape[-2] > 1]
        split = (arguments["query"], *(vectors[n] for n in of_queries))
        mine, others = zip(*(torch.split(x, [rows - late, late], -2) for x in split), strict=True)
        others = tuple(swap(other) for swap, other in zip(swaps, others, strict=True))

        def attend(query: Tensor, *numbers: Tensor, start: Any) -> Tensor:
            known = dict(zip(of_queries, numbers, strict=True))
            read = tuple(known.get(n, each) for n, each in enumerate(vectors))
            return masked_attention(
                **{**arguments, "query": query, "vectors": read, "start": start}
            )

        results = attend(*others, start=(blocks - index) * rows - late)
        return torch.cat((attend(*mine, start=index * rows), swap_results(results)), -2)

    return run


def rows_before(op: Op, blocks: int) -> list[int]:
    """How many positions of each of the blocks before its own a block reads, the nearest first."""
    arguments = call_arguments(op)
    rows, left, found = op.output.shape[-2] // blocks, arguments["window"] - 1, list[int]()
    while left > 0 and len(found) < blocks - 1:
        found.append(min(left, rows))
        left -= rows
    return found


def _passed_on(op: Op, shard_counts: Mapping[str, int]) -> tuple[Reduction, ...]:
    """Keys and values side by side, from each device to the one with the next block."""
    key, value = op.inputs[1:]
    batch, heads, _, _ = key.shape
    batch, size = batch // shard_counts.get("b", 1), key.shape[-1] + value.shape[-1]
    if heads > 1:
        heads //= shard_counts.get("h", 1)
    return tuple(
        Reduction(("s",), PREVIOUS, (batch, heads, rows, size), key.dtype, varying=True)
        for rows in rows_before(op, shard_counts.get("s", 1))
    )


def _windowed_block(op: Op, local: Local) -> Callable[..., Any]:
    blocks = local.shard_counts.get("s", 1)
    if blocks == 1:
        return op.target
    start, bind = local.index("s") * local.output_shapes[0][-2], binder(op)
    passes = list(zip(rows_before(op, blocks), local.reduce, strict=True))

    def run(*args: Any, **kwargs: Any) -> Tensor:
        arguments = bind(args, kwargs)
        key, value = arguments["key"], arguments["value"]
        parts = [torch.cat((key, value), -1)]
        for rows, from_previous in passes:
            last = parts[0].shape[-2] - rows
            parts.insert(0, from_previous(parts[0].narrow(-2, last, rows)))
        sizes = [key.shape[-1], value.shape[-1]]
        arguments["key"], arguments["value"] = torch.split(torch.cat(parts, -2), sizes, -1)
        return windowed_attention(**{**arguments, "start": start})

    return run
