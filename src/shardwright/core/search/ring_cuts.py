"""Replace gathered keys and values by ring attention, which needs less memory.

For attention that is sharded along the sequence, searches usually all-gather keys and values, since
ring attention sends more bytes. But a device in ring attention stores only a few shards of keys and
values at a time.
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
"""Operators whose gathered keys and values need less than this fraction of the memory limit do not
use ring attention."""


def ring_cuts(
    graph: Graph, mesh: DeviceMatrix, cuts: Mapping[str, Cuts], pinned: Container[str], limit: int
) -> Mapping[str, Cuts] | None:
    """Return `cuts` with ring attention where all-gathered keys and values need too much memory.

    Axes that cut the sequence factor of an operator cut the factor joined with it instead
    (`ShardingRule.joined`), which also shards the keys and values.

    Args:
        pinned: names of operators whose cuts stay as they are.
        limit: memory limit in bytes per device.

    Returns:
        None if no operator changes.
    """
    changed: dict[str, Cuts] = {}
    # Only attention has joined factors: its sequence, and the ring that also cuts keys and values.
    for op in (graph.ops[index] for index in index_graph(graph).joined):
        op_cuts = cuts.get(op.name, {})
        if op.name in pinned:
            continue
        rule = rule_of(op)
        assert rule is not None
        for ring, sequence in rule.joined.items():
            axes = op_cuts.get(sequence)
            # The ring also cuts the keys and values, whose length may not be divisible.
            if not axes or rule.capacity[ring] % mesh.size(axes):
                continue
            if _num_gathered_bytes(op, rule, mesh, op_cuts, ring) >= MIN_MEMORY_SHARE * limit:
                # The same axes in the same place, so that the queries keep their layout.
                changed[op.name] = {ring if f == sequence else f: a for f, a in op_cuts.items()}
    return {**cuts, **changed} if changed else None


def _num_gathered_bytes(
    op: Op, rule: ShardingRule, mesh: DeviceMatrix, cuts: Cuts, factor: str
) -> int:
    """Return the bytes on a device of the inputs of `op` that have a dim with `factor`, under
    `cuts`."""
    layouts, _ = rule.layouts(mesh, cuts)
    return sum(
        prod(layout.shard_shape(value.shape)) * value.itemsize
        for value, dims, layout in zip(op.inputs, rule.inputs, layouts, strict=True)
        if factor in dims
    )
