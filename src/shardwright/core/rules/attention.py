"""Scaled dot product attention: `b h s/ring _, b h ring _, b h ring _ -> b h s/ring _`.

Cut by `s`, a block of queries reads all keys, which are gathered; cut by `ring`, the blocks of keys
and values go round (`core/rules/ring_attention.py`).

Each causal query reads one key more than the one before, so blocks of them are unequal work. Of n
devices the one with block i exchanges the second half of its queries with the one with block
n - 1 - i, and the results back: each computes an early and a late half, as many pairs as all others
(the order of blocks of Megatron-LM's context parallelism).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import CausalBias, causal_lower_right

from shardwright.core.graph.graph import Op, Value
from shardwright.core.rules.notation import binder, call_arguments, input_dims, sharding_rule
from shardwright.core.rules.ring_attention import has_ring, positions, ring_kernel, ring_reductions
from shardwright.core.rules.rule import (
    MIRROR,
    Dims,
    Local,
    Main,
    Reduction,
    ShardingRule,
    no_reductions,
    rule_for,
)


@rule_for(torch.ops.aten.scaled_dot_product_attention.default)
def scaled_dot_product_attention(op: Op) -> ShardingRule | None:
    """Batch, heads and queries can be cut.

    With grouped-query attention the number of shards must divide the number of key-value heads, so
    that queries stay with their keys; a single key-value head is replicated. Keys and features
    cannot be cut: fused kernels take values of the size of the keys only, and without one all
    scores would be held.
    """
    arguments = call_arguments(op)
    query, key, mask = arguments["query"], arguments["key"], arguments["attn_mask"]
    ndim = len(query.shape)
    if {len(value.shape) for value in (key, arguments["value"])} != {ndim}:
        return None
    causal = arguments["is_causal"]
    queries = None if causal and query.shape[-2] > key.shape[-2] else "s"
    keys = "ring" if has_ring(arguments) else None
    batch = _batch(ndim)
    output: Dims = (*batch, queries, None)
    dims: dict[str, Dims] = {
        "query": (*batch, queries, None),
        "key": (*batch, keys, None),
        "value": (*batch, keys, None),
    }
    if mask is not None:
        dims["attn_mask"] = (*batch, queries, None)[ndim - len(mask.shape) :]
    grouped = arguments["enable_gqa"] and key.shape[-3] > 1
    capacity = {batch[-1]: key.shape[-3]} if grouped else {}
    if keys:
        capacity[keys] = positions(arguments)
    letters = {"b": "I", **dict.fromkeys(batch[1:], "H"), "s": "S"}
    return sharding_rule(
        op,
        input_dims(op, dims),
        (output,),
        capacity=capacity,
        main=Main({name: letters[name] for name in output if name is not None}, weight=None),
        kernel=_kernel if causal or keys else None,
        reductions=_reductions if (causal and queries) or keys else no_reductions,
        random=arguments["dropout_p"] > 0,
        joined={keys: "s"} if keys and queries else {},
    )


def _kernel(op: Op, local: Local) -> Callable[..., Any]:
    if local.shard_counts.get("ring", 1) > 1:
        return ring_kernel(op, local)
    return _causal_block(op, local) if call_arguments(op)["is_causal"] else op.target


def _reductions(op: Op, shard_counts: Mapping[str, int]) -> tuple[Reduction, ...]:
    if shard_counts.get("ring", 1) > 1:
        return ring_reductions(op, shard_counts)
    return exchanged_halves(op, shard_counts) if call_arguments(op)["is_causal"] else ()


def _batch(ndim: int) -> tuple[str, ...]:
    """The factors of all dimensions but positions and features."""
    return ("b", "h", *(f"h{i}" for i in range(2, ndim - 2)))[: ndim - 2]


def exchanged_halves(
    op: Op, shard_counts: Mapping[str, int], numbers: Sequence[Value] = ()
) -> tuple[Reduction, ...]:
    """The exchange of the second halves of blocks of queries, of `numbers` of queries,
    `[..., queries, 1]`, and of what they give."""
    blocks = shard_counts.get("s", 1)
    half = op.output.shape[-2] // blocks // 2
    if blocks == 1 or half == 0:
        return ()

    def of(value: Value, varying: bool) -> Reduction:
        *batch, _, size = value.shape
        factors = _batch(len(op.output.shape))[-len(batch) :] if batch else ()
        sizes = zip(batch, factors, strict=True)
        local = [n // shard_counts.get(f, 1) if n > 1 else n for n, f in sizes]
        return Reduction(("s",), MIRROR, (*local, half, size), value.dtype, varying, varying)

    return (of(op.inputs[0], True), *(of(each, False) for each in numbers), of(op.output, True))


def _causal_block(op: Op, local: Local) -> Callable[..., Any]:
    """Causal attention of a block of queries; with other blocks, of the halves that this device
    computes."""
    if local.shard_counts.get("s", 1) == 1:
        return op.target
    rows, last = local.output_shapes[0][-2], local.shard_counts["s"] - 1
    index, late = local.index("s"), rows // 2
    if not local.reduce:
        return _causal_rows(op, rows, index * rows)
    swap_queries, swap_results = local.reduce
    early = _causal_rows(op, rows - late, index * rows)
    of_other = _causal_rows(op, late, (last - index) * rows + rows - late)
    bind = binder(op)

    def run(*args: Any, **kwargs: Any) -> Tensor:
        arguments = bind(args, kwargs)
        mine, others = arguments.pop("query").split((rows - late, late), -2)
        results = of_other(swap_queries(others), **arguments)
        return torch.cat((early(mine, **arguments), swap_results(results)), -2)

    return run


def _causal_rows(op: Op, rows: int, start: Any) -> Callable[..., Any]:
    """Causal attention of `rows` queries that begin at position `start`, which read the keys up to
    their end.

    The first ones are causal as a whole is, and the others are for fused kernels of accelerators;
    where there is none, their mask is a tensor: on the CPU, and where many ranks are simulated at
    once, each of which would read another number of keys.
    """
    known = isinstance(start, int)
    fused = _lower_right(rows, start + rows) if known else None
    first, bind = known and start == 0, binder(op)

    def run(*args: Any, **kwargs: Any) -> Tensor:
        arguments = bind(args, kwargs)
        query, key, value = (arguments.pop(name) for name in ("query", "key", "value"))
        if known:
            key, value = (each.narrow(-2, 0, start + rows) for each in (key, value))
        # On the meta device only shapes count.
        arguments["is_causal"] = first or query.is_meta
        if not arguments["is_causal"]:
            pairs = query.new_ones(rows, key.shape[-2], dtype=torch.bool)
            arguments["attn_mask"] = fused if known and not query.is_cpu else pairs.tril(start)
        return F.scaled_dot_product_attention(query, key, value, **arguments)

    return run


def _lower_right(queries: int, keys: int) -> CausalBias:
    """The causal mask that ends with the last key; made empty, as PyTorch allocates all pairs."""
    bias = causal_lower_right(0, 0)
    bias.seq_len_q, bias.seq_len_kv = queries, keys
    return bias
