"""Replace gathered keys and values by ring attention, which needs less memory.

In attention that is cut along the sequence, gathering keys and values is mostly predicted to be
faster, since a ring sends more. But a ring holds only a few shards of them at a time.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from math import prod

from shardwright.core.graph.graph import Graph, Op
from shardwright.core.layout.layout import DeviceMatrix
from shardwright.core.rules import rule_of
from shardwright.core.rules.rule import Cuts, ShardingRule
from shardwright.core.search.indexed_graph import index_graph

MIN_MEMORY_SHARE = 1 / 256
"""The share of a device's memory that the gathered keys and values of one operator must take for a
ring to be worth another candidate."""


def ring_cuts(
    graph: Graph, mesh: DeviceMatrix, cuts: Mapping[str, Cuts], pinned: Container[str], limit: int
) -> Mapping[str, Cuts] | None:
    """Return `cuts` with ring attention where gathered inputs take much memory.

    An operator changes from a factor to the one joined with it, which cuts the gathered inputs too.

    Args:
        pinned: names of operators whose cuts stay as they are.
        limit: bytes of a device.

    Returns:
        None if no operator changes.
    """
    changed: dict[str, Cuts] = {}
    for op, op_type in zip(graph.ops, index_graph(graph).op_types, strict=True):
        op_cuts = cuts.get(op.name, {})
        if not op_type.joined or op.name in pinned:
            continue
        rule = rule_of(op)
        assert rule is not None
        for factor, other in rule.joined.items():
            axes = op_cuts.get(other)
            # The ring also cuts the keys and values, whose length may not be divisible.
            if not axes or rule.capacity[factor] % mesh.size(axes):
                continue
            if _gathered_bytes(op, rule, mesh, op_cuts, factor) >= MIN_MEMORY_SHARE * limit:
                changed[op.name] = {factor if f == other else f: a for f, a in op_cuts.items()}
    return {**cuts, **changed} if changed else None


def _gathered_bytes(op: Op, rule: ShardingRule, mesh: DeviceMatrix, cuts: Cuts, factor: str) -> int:
    """Bytes on a device of the inputs that only `factor` would shard."""
    read, _ = rule.layouts(mesh, cuts)
    return sum(
        prod(layout.shard_shape(value.shape)) * value.itemsize
        for value, dims, layout in zip(op.inputs, rule.inputs, read, strict=True)
        if factor in dims
    )
