"""Attention in a sliding window or under a computed mask, without a mask tensor of all pairs.

With a sliding window, `b h s _, b h s _, b h s _ -> b h s _`, a shard of the sequence needs its own
keys and the keys of the window before the shard. The device with the previous shard sends these
keys, so that no device gathers all keys, and all devices have equal work. If the window is wider
than a shard, devices forward received keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

import torch
from torch import Tensor

from shardwright.core.graph.custom_ops import masked_attention, windowed_attention
from shardwright.core.graph.graph import Op
from shardwright.core.rules.attention import half_shard_swaps
from shardwright.core.rules.notation import (
    RuleOptions,
    WithArguments,
    argument_binder,
    call_arguments,
    sharding_rule,
)
from shardwright.core.rules.rule import (
    PREVIOUS,
    Dims,
    LocalSharding,
    MainFactors,
    Reduction,
    ShardingRule,
    no_reductions,
    rule_for,
)


@rule_for(windowed_attention)
def windowed_attention_rule(op: Op) -> ShardingRule:
    """Sliding window attention, `b h s _, b h s _, b h s _ -> b h s _`: batch, heads and positions
    can be sharded."""
    return _build_blockwise_attention_rule(
        op,
        [_QUERIES] * 3,
        kernel=_build_windowed_attention_kernel,
        reductions=_make_key_value_transfers,
    )


@rule_for(masked_attention)
def masked_attention_rule(op: Op) -> ShardingRule:
    """Masked attention, `b h s _, b h _ _, b h _ _ -> b h s _`: batch, heads and queries can be
    sharded.

    Inputs of the mask with a row per query are sharded like the queries.
    """
    keys: Dims = ("b", "h", None, None)
    # Aligned on the right, as an input of the mask may lack batch and heads.
    vectors = [_QUERIES[4 - len(value.shape) :] for value in op.inputs[3:]]
    causal = call_arguments(op)["causal"]
    swaps = _make_masked_query_swaps if causal else no_reductions
    return _build_blockwise_attention_rule(
        op,
        [_QUERIES, keys, keys, *vectors],
        kernel=_build_masked_attention_kernel,
        reductions=swaps,
    )


_QUERIES: Dims = ("b", "h", "s", None)


def _build_blockwise_attention_rule(
    op: Op, inputs: Sequence[Dims], **options: Unpack[RuleOptions]
) -> ShardingRule:
    """Build the sharding rule of sliding window or masked attention; in grouped-query attention the
    number of shards of the heads, factor `h`, must divide the number of key-value heads."""
    heads = op.inputs[1].shape[1]
    # A single key-value head is replicated, and does not limit the shards of `h`.
    capacity = {"h": heads} if heads > 1 else None
    options["main"] = MainFactors({"b": "I", "h": "H", "s": "S"}, weight=None)
    return sharding_rule(op, inputs, (_QUERIES,), capacity=capacity, **options)


def _make_masked_query_swaps(op: Op, shard_counts: Mapping[str, int]) -> tuple[Reduction, ...]:
    """Return the exchanges that balance causal masked attention: devices swap half of their
    queries, of the mask inputs with one row per query, and of the outputs."""
    query_vectors = [value for value in op.inputs[3:] if value.shape[-2] > 1]
    return half_shard_swaps(op, shard_counts, query_vectors)


def _build_masked_attention_kernel(op: Op, local: LocalSharding) -> Callable[..., Any]:
    """Build the local kernel of masked attention sharded by queries; with a causal mask, devices
    swap the second halves of shards for equal work."""
    blocks, rows = local.shard_counts.get("s", 1), local.output_shapes[0][-2]
    if blocks == 1:
        return op.target
    index, late, bind = local.index("s"), rows // 2, argument_binder(op)
    # Nothing is swapped without a causal mask, as all queries have equal work, or in blocks of one
    # query.
    if not local.reduce:
        return WithArguments(op, start=index * rows)
    *swaps, swap_results = local.reduce

    def run(*args: Any, **kwargs: Any) -> Tensor:
        arguments = bind(args, kwargs)
        vectors = arguments["vectors"]
        of_queries = [n for n, vector in enumerate(vectors) if vector.shape[-2] > 1]
        query_rows = (arguments["query"], *(vectors[n] for n in of_queries))
        early, swapped = zip(
            *(torch.split(x, [rows - late, late], -2) for x in query_rows), strict=True
        )
        swapped = tuple(swap(half) for swap, half in zip(swaps, swapped, strict=True))

        def attend(query: Tensor, *query_vectors: Tensor, start: Any) -> Tensor:
            by_index = dict(zip(of_queries, query_vectors, strict=True))
            local_vectors = tuple(by_index.get(n, vector) for n, vector in enumerate(vectors))
            return masked_attention(
                **{**arguments, "query": query, "vectors": local_vectors, "start": start}
            )

        # The second half of the mirrored block, blocks - 1 - index, ends where that block does.
        results = attend(*swapped, start=(blocks - index) * rows - late)
        return torch.cat((attend(*early, start=index * rows), swap_results(results)), -2)

    return run


def halo_rows_by_shard(op: Op, blocks: int) -> list[int]:
    """Return the number of key-value rows that a shard's attention window reads from each preceding
    shard of the sequence, nearest shard first.

    Shards that the window does not reach are omitted.

    Args:
        blocks: number of shards of the sequence.
    """
    arguments = call_arguments(op)
    # A window of w positions includes the query's own.
    rows, remaining, counts = op.output.shape[-2] // blocks, arguments["window"] - 1, list[int]()
    while remaining > 0 and len(counts) < blocks - 1:
        # A window wider than a block reaches several blocks back; each transfer forwards what the
        # previous one brought.
        counts.append(min(remaining, rows))
        remaining -= rows
    return counts


def _make_key_value_transfers(op: Op, shard_counts: Mapping[str, int]) -> tuple[Reduction, ...]:
    """Return the transfers of keys and values, concatenated, to the device with the next shard: one
    per preceding shard that the attention window reaches."""
    key, value = op.inputs[1:]
    batch, heads, _, _ = key.shape
    batch, size = batch // shard_counts.get("b", 1), key.shape[-1] + value.shape[-1]
    # A single key-value head is replicated over the shards of `h`.
    if heads > 1:
        heads //= shard_counts.get("h", 1)
    return tuple(
        # `varying`: the next device's gradients of these keys return the same way and are added.
        Reduction(("s",), PREVIOUS, (batch, heads, rows, size), key.dtype, varying=True)
        for rows in halo_rows_by_shard(op, shard_counts.get("s", 1))
    )


def _build_windowed_attention_kernel(op: Op, local: LocalSharding) -> Callable[..., Any]:
    blocks = local.shard_counts.get("s", 1)
    if blocks == 1:
        return op.target
    start, bind = local.index("s") * local.output_shapes[0][-2], argument_binder(op)
    transfers = list(zip(halo_rows_by_shard(op, blocks), local.reduce, strict=True))

    def run(*args: Any, **kwargs: Any) -> Tensor:
        arguments = bind(args, kwargs)
        key, value = arguments["key"], arguments["value"]
        # Keys and values are one tensor, so that each preceding shard needs one transfer.
        blocks = [torch.cat((key, value), -1)]
        for rows, from_previous in transfers:
            # The exchange is a cycle: the first shard receives keys from the end of the sequence.
            # Their positions are negative there, and not read.
            begin = blocks[0].shape[-2] - rows
            blocks.insert(0, from_previous(blocks[0].narrow(-2, begin, rows)))
        sizes = [key.shape[-1], value.shape[-1]]
        arguments["key"], arguments["value"] = torch.split(torch.cat(blocks, -2), sizes, -1)
        return windowed_attention(**{**arguments, "start": start})

    return run
