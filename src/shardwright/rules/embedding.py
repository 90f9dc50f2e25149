"""Embedding: `v e, b s -> b s e`, a lookup in a table whose rows (`v`) can be cut too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwright.graph.graph import Op
from shardwright.rules.notation import binder, call_arguments, names, sharding_rule
from shardwright.rules.rule import Dims, Local, Main, ShardingRule, rule_for

aten = torch.ops.aten


@rule_for(aten.embedding.default)
def embedding(op: Op) -> ShardingRule:
    """Indices, features `e` and rows `v` of the table can be cut; rows give a partial sum.

    Sparse gradients, and those scaled by the frequency of an index, need all indices and rows on
    one device, so only the features can be cut then.
    """
    arguments = call_arguments(op)
    indices = names(arguments["indices"], exclude="ve")
    if arguments["sparse"] or arguments["scale_grad_by_freq"]:
        replicated: Dims = (None,) * len(indices)
        return sharding_rule(
            op, ((None, "e"), replicated), ((*replicated, "e"),), main=Main({"e": "J"}, weight=0)
        )
    letters = {**dict.fromkeys(map(str, indices), "I"), "e": "J", "v": "K"}
    return sharding_rule(
        op,
        (("v", "e"), indices),
        ((*indices, "e"),),
        reduced="v",
        main=Main(letters, weight=0),
        kernel=_sharded_lookup,
    )


def _sharded_lookup(op: Op, local: Local) -> Callable[..., Any]:
    """Rows of other devices count as zero, so that the sum over devices is the row."""
    if local.shard_counts.get("v", 1) == 1:
        return op.target
    size = op.inputs[0].shape[0] // local.shard_counts["v"]
    first = local.index("v") * size

    bind = binder(op)

    def run(*args: Any, **kwargs: Any) -> Any:
        arguments = bind(args, kwargs)
        indices, padding = arguments["indices"], arguments["padding_idx"]
        row = indices - first
        elsewhere = (row < 0) | (row >= size)
        rows = aten.embedding.default(arguments["weight"], row.masked_fill(elsewhere, 0))
        rows = rows.masked_fill(elsewhere.unsqueeze(-1), 0)
        if padding < 0:
            return rows
        # The padding row has no gradient, whichever device holds it.
        return torch.where((indices == padding).unsqueeze(-1), rows.detach(), rows)

    return run
