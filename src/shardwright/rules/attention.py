"""Scaled dot product attention: `b h s d, b h t d, b h t e -> b h s e`."""

from __future__ import annotations

import torch

from shardwright.graph.graph import Op
from shardwright.rules.notation import call_arguments, input_dims, sharding_rule
from shardwright.rules.rule import Dims, Main, ShardingRule, rule_for


@rule_for(torch.ops.aten.scaled_dot_product_attention.default)
def scaled_dot_product_attention(op: Op) -> ShardingRule | None:
    """Batch, heads, queries and the features of the values may be cut.

    With grouped heads as many parts are possible as there are heads of keys and values, so that
    queries and their keys stay together; a single one is shared by all. A causal mask compares
    positions of queries and keys: queries stay whole there. The keys (`t`) and the features of
    queries and keys (`d`) stay whole.
    """
    given = call_arguments(op)
    query, key, mask = given["query"], given["key"], given["attn_mask"]
    ndim = len(query.shape)
    queries = None if given["is_causal"] else "s"
    batch: Dims = ("b", "h", *(f"h{i}" for i in range(2, ndim - 2)))[: ndim - 2]
    output: Dims = (*batch, queries, "e")
    dims: dict[str, Dims] = {
        "query": (*batch, queries, None),
        "key": (*batch, None, None),
        "value": (*batch, None, "e"),
    }
    if mask is not None:
        dims["attn_mask"] = (*batch, queries, None)[ndim - len(mask.shape) :]
    grouped = given["enable_gqa"] and key.shape[-3] > 1
    letters = {"b": "I", **dict.fromkeys(map(str, batch[1:]), "H"), "s": "S", "e": "J"}
    return sharding_rule(
        op,
        input_dims(op, dims),
        (output,),
        capacity={str(batch[-1]): key.shape[-3]} if grouped else None,
        main=Main({name: letters[name] for name in output if name is not None}, weight=None),
        random=given["dropout_p"] > 0,
    )
