"""Scaled dot product attention: `b h s/ring _, b h ring _, b h ring _ -> b h s/ring _`.

Context parallelism has two forms: sharding by `s` all-gathers keys and values for each shard of the
queries; sharding by `ring` passes shards of keys and values from device to device
(`core/rules/ring_attention.py`).

Under a causal mask each query reads one key more than the previous query, so later shards have more
work. Of n devices, the devices with shards i and n - 1 - i therefore swap the second halves of
their queries, and swap the outputs back. Each device then computes the same number of query-key
pairs, as with the load balancing of Megatron-LM's context parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import CausalBias, causal_lower_right

from shardwright.core.graph.graph import Op, Value
from shardwright.core.rules.notation import (
    argument_binder,
    call_arguments,
    input_factors,
    sharding_rule,
)
from shardwright.core.rules.ring_attention import (
    ring_capacity,
    ring_kernel,
    ring_reductions,
    supports_ring,
)
from shardwright.core.rules.rule import (
    MIRROR,
    Dims,
    LocalSharding,
    MainFactors,
    Reduction,
    ShardingRule,
    no_reductions,
    rule_for,
)


@rule_for(torch.ops.aten.scaled_dot_product_attention.default)
def scaled_dot_product_attention(op: Op) -> ShardingRule | None:
    """Scaled dot product attention, `b h s/ring _, b h ring _, b h ring _ -> b h s/ring _`: all but
    features can be sharded.

    With grouped-query attention the number of shards must divide the number of key-value heads, so
    that queries and their keys are on one device; a single key-value head is replicated. Keys can
    be sharded only by `ring`. Features cannot be sharded: fused kernels require keys and values of
    equal size, and unfused attention would materialize the score matrix.
    """
    arguments = call_arguments(op)
    query, key, mask = arguments["query"], arguments["key"], arguments["attn_mask"]
    ndim = len(query.shape)
    # Batch and heads are named from the left, so tensors of other ranks would not align.
    if {len(value.shape) for value in (key, arguments["value"])} != {ndim}:
        return None
    causal = arguments["is_causal"]
    # A block of queries slices the keys up to its own last position, which must exist.
    queries = None if causal and query.shape[-2] > key.shape[-2] else "s"
    keys = "ring" if supports_ring(arguments) else None
    batch = _name_batch_and_head_factors(ndim)
    output: Dims = (*batch, queries, None)
    dims: dict[str, Dims] = {
        "query": (*batch, queries, None),
        "key": (*batch, keys, None),
        "value": (*batch, keys, None),
    }
    if mask is not None:
        # A mask may lack leading dimensions, over which it broadcasts.
        dims["attn_mask"] = (*batch, queries, None)[ndim - len(mask.shape) :]
    # One key-value head is broadcast to all query heads, whose number is then the only limit.
    grouped = arguments["enable_gqa"] and key.shape[-3] > 1
    capacity = {batch[-1]: key.shape[-3]} if grouped else {}
    if keys:
        capacity[keys] = ring_capacity(arguments)
    letters = {"b": "I", **dict.fromkeys(batch[1:], "H"), "s": "S"}
    return sharding_rule(
        op,
        input_factors(op, dims),
        (output,),
        capacity=capacity,
        main=MainFactors({name: letters[name] for name in output if name is not None}, weight=None),
        # Without a causal mask and without a ring, a shard of queries is an ordinary call of the
        # operator.
        kernel=_build_attention_kernel if causal or keys else None,
        reductions=_make_query_swaps_for_balance if (causal and queries) or keys else no_reductions,
        random=arguments["dropout_p"] > 0,
        # A query dimension may be sharded by the ring, and each of its blocks by `s`.
        joined={keys: "s"} if keys and queries else {},
    )


# By name, since the operator exists only after the import of `torch.nn.attention.varlen`.
@rule_for("torch_attn._varlen_attn.default")
def varlen_attention(op: Op) -> ShardingRule | None:
    """Attention of packed sequences with cumulative lengths, `_ h _, _ h _, _ h _, _, _ -> _ h _, h
    _, _`: heads can be sharded.

    A shard of the rows would have other lengths. With grouped-query attention the number of shards
    must divide the number of key-value heads.
    """
    arguments = call_arguments(op)
    # Keys in pages have other dimensions.
    if arguments["block_table"] is not None:
        return None
    heads: Dims = (None, "h", None)
    dims: dict[str, Dims] = dict.fromkeys(("query", "key", "value"), heads)
    dims |= dict.fromkeys(("cu_seq_q", "cu_seq_k", "seqused_k"), (None,))
    return sharding_rule(
        op,
        input_factors(op, dims),
        (heads, ("h", None), (None,)),
        capacity={"h": arguments["key"].shape[1]},
        # Without dropout, the state of random numbers is a constant on all devices.
        complete=frozenset({"h"}),
        main=MainFactors({"h": "H"}, weight=None),
    )


def _build_attention_kernel(op: Op, local: LocalSharding) -> Callable[..., Any]:
    # First, since the ring also handles queries that `s` shards within its blocks.
    if local.shard_counts.get("ring", 1) > 1:
        return ring_kernel(op, local)
    return (
        _build_balanced_causal_kernel(op, local) if call_arguments(op)["is_causal"] else op.target
    )


def _make_query_swaps_for_balance(op: Op, shard_counts: Mapping[str, int]) -> tuple[Reduction, ...]:
    if shard_counts.get("ring", 1) > 1:
        return ring_reductions(op, shard_counts)
    return half_shard_swaps(op, shard_counts) if call_arguments(op)["is_causal"] else ()


def _name_batch_and_head_factors(ndim: int) -> tuple[str, ...]:
    """Return the factors of batch and heads, the first `ndim` - 2 dimensions of a query."""
    return ("b", "h", *(f"h{i}" for i in range(2, ndim - 2)))[: ndim - 2]


def half_shard_swaps(
    op: Op, shard_counts: Mapping[str, int], query_vectors: Sequence[Value] = ()
) -> tuple[Reduction, ...]:
    """Return the exchanges that balance causal attention sharded along the queries.

    Two devices swap half of their queries, `query_vectors` and outputs. Returns () if queries are
    not sharded, or if a shard has a single query.

    Args:
        query_vectors: further inputs with one row per query, `[..., queries, 1]`.
    """
    blocks = shard_counts.get("s", 1)
    half = op.output.shape[-2] // blocks // 2
    if blocks == 1 or half == 0:
        return ()

    def swap(value: Value, varying: bool) -> Reduction:
        *batch, _, size = value.shape
        factors = _name_batch_and_head_factors(len(op.output.shape))[-len(batch) :] if batch else ()
        sizes = zip(batch, factors, strict=True)
        # A dimension of size 1 is broadcast to all shards, and so replicated.
        local = [n // shard_counts.get(f, 1) if n > 1 else n for n, f in sizes]
        return Reduction(("s",), MIRROR, (*local, half, size), value.dtype, varying, varying)

    # In the order in which kernels unpack `local.reduce`: queries, vectors, results.
    return (
        swap(op.inputs[0], True),
        *(swap(vector, False) for vector in query_vectors),
        swap(op.output, True),
    )


def _build_balanced_causal_kernel(op: Op, local: LocalSharding) -> Callable[..., Any]:
    """Build the local kernel of causal attention sharded by queries.

    The device with shard i of n computes the first half of shard i and the second half of shard n -
    1 - i.
    """
    if local.shard_counts.get("s", 1) == 1:
        return op.target
    rows, last = local.output_shapes[0][-2], local.shard_counts["s"] - 1
    index, late = local.index("s"), rows // 2
    # A block of a single query has no second half to swap.
    if not local.reduce:
        return _build_causal_attention_for_rows(op, rows, index * rows)
    swap_queries, swap_results = local.reduce
    # The first half of block i begins as far from the start of the sequence as the second half of
    # block n - 1 - i ends from its end, so that every device has the same number of pairs.
    early = _build_causal_attention_for_rows(op, rows - late, index * rows)
    swapped_half = _build_causal_attention_for_rows(op, late, (last - index) * rows + rows - late)
    bind = argument_binder(op)

    def run(*args: Any, **kwargs: Any) -> Tensor:
        arguments = bind(args, kwargs)
        early_queries, late_queries = arguments.pop("query").split((rows - late, late), -2)
        results = swapped_half(swap_queries(late_queries), **arguments)
        return torch.cat((early(early_queries, **arguments), swap_results(results)), -2)

    return run


def _build_causal_attention_for_rows(op: Op, rows: int, start: Any) -> Callable[..., Any]:
    """Return a function that computes causal attention for `rows` queries from position `start` on.

    At `start` 0 this is ordinary causal attention. Other queries need a causal mask that is aligned
    to the last key. Fused kernels of accelerators support it. A boolean tensor replaces it on the
    CPU, and in a simulation of many ranks (`start` is then a `SymInt`), since each rank reads
    another number of keys.
    """
    is_concrete = isinstance(start, int)
    fused_mask = _build_causal_mask_aligned_to_last_key(rows, start + rows) if is_concrete else None
    is_first, bind = is_concrete and start == 0, argument_binder(op)

    def run(*args: Any, **kwargs: Any) -> Tensor:
        arguments = bind(args, kwargs)
        query, key, value = (arguments.pop(name) for name in ("query", "key", "value"))
        if is_concrete:
            # No query of this device reads a later key.
            key, value = (tensor.narrow(-2, 0, start + rows) for tensor in (key, value))
        # On the meta device only shapes matter, and the mask would be of all pairs.
        arguments["is_causal"] = is_first or query.is_meta
        if not arguments["is_causal"]:
            pairs = query.new_ones(rows, key.shape[-2], dtype=torch.bool)
            arguments["attn_mask"] = (
                fused_mask if is_concrete and not query.is_cpu else pairs.tril(start)
            )
        return F.scaled_dot_product_attention(query, key, value, **arguments)

    return run


def _build_causal_mask_aligned_to_last_key(queries: int, keys: int) -> CausalBias:
    """Return the causal mask of `queries` x `keys`, aligned to the last key.

    The mask is constructed for 0 x 0 and then resized: PyTorch's constructor would allocate a mask
    of all pairs.
    """
    bias = causal_lower_right(0, 0)
    bias.seq_len_q, bias.seq_len_kv = queries, keys
    return bias
