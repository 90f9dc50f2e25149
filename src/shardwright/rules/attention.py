"""Scaled dot product attention: `b h s d, b h t d, b h t e -> b h s e`."""

from __future__ import annotations

import torch

from shardwright.graph.graph import Op
from shardwright.rules.notation import call_arguments, input_dims, sharding_rule
from shardwright.rules.rule import Dims, Main, ShardingRule, rule_for


@rule_for(torch.ops.aten.scaled_dot_product_attention.default)
def scaled_dot_product_attention(op: Op) -> ShardingRule | None:
    """Batch, heads, queries and the features of the values can be cut.

    With grouped-query attention the number of shards must divide the number of key-value heads, so
    that queries stay with their keys; a single key-value head is replicated. A causal mask compares
    positions of queries and keys, so causal queries cannot be cut. Neither can the keys (`t`) nor
    the features of queries and keys (`d`).
    """
    arguments = call_arguments(op)
    query, key, mask = arguments["query"], arguments["key"], arguments["attn_mask"]
    ndim = len(query.shape)
    if {len(value.shape) for value in (key, arguments["value"])} != {ndim}:
        return None
    queries = None if arguments["is_causal"] else "s"
    batch: Dims = ("b", "h", *(f"h{i}" for i in range(2, ndim - 2)))[: ndim - 2]
    output: Dims = (*batch, queries, "e")
    dims: dict[str, Dims] = {
        "query": (*batch, queries, None),
        "key": (*batch, None, None),
        "value": (*batch, None, "e"),
    }
    if mask is not None:
        dims["attn_mask"] = (*batch, queries, None)[ndim - len(mask.shape) :]
    grouped = arguments["enable_gqa"] and key.shape[-3] > 1
    letters = {"b": "I", **dict.fromkeys(map(str, batch[1:]), "H"), "s": "S", "e": "J"}
    return sharding_rule(
        op,
        input_dims(op, dims),
        (output,),
        capacity={str(batch[-1]): key.shape[-3]} if grouped else None,
        main=Main({name: letters[name] for name in output if name is not None}, weight=None),
        random=arguments["dropout_p"] > 0,
    )
