"""The largest or smallest elements along a sharded dimension: each device all-gathers the first
elements of its shard, its *candidates*, and selects among those of all shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from shardwright.core.graph.graph import Op
from shardwright.core.rules.gathered import InputShard, ShardCombination, Statistics
from shardwright.core.rules.notation import argument, factor_names, overloads, unsharded_at
from shardwright.core.rules.rule import ShardingRule, rule_for


@rule_for(*overloads("topk"))
def topk(op: Op) -> ShardingRule:
    """Largest or smallest elements, `b s -> b _, b _`."""
    x = op.inputs[0]
    dim = argument(op, "dim") % max(len(x.shape), 1)
    dims = factor_names(x)
    return TOPK.rule(op, (dims,), (unsharded_at(dims, dim),) * 2, (dim,)[: len(x.shape)])


@rule_for(*overloads("kthvalue"))
def kthvalue(op: Op) -> ShardingRule:
    """The k-th smallest element, `b s -> b, b`."""
    x = op.inputs[0]
    dim = argument(op, "dim") % max(len(x.shape), 1)
    dims = factor_names(x)
    is_kept = argument(op, "keepdim") or not dims
    outputs = unsharded_at(dims, dim) if is_kept else (*dims[:dim], *dims[dim + 1 :])
    return KTHVALUE.rule(op, (dims,), (outputs,) * 2, (dim,)[: len(x.shape)])


def _select_candidates(shard: InputShard, count: int, largest: bool) -> Statistics:
    (dim,), (offset,) = shard.dims, shard.offsets
    # A shard may have fewer elements than are selected.
    values, indices = shard.x.topk(min(count, shard.x.shape[dim]), dim, largest)
    return values, indices + offset


def _join_candidates(shard: InputShard, gathered: Statistics) -> tuple[Tensor, Tensor]:
    """Return the candidates of all shards, and their indices, along one dimension."""
    (dim,) = shard.dims
    values, indices = (each.movedim(0, dim).flatten(dim, dim + 1) for each in gathered)
    return values, indices


def _count_topk(arguments: Mapping[str, Any], size: int) -> int:
    return int(arguments["k"])


def _select_local_topk(shard: InputShard) -> Statistics:
    return _select_candidates(shard, shard.arguments["k"], shard.arguments["largest"])


def _select_topk(shard: InputShard, gathered: Statistics) -> Sequence[Tensor]:
    (dim,), arguments = shard.dims, shard.arguments
    candidates, indices = _join_candidates(shard, gathered)
    values, selected = candidates.topk(
        arguments["k"], dim, arguments["largest"], arguments["sorted"]
    )
    return values, indices.gather(dim, selected)


def _count_kthvalue(arguments: Mapping[str, Any], size: int) -> int:
    """Return the position of the k-th element from the nearer end."""
    return min(int(arguments["k"]), size - int(arguments["k"]) + 1)


def _select_local_first_k(shard: InputShard) -> Statistics:
    size, k = shard.shape[shard.dims[0]], shard.arguments["k"]
    count = _count_kthvalue(shard.arguments, size)
    return _select_candidates(shard, count, largest=count != k)


def _select_kthvalue(shard: InputShard, gathered: Statistics) -> Sequence[Tensor]:
    (dim,), k = shard.dims, shard.arguments["k"]
    candidates, indices = _join_candidates(shard, gathered)
    count = _count_kthvalue(shard.arguments, shard.shape[dim])
    # Among candidates from the largest on, as many elements are larger as among all.
    rank = k if count == k else candidates.shape[dim] - count + 1
    values, selected = candidates.kthvalue(rank, dim, keepdim=True)
    return values, indices.gather(dim, selected)


TOPK = ShardCombination(_select_local_topk, _select_topk, num_indices=1, num_candidates=_count_topk)
KTHVALUE = ShardCombination(
    _select_local_first_k, _select_kthvalue, num_indices=1, num_candidates=_count_kthvalue
)
