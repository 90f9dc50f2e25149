"""Embedding: `v e, b s -> b s e`, a look-up in a table whose rows (`v`) may be cut too."""

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
    """Indices, features `e` and rows of the table `v` may be cut; rows leave a sum.

    Gradients that are sparse or scaled by how often an index occurs need all indices and rows
    in one place: only the features may be cut then.
    """
    given = call_arguments(op)
    indices = names(given["indices"], taken="ve")
    if given["sparse"] or given["scale_grad_by_freq"]:
        whole: Dims = (None,) * len(indices)
        return sharding_rule(
            op, ((None, "e"), whole), ((*whole, "e"),), main=Main({"e": "J"}, weight=0)
        )
    letters = {**dict.fromkeys(map(str, indices), "I"), "e": "J", "v": "K"}
    return sharding_rule(
        op,
        (("v", "e"), indices),
        ((*indices, "e"),),
        reduced="v",
        main=Main(letters, weight=0),
        kernel=_look_up,
    )


def _look_up(op: Op, local: Local) -> Callable[..., Any]:
    """Rows of other devices read as zero, so that the sum over the devices is the row."""
    if local.parts.get("v", 1) == 1:
        return op.target
    size = op.inputs[0].shape[0] // local.parts["v"]
    first = local.index("v") * size

    bind = binder(op)

    def run(*args: Any, **kwargs: Any) -> Any:
        given = bind(args, kwargs)
        indices, padding = given["indices"], given["padding_idx"]
        row = indices - first
        elsewhere = (row < 0) | (row >= size)
        found = aten.embedding.default(given["weight"], row.masked_fill(elsewhere, 0))
        found = found.masked_fill(elsewhere.unsqueeze(-1), 0)
        if padding < 0:
            return found
        # The row of padding has no gradient, whichever device holds it.
        return torch.where((indices == padding).unsqueeze(-1), found.detach(), found)

    return run
