"""Attention along the sequence whose keys and values go round a ring, where they were gathered.

What is predicted to be fastest mostly gathers them, as a ring sends more. But it is a ring that
holds few of them.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from math import prod

from shardwright.core.graph.graph import Graph, Op
from shardwright.core.layout.layout import DeviceMatrix
from shardwright.core.rules import rule_of
from shardwright.core.rules.rule import Cuts, ShardingRule
from shardwright.core.search.indexed_graph import index_graph

LEAST = 1 / 256
"""Of a device's memory: a ring is not worth another candidate where gathered keys and values of one
operator take less."""


def ring_cuts(
    graph: Graph, mesh: DeviceMatrix, cuts: Mapping[str, Cuts], pinned: Container[str], limit: int
) -> Mapping[str, Cuts] | None:
    """`cuts` with operators cut by the factor that cuts further inputs too, where there is one and
    these take much of the memory; None if there is nothing to change.

    Args:
        limit: bytes of a device.
    """
    changed: dict[str, Cuts] = {}
    for op, op_type in zip(graph.ops, index_graph(graph).op_types, strict=True):
        mine = cuts.get(op.name, {})
        if not op_type.joined or op.name in pinned:
            continue
        rule = rule_of(op)
        assert rule is not None
        for factor, other in rule.joined.items():
            axes = mine.get(other)
            if not axes or rule.capacity[factor] % mesh.size(axes):
                continue
            if _gathered(op, rule, mesh, mine, factor) >= LEAST * limit:
                changed[op.name] = {factor if f == other else f: a for f, a in mine.items()}
    return {**cuts, **changed} if changed else None


def _gathered(op: Op, rule: ShardingRule, mesh: DeviceMatrix, cuts: Cuts, factor: str) -> int:
    """Bytes of the inputs that only `factor` cuts further."""
    read, _ = rule.layouts(mesh, cuts)
    return sum(
        prod(layout.shard_shape(value.shape)) * value.itemsize
        for value, dims, layout in zip(op.inputs, rule.inputs, read, strict=True)
        if factor in dims
    )
