"""Scaled dot product attention: `b h s _, b h _ _, b h _ _ -> b h s _`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import CausalBias, causal_lower_right

from shardwright.graph.graph import Op
from shardwright.rules.notation import binder, call_arguments, input_dims, sharding_rule
from shardwright.rules.rule import Dims, Local, Main, ShardingRule, rule_for


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
    batch: Dims = ("b", "h", *(f"h{i}" for i in range(2, ndim - 2)))[: ndim - 2]
    output: Dims = (*batch, queries, None)
    dims: dict[str, Dims] = {
        "query": (*batch, queries, None),
        "key": (*batch, None, None),
        "value": (*batch, None, None),
    }
    if mask is not None:
        dims["attn_mask"] = (*batch, queries, None)[ndim - len(mask.shape) :]
    grouped = arguments["enable_gqa"] and key.shape[-3] > 1
    letters = {"b": "I", **dict.fromkeys(map(str, batch[1:]), "H"), "s": "S"}
    return sharding_rule(
        op,
        input_dims(op, dims),
        (output,),
        capacity={str(batch[-1]): key.shape[-3]} if grouped else None,
        main=Main({name: letters[name] for name in output if name is not None}, weight=None),
        kernel=_causal_block if causal else None,
        random=arguments["dropout_p"] > 0,
    )


def _causal_block(op: Op, local: Local) -> Callable[..., Any]:
    """Causal attention of a block of queries, which reads the keys up to its end.

    The first block is causal as a whole is, and the others are for fused kernels of accelerators;
    on the CPU, which has none for them, their mask is a tensor.
    """
    if local.shard_counts.get("s", 1) == 1:
        return op.target
    rows = local.output_shapes[0][-2]
    start: Any = local.index("s") * rows
    known = isinstance(start, int)
    fused = _lower_right(rows, start + rows) if known else None
    first, bind = known and start == 0, binder(op)

    def run(*args: Any, **kwargs: Any) -> Tensor:
        arguments = bind(args, kwargs)
        query, key, value = (arguments.pop(name) for name in ("query", "key", "value"))
        # On the meta device only shapes count.
        arguments["is_causal"] = first or query.is_meta
        if not arguments["is_causal"]:
            arguments["attn_mask"] = (
                torch.ones(rows, start + rows, dtype=torch.bool).tril(start)
                if query.is_cpu
                else fused
            )
        key, value = (each.narrow(-2, 0, start + rows) for each in (key, value))
        return F.scaled_dot_product_attention(query, key, value, **arguments)

    return run


def _lower_right(queries: int, keys: int) -> CausalBias:
    """The causal mask that ends with the last key; made empty, as PyTorch allocates all pairs."""
    bias = causal_lower_right(0, 0)
    bias.seq_len_q, bias.seq_len_kv = queries, keys
    return bias
