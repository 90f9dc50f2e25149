"""Embedding, `v e, b s -> b s e`: a lookup in a table, whose rows (`v`) can be sharded too.

An embedding bag, `v e, b _ -> b e`, returns the sum, mean or maximum of several rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwright.core.graph.custom_ops import MEAN, embedding_bag
from shardwright.core.graph.graph import Op
from shardwright.core.rules.indexed import other_shard_mask
from shardwright.core.rules.notation import (
    argument_binder,
    call_arguments,
    factor_names,
    input_factors,
    sharding_rule,
)
from shardwright.core.rules.rule import Dims, LocalSharding, MainFactors, ShardingRule, rule_for

aten = torch.ops.aten


@rule_for(aten.embedding.default)
def embedding(op: Op) -> ShardingRule:
    """Embedding, `v e, b s -> b s e`: indices, features and rows of the table can be sharded.

    With sharded rows the output is a partial sum, as in the vocabulary-parallel embedding of
    Megatron-LM. Sparse gradients, and gradients scaled by the frequency of an index, need all
    indices and rows on one device: then only the features can be sharded.
    """
    arguments = call_arguments(op)
    # `v` and `e` are the rows and the features of the table.
    indices = factor_names(arguments["indices"], exclude="ve")
    if arguments["sparse"] or arguments["scale_grad_by_freq"]:
        replicated: Dims = (None,) * len(indices)
        return sharding_rule(
            op,
            ((None, "e"), replicated),
            ((*replicated, "e"),),
            main=MainFactors({"e": "J"}, weight=0),
        )
    letters = {**dict.fromkeys(map(str, indices), "I"), "e": "J", "v": "K"}
    return sharding_rule(
        op,
        (("v", "e"), indices),
        ((*indices, "e"),),
        reduced="v",
        # The table is the first input.
        main=MainFactors(letters, weight=0),
        kernel=_build_embedding_kernel,
    )


def _find_local_table_rows(op: Op, local: LocalSharding) -> tuple[Any, int, int]:
    """Return (first table row on this device, number of local rows, number of all rows)."""
    total = op.inputs[0].shape[0]
    size = total // local.shard_counts["v"]
    return local.index("v") * size, size, total


def _build_embedding_kernel(op: Op, local: LocalSharding) -> Callable[..., Any]:
    """Build the local kernel of `embedding`; if table rows are sharded, rows of other devices are
    looked up as zero, and the outputs are partial sums."""
    if local.shard_counts.get("v", 1) == 1:
        return op.target
    first, size, total = _find_local_table_rows(op, local)
    bind = argument_binder(op)

    def run(*args: Any, **kwargs: Any) -> Any:
        arguments = bind(args, kwargs)
        indices, padding = arguments["indices"], arguments["padding_idx"]
        elsewhere = other_shard_mask(indices, first, size, total)
        # Any valid row, since the result is masked.
        row = (indices - first).masked_fill(elsewhere, 0)
        rows = aten.embedding.default(arguments["weight"], row)
        rows = rows.masked_fill(elsewhere.unsqueeze(-1), 0)
        # ATen passes -1 for a table without a padding row.
        if padding < 0:
            return rows
        # `padding_idx` is a global row, so it cannot be passed to the local lookup. Detach the row
        # instead: it has no gradient on any device.
        return torch.where((indices == padding).unsqueeze(-1), rows.detach(), rows)

    return run


# ATen's modes of `embedding_bag`: 0 is the sum, 1 the mean, 2 the maximum.
MAXIMUM = 2


@rule_for(embedding_bag)
def embedding_bag_rule(op: Op) -> ShardingRule:
    """Embedding bag, `v e, b _ -> b e`: bags, features and, except for a maximum, table rows can be
    sharded.

    Bags given by offsets cannot be sharded, as their boundaries depend on data. If gradients are
    scaled by the frequency of an index, only the features can be sharded.
    """
    arguments = call_arguments(op)
    scaled = arguments["scale_grad_by_freq"]
    bags = "b" if arguments["offsets"] is None and not scaled else None
    # Maxima over shards of the rows do not add up to the maximum over all rows.
    rows = None if scaled or arguments["mode"] == MAXIMUM else "v"
    indices = (bags, None)[: len(arguments["indices"].shape)]
    dims: dict[str, Dims] = {
        "weight": (rows, "e"),
        "indices": indices,
        "offsets": (None,),
        "per_sample_weights": indices,
    }
    letters = {"b": "I", "e": "J", "v": "K"}
    return sharding_rule(
        op,
        input_factors(op, dims),
        ((bags, "e"),),
        reduced="v",
        main=MainFactors({f: letters[f] for f in (bags, "e", rows) if f is not None}, weight=0),
        kernel=_build_embedding_bag_kernel,
    )


def _build_embedding_bag_kernel(op: Op, local: LocalSharding) -> Callable[..., Any]:
    """Build the local kernel of `embedding_bag`; if table rows are sharded, rows on other devices
    have weight 0, and means are divided by the number of entries on all devices."""
    if local.shard_counts.get("v", 1) == 1:
        return op.target
    first, size, total = _find_local_table_rows(op, local)
    bind = argument_binder(op)

    def run(*args: Any, **kwargs: Any) -> Tensor:
        arguments = bind(args, kwargs)
        mean, padding = arguments["mode"] == MEAN, arguments["padding_idx"]
        table, indices = arguments["weight"], arguments["indices"]
        weights = arguments["per_sample_weights"]
        # Rows are left out of a bag by weight 0: padding here, rows of other devices below.
        if weights is None:
            weights = torch.ones_like(indices, dtype=table.dtype)
        if padding is not None:
            weights = weights.masked_fill(indices == padding, 0)
        elsewhere = other_shard_mask(indices, first, size, total)
        row = (indices - first).masked_fill(elsewhere, 0)

        # In mode sum: PyTorch supports weights of samples in no other mode.
        def bags(rows: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
            last = arguments["include_last_offset"]
            return embedding_bag(
                rows, indices, arguments["offsets"], weights, include_last_offset=last
            )

        bag_sums = bags(table, row, weights.masked_fill(elsewhere, 0))
        if not mean:
            return bag_sums
        # Count all entries of a bag, also those whose rows other devices have.
        count = bags(table.new_ones(1, 1), torch.zeros_like(indices), weights)
        # As in PyTorch, the mean of an empty bag is 0.
        return bag_sums / count.clamp(min=1)

    return run
